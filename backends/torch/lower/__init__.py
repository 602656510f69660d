"""From a graph to a program: every node by the first lowering that takes it, under names that Python takes.

Never here: lowerings of single ops (`ops`), text of classes (`codegen`).
"""
