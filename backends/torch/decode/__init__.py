"""The decode step of a model: one token for each row, few kernels a layer, over the weights of the generated module.

`lowering` takes the graph that passes have fused, node by node, by the functions in `ops`; `source` renders decode.py.
Never here: the kernels themselves; which nodes one computes at once, which passes decide.
"""
