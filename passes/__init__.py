"""Rewrites of graphs: the pass and pipeline machinery, patterns, and every pass with its declared effect.

Never here: a target's op names, file formats, torch and onnx; imports from backends or frontends.
"""

import importlib
from typing import TYPE_CHECKING, Any

if __name__ == "passes":
    raise ImportError("import weft.passes, not passes: the bare name makes a second copy of every class")

if TYPE_CHECKING:
    from .core.base import Pass, all_passes, lookup
    from .core.pipeline import Phase, Pipeline
    from .core.text import parse_pipeline
    from .core.trace import Trace
    from .default import default_pipeline
    from .edits.driver import Refusal, Rule, apply_rules
    from .edits.legalization import legalize
    from .edits.pattern import ANY, Pattern
    from .report import Report
    from .runner import run_passes

_HOME = {
    "ANY": "edits.pattern",
    "Pass": "core.base",
    "Pattern": "edits.pattern",
    "Phase": "core.pipeline",
    "Pipeline": "core.pipeline",
    "Refusal": "edits.driver",
    "Report": "report",
    "Rule": "edits.driver",
    "Trace": "core.trace",
    "all_passes": "core.base",
    "apply_rules": "edits.driver",
    "default_pipeline": "default",
    "legalize": "edits.legalization",
    "lookup": "core.base",
    "parse_pipeline": "core.text",
    "run_passes": "runner",
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
