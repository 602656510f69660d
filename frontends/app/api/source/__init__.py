"""Sources: the models that a command names, as graphs with weights.

Never here: file formats, rewriting.
"""
