"""Fused ops: each computes what one kernel of a decode step computes; its body defines it in simpler ops.

Fusion passes emit them, except `choose_tokens`, which is appended to a model. A backend lowers each to a kernel or to
its body.
Never here: an op that its body in simpler ops does not define.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
