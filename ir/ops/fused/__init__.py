"""Fused ops: what one kernel of a decode step computes, defined by the simpler ops that it stands for.

Passes that fuse emit them; a backend lowers them to kernels, or takes their bodies.
Never here: an op with a meaning of its own.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
