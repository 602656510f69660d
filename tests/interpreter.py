"""Triton's interpreter, without work that it repeats."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def quicken(load: bool = False) -> None:
    """Let a call of a device function not prepare Triton's language again, where the kernel around it has done so.

    The interpreter puts its own functions into `triton.language` and its `core` for every kernel, and once more for
    every function that a kernel calls: a third of its time. `load` imports the interpreter first.
    """
    if load:
        importlib.import_module("triton.runtime.interpreter")
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "prepared"):
        return
    interpreter.prepared = set()  # modules that are, in the kernel that runs
    languages: dict[Any, set[str]] = {}  # that functions see
    prepare, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = {id(module): module.__name__ for module in (interpreter.tl, interpreter.tl.core)}

    def once(function: Any) -> Any:
        if function not in languages:
            languages[function] = {modules[id(v)] for v in function.__globals__.values() if id(v) in modules}
        if languages[function] <= interpreter.prepared:
            return None
        interpreter.prepared |= languages[function]
        return prepare(function)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter.prepared = set()
        return run(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched
