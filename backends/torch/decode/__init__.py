"""The decode step of a model: one token per batch row, few kernels per layer, on the weights of the generated module.

`lower_step` lowers the fused graph node by node, by the functions in `ops`; `step_source` renders decode.py.
Never here: the kernels themselves; fusion of nodes, which passes decide.
"""
