"""Guards inside the frameworks people train with. One file a framework; importing one imports its
framework.
"""
