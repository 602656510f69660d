"""Sources: the models that a command names, as graphs with weights, also of compiled folders.

Never here: file formats, passes.
"""
