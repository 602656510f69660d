"""The tiny models of the table test: a row says the transformers class, its config, and how its reference runs.

Every family has rows for each arrangement its configs can ask for; a file here holds those of one kind of models. All
parameters are drawn anew: vectors (norms, biases, sinks) around their initial values, matrices (routers too) with a
deviation of 0.2.
"""

from __future__ import annotations

import importlib
import pkgutil

from .row import Row, encoder_case, error, randomized, reference
from .sizes import COMMON, GQA, LENGTH, MHA, TIED, UNTIED, VOCAB, WINDOW

ROWS: dict[str, Row] = {}
for _file in pkgutil.iter_modules(__path__):
    ROWS |= getattr(importlib.import_module(f".{_file.name}", __name__), "ROWS", {})

__all__ = [
    "COMMON",
    "GQA",
    "LENGTH",
    "MHA",
    "ROWS",
    "TIED",
    "UNTIED",
    "VOCAB",
    "WINDOW",
    "Row",
    "encoder_case",
    "error",
    "randomized",
    "reference",
]
