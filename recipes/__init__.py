"""The four training systems of the source reports, each with its natural failure, unguarded and
guarded.
"""
