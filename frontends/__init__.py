"""Sources of graphs: the DSL and its presets, Hugging Face folders, GGUF files; also the command line and the server.

Never here: rewrites, lowerings, anything a target decides. A model family is a table here, not a class.
"""

import importlib
from typing import Any

if __name__ == "frontends":
    raise ImportError("import weft.frontends, not frontends: the bare name makes a second copy of every class")

from weft.ir.display import register_renderer
from weft.ir.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)


def _show(source: Any, **options: Any) -> Any:
    return importlib.import_module(".app.api.draw.notebook", __name__).show(source, **options)


register_renderer(_show)
