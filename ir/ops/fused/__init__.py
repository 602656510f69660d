"""Fused ops: the computation of one kernel of a decode step as an op, defined by its body in simpler ops.

Passes that fuse emit them, but for the choice of a token, which follows a model; a backend lowers them to kernels, or
takes their bodies.
Never here: an op with a meaning of its own.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
