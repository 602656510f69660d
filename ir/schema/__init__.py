"""The schema of an op: operands, attributes, type function, cost, body, example cases.

Never here: an op (`ops` has them), a graph.
"""
