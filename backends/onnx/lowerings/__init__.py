"""Lowerings to ONNX operators, one file per family of ops. Importing this package fills the registry.

Never here: the registry and the emitter (one level up), files on disk.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
