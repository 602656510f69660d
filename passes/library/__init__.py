"""Every pass, one file per idea. Importing this package fills the registry.

Never here: the machinery that passes are made with.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
