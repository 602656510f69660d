"""Lower a graph to a program: the first lowering that accepts a node emits it; names become valid Python identifiers.

Never here: lowerings of single ops (`ops`), source of classes (`codegen`).
"""
