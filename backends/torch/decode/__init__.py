"""Code generation for the decode step: it computes one token per batch row in few kernels, with the module's weights.

`lower_step` lowers the fused graph node by node, by the functions in `ops`; `step_source` renders decode.py.
Never here: the kernels themselves; fusion of nodes, which passes decide.
"""
