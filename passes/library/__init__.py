"""Every pass, one file per idea, in a folder per kind. Importing this package fills the registry.

Never here: code that several kinds of passes share (`edits`, `analysis`), facts about a target.
"""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
