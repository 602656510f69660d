"""Every op as a function of values: ``weft.ops.softmax(x, axis=-1)``. `weft ops` lists them, ops.pyi has their types.

An op returns a value, or a named tuple of several (``TopKResults(values, indices)``).
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from typing import Any


def __getattr__(name: str) -> Any:
    if name[0] == "_":
        raise AttributeError(f"module 'weft.ops' has no attribute {name!r}")
    calls, registry = importlib.import_module("weft.ir.schema.signature"), importlib.import_module("weft.ir.ops").OPS
    if (op := registry.get(name)) is not None:
        return op
    for op in registry.values():
        if op.output_names and name == calls.results_class_name(op.name):
            return calls.results_class(op.name, op.output_names)
    near = importlib.import_module("difflib").get_close_matches(name, registry, 1)
    raise AttributeError(f"no op is called {name!r}{f'; did you mean {near[0]}?' if near else ''}")


def __dir__() -> list[str]:
    return sorted(importlib.import_module("weft.ir.ops").OPS)
