"""From a graph to a program: every node by the first lowering that accepts it, with names that are valid in Python.

Never here: lowerings of single ops (`ops`), source of classes (`codegen`).
"""
