"""Lowerings of a decode step: kernel calls for fused ops, by theme; importing the package registers them all.

Never here: kernels themselves, except those generated for user-defined recurrences (`scan_kernel`).
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
