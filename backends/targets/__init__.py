"""The targets of weft, a file per runtime. Importing this package imports all of its files, which register targets.

Never here: lowerings, emitters and executors, which a target imports when it needs them; heavy imports at module level.
"""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f".{_file.name}", __name__)
