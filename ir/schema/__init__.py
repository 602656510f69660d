"""The schema of an op: operands, attributes, type function, cost, body, example cases.

Never here: ops themselves (`ops` has them), graphs.
"""
