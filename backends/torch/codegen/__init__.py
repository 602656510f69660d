"""From statements to the source of a module: methods, classes, names, docstrings.

Never here: the computation of an op.
"""
