"""The decode step of a model: one token for each row, few kernels a layer, over the weights of the generated module.

`patterns` recognizes what a kernel computes at once, `lowering` writes it, `source` renders the file decode.py.
Never here: the kernels themselves.
"""
