"""The tiny models of the table test: a row says the transformers class, its config, and how its reference runs.

Every family has rows for each arrangement its configs can ask for; a file here holds those of one kind of models, as
`ROWS` or, if the graph has nothing that others have not, as `ALIKE`: these are in the table test, not in the zoo. All
parameters are drawn anew: vectors (norms, biases, sinks) around their initial values, matrices (routers too) with a
deviation of 0.2.
"""

from __future__ import annotations

import importlib
import pkgutil

from .row import Row, encoder_case, error, randomized, reference
from .sizes import COMMON, GQA, LENGTH, MHA, TIED, UNTIED, VOCAB, WINDOW

VARIED: dict[str, Row] = {}
ALIKE: dict[str, Row] = {}
for _file in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f".{_file.name}", __name__)
    VARIED |= getattr(_module, "ROWS", {})
    ALIKE |= getattr(_module, "ALIKE", {})
ROWS = VARIED | ALIKE

__all__ = [
    "ALIKE",
    "COMMON",
    "GQA",
    "LENGTH",
    "MHA",
    "ROWS",
    "TIED",
    "UNTIED",
    "VARIED",
    "VOCAB",
    "WINDOW",
    "Row",
    "encoder_case",
    "error",
    "randomized",
    "reference",
]
