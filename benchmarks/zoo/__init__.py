"""A failure zoo: real incidents rebuilt as tiny CPU runs, with the right answer to each, and
healthy controls.
"""
