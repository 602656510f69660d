"""Fused ops: the computation of one kernel of a decode step as an op, defined by its body in simpler ops.

Fusion passes emit them, except token sampling, which is appended to a model; a backend lowers them to kernels or uses
their bodies.
Never here: an op with a meaning of its own.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
