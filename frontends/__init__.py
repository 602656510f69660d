"""Sources of graphs: the DSL and its presets, Hugging Face folders, GGUF files, and the command line.

Never here: rewrites, lowerings, anything a target decides. A model family is a table here, not a class.
"""

import importlib
from typing import TYPE_CHECKING, Any

if __name__ == "frontends":
    raise ImportError("import weft.frontends, not frontends: the bare name makes a second copy of every class")

from weft.ir.display import register_renderer

if TYPE_CHECKING:
    from .app.api.source.sources import load_source
    from .model import Model
    from .models.presets import PRESETS

_HOME = {"Model": "app.api.source.sources", "PRESETS": "models.presets", "load_source": "app.api.source.sources"}

__all__ = ["PRESETS", "Model", "load_source"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'weft.frontends' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def _show(source: Any, **options: Any) -> Any:
    return importlib.import_module(".app.api.draw.notebook", __name__).show(source, **options)


register_renderer(_show)
