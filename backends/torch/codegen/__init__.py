"""From statements to the text of a module: methods, classes, names, docstrings.

Never here: what an op computes.
"""
