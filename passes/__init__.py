"""What may be done to a graph: the pass and pipeline machinery, patterns, and every rewrite with its declared effect.

Never here: a target's op names, file formats, torch and onnx; imports from backends or frontends.
"""

import importlib
from typing import TYPE_CHECKING, Any

if __name__ == "passes":
    raise ImportError("import weft.passes, not passes: the bare name makes a second copy of every class")

if TYPE_CHECKING:
    from .base import Pass, all_passes, lookup
    from .driver import Refusal, Rule, apply_rules
    from .legalization import legalize
    from .pattern import ANY, Pattern
    from .pipeline import Phase, Pipeline, default_pipeline, run_passes
    from .report import Report
    from .text import parse_pipeline
    from .trace import Trace

_HOME = {
    "ANY": "pattern",
    "Pass": "base",
    "Pattern": "pattern",
    "Phase": "pipeline",
    "Pipeline": "pipeline",
    "Refusal": "driver",
    "Report": "report",
    "Rule": "driver",
    "Trace": "trace",
    "all_passes": "base",
    "apply_rules": "driver",
    "default_pipeline": "pipeline",
    "legalize": "legalization",
    "lookup": "base",
    "parse_pipeline": "text",
    "run_passes": "pipeline",
}

__all__ = [
    "ANY",
    "Pass",
    "Pattern",
    "Phase",
    "Pipeline",
    "Refusal",
    "Report",
    "Rule",
    "Trace",
    "all_passes",
    "apply_rules",
    "default_pipeline",
    "legalize",
    "lookup",
    "parse_pipeline",
    "run_passes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'weft.passes' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
