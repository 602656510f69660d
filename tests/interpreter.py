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
    _call_directly(interpreter)


def _check_overflow(semantic: Any, x: Any, y: Any, op: Any) -> None:
    """Refuse sums and products of integers that overflow, as the interpreter does by a dozen operations of its own."""
    kind = x.type.scalar
    if kind.int_bitwidth < 64 and semantic.builder.options.sanitize_overflow:
        exact = EXACT[op.__name__](x.handle.data.astype(np.int64), y.handle.data.astype(np.int64))
        fits = (kind.get_int_min_value() <= exact) & (exact <= kind.get_int_max_value())
        assert fits.all(), f"{op.__name__} of int{kind.int_bitwidth} overflows"


def _know_shapes(language: Any) -> None:
    """Let blocks of one shape, and their types, share it and what follows from it: every result has both of its own.

    The name of a type, which is for messages, is written where it is read.
    """
    known: dict[tuple[int, ...], Any] = {}  # shape and size of types
    shown: dict[tuple[int, ...], Any] = {}  # the same as constants of the language, of blocks
    create, make, equals = language.block_type.__init__, language.tensor.__init__, language.tuple.__eq__

    def create_known(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if sizes in known:
            self.element_ty, (self.shape, self.numel) = element_ty, known[sizes]
        else:
            create(self, element_ty, shape)
            known[sizes] = self.shape, self.numel

    def make_known(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if shape in shown:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shown[shape]
        else:
            make(self, handle, type)
            shown[shape] = self.shape, self.numel

    def equal_known(self: Any, other: Any) -> Any:
        return language.constexpr(True) if self is other else equals(self, other)

    name = functools.cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    name.__set_name__(language.block_type, "name")
    language.block_type.name = name
    language.block_type.__init__, language.tensor.__init__ = create_known, make_known
    language.tuple.__eq__ = equal_known


def _call_directly(interpreter: Any) -> None:
    """Let functions of the language be called without copying their keywords."""

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch


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
