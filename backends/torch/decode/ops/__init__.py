"""Lowerings of a decode step: calls of kernels for fused ops, by theme; importing the package registers them all.

Never here: kernels themselves, other than the text of those that are generated for recurrences of one's own
(`scan_kernel`).
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
