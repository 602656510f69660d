"""The decode step of a model: one token per batch row, few kernels per layer, on the weights of the generated module.

`lower_step` lowers the graph that passes have fused, node by node, by the functions in `ops`; `step_source` writes it
as decode.py.
Never here: the kernels themselves; fusion of nodes, which passes decide.
"""
