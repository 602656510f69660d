"""Every target, a file for each runtime. Importing this package imports all of its files, which register targets.

Never here: lowerings, emitters and executors, which a target only names; heavy imports before they are used.
"""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f".{_file.name}", __name__)
