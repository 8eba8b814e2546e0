"""ResTran + mHC, small: a multi-frame licence-plate reader with manifold-constrained
hyper-connections.
"""
