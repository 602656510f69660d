"""Model families as tables of differences: config keys to settings, checkpoint names to parameters.

All tables use one vocabulary of settings (`tables`), which one function converts into a model. A rule (`Rule`) returns
the value of a setting, given a config; a template (`Template`) returns the recipe of a parameter, given a checkpoint.
Never here: file formats.
"""

from __future__ import annotations

import importlib
import pkgutil

from ..loading import LoadedModel, build_from_table, load
from ..tables.family import Families, Family, GGUFArchitecture, key
from ..tables.settings import Settings, build

FAMILIES = Families("family", __name__, "see `weft families`")  # by model_type
for _file in pkgutil.walk_packages(__path__, f"{__name__}."):  # register the tables of every file in this folder
    FAMILIES.register(*vars(importlib.import_module(_file.name)).values())


def index_tables() -> dict[str, GGUFArchitecture]:
    """Return the tables of all GGUF architectures, keyed by their names in files."""
    tables = [family.gguf for family in FAMILIES.values() if family.gguf is not None]
    return {name: table for table in tables for name in table.model_types}


__all__ = ["FAMILIES", "Family", "LoadedModel", "Settings", "build", "build_from_table", "index_tables", "key", "load"]
