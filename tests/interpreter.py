"""Triton's interpreter, without work that it repeats."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import numpy as np

EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def quicken(load: bool = False) -> None:
    """Make Triton's interpreter several times as fast, with the same results and checks; `load` imports it first."""
    if load:
        importlib.import_module("triton.runtime.interpreter")
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "prepared"):
        return
    _prepare_once(interpreter)
    of_scalar = functools.cache(interpreter._get_np_dtype)  # from a dict that every call makes
    interpreter._get_np_dtype = lambda dtype: np.dtype(np.uint64) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
    interpreter.interpreter_semantic.__class__.binary_op_sanitize_overflow_impl = _check_overflow
    _know_shapes(interpreter.tl)


def _check_overflow(semantic: Any, x: Any, y: Any, op: Any) -> None:
    """Refuse sums and products of integers that overflow, as the interpreter does by a dozen operations of its own."""
    kind = x.type.scalar
    if kind.int_bitwidth < 64 and semantic.builder.options.sanitize_overflow:
        exact = EXACT[op.__name__](x.handle.data.astype(np.int64), y.handle.data.astype(np.int64))
        fits = (kind.get_int_min_value() <= exact) & (exact <= kind.get_int_max_value())
        assert fits.all(), f"{op.__name__} of int{kind.int_bitwidth} overflows"


def _know_shapes(language: Any) -> None:
    """Let types of blocks of one shape share it, and what is checked about it: every result has a type of its own."""
    known: dict[tuple[int, ...], Any] = {}
    create = language.block_type.__init__

    def create_known(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if sizes in known:
            self.element_ty, (self.shape, self.numel) = element_ty, known[sizes]
            self.name = f"<{sizes}, {element_ty}>"
        else:
            create(self, element_ty, shape)
            known[sizes] = self.shape, self.numel

    language.block_type.__init__ = create_known


def _prepare_once(interpreter: Any) -> None:
    """Let a call of a device function not prepare Triton's language again, where the kernel around it has done so.

    The interpreter puts its own functions into `triton.language` and its `core` for every kernel, and once more for
    every function that a kernel calls.
    """
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
