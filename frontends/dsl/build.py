"""Emission of nodes by modules: scopes from field names, parameters on first use, facts provided from outside.

While a graph is being built (`building`), every module call runs in a frame. A module called by another gets the name
of the field that holds it there ("attn", "layers.3"), which becomes its scope. `named` and `scope` say otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar, dataclass_transform, overload

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param, Value
from weft.ir.graph.origins import Origin
from weft.ir.op import Op
from weft.ir.recipes import Full, Normal, Recipe, Uniform
from weft.ir.recipes.recipe import call_order
from weft.ir.types import TensorType, dtypes

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
_HERE = str(Path(__file__).parent.parent)  # weft.frontends
Layer = Callable[..., Value]  # a module of x [batch, seq, dim] that makes as much, perhaps of more operands
Init = Callable[[tuple[int, ...], str, int], Recipe]  # shape, full name, seed -> recipe
STD = 0.02  # of what says nothing else


@dataclass
class _Frame:
    """One running call of a module; `inline` names the modules it made on the way."""

    module: Any
    name: str
    children: dict[int, str]
    inline: dict[int, tuple[Any, str]] = field(default_factory=dict)


@dataclass
class _Builder:
    graph: Graph
    seed: int
    frames: list[_Frame]
    facts: dict[str, Value]
    contributed: dict[str, Value] = field(default_factory=dict)
    kept: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    init: Init | None = None
    override: str | None = None


_CURRENT: ContextVar[_Builder | None] = ContextVar("weft_builder", default=None)


def current() -> _Builder:
    """The builder at work.

    Raises:
        WeftError: if no graph is being built.
    """
    builder = _CURRENT.get()
    if builder is None:
        raise WeftError(
            "modules emit into a graph being built: use model.graph(), trace(...) or `with building(graph)`"
        )
    return builder


@contextlib.contextmanager
def building(graph: Graph, seed: int = 0) -> Iterator[Graph]:
    """Module calls inside emit into `graph`; `seed` goes into the random initialization of its parameters.

    Where the block ends, what modules contributed becomes further outputs (see `contribute`).
    """
    builder = _Builder(graph, seed, [_Frame(None, "", {})], {})
    token = _CURRENT.set(builder)
    try:
        yield graph
    finally:
        _CURRENT.reset(token)
    for output, value in builder.contributed.items():
        graph.add_output(output, value)


def trace(model: Callable[..., Any], inputs: Mapping[str, TensorType], seed: int = 0, name: str = "model") -> Graph:
    """The graph of `model` called on graph inputs of the given types; outputs are a value or a dict of named ones."""
    return traced(model, inputs, seed, name, "output")


def traced(model: Callable[..., Any], inputs: Mapping[str, TensorType], seed: int, name: str, output: str) -> Graph:
    """As `trace`; an only output is called `output`."""
    with building(Graph(name), seed) as graph:
        outputs = named(model, "")(*[graph.add_input(n, t) for n, t in inputs.items()])
        for called, value in (outputs if isinstance(outputs, dict) else {output: outputs}).items():
            graph.add_output(called, value)
    return graph


# -- modules


def is_module(value: object) -> bool:
    return hasattr(type(value), "__weft_leaf__")


@overload
def module(cls: type[T]) -> type[T]: ...
@overload
def module(*, leaf: bool) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True)
def module(cls: type[T] | None = None, *, leaf: bool = False) -> type[T] | Callable[[type[T]], type[T]]:
    """Make a class a module: a frozen dataclass whose ``__call__`` emits ops in a scope of its own.

    A module that sits in two fields (or repeatedly in a list) is copied into each, so every place has its own
    parameters; calling the same field twice shares them. A `leaf` emits in the scope of its caller and uses its own
    name (`own_name`) for its value and parameters, as `linear` does.
    """

    def declare(c: type[T]) -> type[T]:
        made: Any = dataclass(frozen=True, repr=False)(c)
        if not any("__call__" in vars(base) for base in made.__mro__):
            raise TypeError(f"module {c.__name__} needs a __call__ that emits ops")
        original = made.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            for f in fields(self):
                object.__setattr__(self, f.name, _owned(getattr(self, f.name)))
            object.__setattr__(self, "__weft_made__", _caller(sys._getframe(1)))

        made.__init__, made.__repr__, made.__weft_leaf__ = init, spell, leaf
        if "__call__" in vars(made):
            made.__call__ = _scoped(made.__call__, leaf)
        result: type[T] = made
        return result

    return declare if cls is None else declare(cls)


def _caller(frame: FrameType | None) -> tuple[str, int] | None:
    """The file and line of whoever makes a module; None where weft itself does, but for its presets."""
    while frame is not None and Path(frame.f_code.co_filename).name == "dataclasses.py":
        frame = frame.f_back  # dataclasses.replace
    if frame is None:
        return None
    file = frame.f_code.co_filename
    inside = file.startswith(_HERE) and not file.endswith("presets.py")
    return None if inside else (file, frame.f_lineno)


def _owned(value: Any) -> Any:
    if is_module(value):
        return copy.copy(value)
    if isinstance(value, (list, tuple)) and any(is_module(v) for v in value):
        return tuple(_owned(v) for v in value)
    return value


def _scoped(call: Callable[..., Any], leaf: bool) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        builder = current()
        if builder.frames[-1].module is self:  # super().__call__(x) is the same call
            return call(self, *args, **kwargs)
        name = _name_of(self, builder)
        frame = _Frame(self, name, dict(_children(self)))
        builder.frames.append(frame)
        try:
            with builder.graph.scope("" if leaf else name):
                _remember(self, builder.graph, name if leaf else "")
                return call(self, *args, **kwargs)
        except WeftError as e:
            if not getattr(e, "placed", False):
                e = WeftError(f"{_place(builder)}: {e}")
                e.placed = True  # type: ignore[attr-defined]  # the innermost module names itself, outer ones do not
            raise e from None
        finally:
            builder.frames.pop()

    return run


def _remember(module: Any, graph: Graph, name: str) -> None:
    """Note in `graph` that `module` makes what its scope holds, or what is called `name` there."""
    place = getattr(module, "__weft_made__", None)
    if place or not name:
        scope = f"{graph.insertion_scope}.{name}".strip(".")
        graph.origins.setdefault(scope, Origin(module, *(place or ())))


def _place(builder: _Builder) -> str:
    frame = builder.frames[-1]
    path = f"{builder.graph.insertion_scope}.{frame.name}".strip(".")
    kind = type(frame.module).__name__
    return f"{path} ({kind})" if path else kind


def spell(module: Any) -> str:
    """A module as the call that makes it, settings at their defaults left out, repetitions in a list folded."""
    fields = [(f.name, getattr(module, f.name)) for f in call_order(module) if getattr(module, f.name) != f.default]
    return f"{type(module).__name__}({', '.join(f'{name}={_spell(value)}' for name, value in fields)})"


def _spell(value: Any) -> str:
    if not isinstance(value, tuple) or not any(map(is_module, value)):
        return repr(value)
    texts = [repr(item) for item in value]
    period = next(p for p in range(1, len(texts) + 1) if texts == texts[:p] * (len(texts) // p))
    runs = [(text, len(list(run))) for text, run in itertools.groupby(texts[:period])]
    once = " + ".join(f"[{text}] * {count}" if count > 1 else f"[{text}]" for text, count in runs)
    times = len(texts) // period
    if times == 1:
        return once
    return f"({once}) * {times}" if period > 1 else f"{once} * {times}"


def _children(module: Any) -> Iterator[tuple[int, str]]:
    for f in fields(module):
        value = getattr(module, f.name)
        if is_module(value):
            yield id(value), f.name
        elif isinstance(value, tuple):
            yield from ((id(v), f"{f.name}.{i}") for i, v in enumerate(value) if is_module(v))


def _name_of(module: Any, builder: _Builder) -> str:
    override, builder.override = builder.override, None
    own = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(module).__name__).lower()
    if override is not None:
        return override or (own if module.__weft_leaf__ else "")
    frame = builder.frames[-1]
    if id(module) in frame.children:
        return frame.children[id(module)]
    if id(module) not in frame.inline:
        taken = {name for _, name in frame.inline.values()}
        numbered = (f"{own}_{i}" for i in itertools.count(2))
        name = next(n for n in itertools.chain([own], numbered) if n not in taken)
        frame.inline[id(module)] = module, name
    return frame.inline[id(module)][1]


def named(module: Callable[P, R], name: str) -> Callable[P, R]:
    """`module`, to be called under `name` instead of its field's name: ``named(self.norm, "attn_norm")(x)``."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_module(module):
            current().override = name
            return module(*args, **kwargs)
        with scope(name):
            return module(*args, **kwargs)

    return run


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Ops and parameters made inside get `name` behind the current scope."""
    with current().graph.scope(name):
        yield


def own_name() -> str:
    """The name under which the running leaf module was called."""
    return current().frames[-1].name


def named_alike(module: Any, op: Op) -> dict[str, Any]:
    """The attributes of `op` that have the names of fields of `module`."""
    return {name: value for name, value in vars(module).items() if name in op.attrs}


# -- parameters


@dataclass(frozen=True)
class _Init:
    """An `Init` that is shown as the call that makes it."""

    text: str
    make: Init = field(compare=False)

    def __call__(self, shape: tuple[int, ...], name: str, seed: int) -> Recipe:
        return self.make(shape, name, seed)

    def __repr__(self) -> str:
        return self.text


def normal(std: float = STD) -> Init:
    """Random initialization N(0, std²), a stream of its own for every parameter name."""
    return _Init(f"normal({std})", lambda shape, name, seed: Normal(shape, std, name, seed))


def uniform(bound: float) -> Init:
    """Random initialization spread evenly over ±`bound`, a stream of its own for every parameter name."""
    return _Init(f"uniform({bound})", lambda shape, name, seed: Uniform(shape, -bound, bound, name, seed))


def fill(value: float) -> Init:
    """Initialization with one number."""
    return _Init(f"fill({value})", lambda shape, name, seed: Full(value, shape))


@contextlib.contextmanager
def initializing(init: Init) -> Iterator[None]:
    """Parameters made inside begin as `init` says, but for those that are given their own."""
    builder = current()
    outer, builder.init = builder.init, init
    try:
        yield
    finally:
        builder.init = outer


def param(name: str, shape: tuple[int, ...], init: Init | None = None) -> Param:
    """The f32 parameter `name` of the current scope, created on first use; the same name again is the same parameter.

    `init` declares its values where no checkpoint supplies them: `normal`, `uniform` or `fill`; by default what an
    enclosing `Initialized` says, or ``normal(0.02)``.

    Raises:
        WeftError: if it exists with another shape.
    """
    builder = current()
    graph = builder.graph
    prefix = graph.insertion_scope
    full = f"{prefix}.{name}" if prefix else name
    known = graph.params.get(full)
    if known is not None:
        if known.shape != shape:
            raise WeftError(
                f"parameter {full} was made with shape {list(known.shape)} and is asked for as {list(shape)}"
            )
        return known
    recipe = (init or builder.init or normal())(shape, full, builder.seed)
    return graph.add_param(full, TensorType(dtypes.f32, shape), recipe)


def computed(name: str, shape: tuple[int, ...], recipe: Recipe) -> Param:
    """The parameter whose values follow from `recipe` alone (position tables), one for the whole graph."""
    graph = current().graph
    for known in graph.params.values():
        if known.recipe == recipe:
            return known
    return graph.add_param(name, TensorType(dtypes.f32, shape), recipe)


# -- facts


@contextlib.contextmanager
def providing(**facts: Value) -> Iterator[None]:
    """Modules called inside find these values with `provided`."""
    builder = current()
    outer = builder.facts
    builder.facts = outer | facts
    try:
        yield
    finally:
        builder.facts = outer


def provided(name: str) -> Value | None:
    """The value that an enclosing module provides under `name` (``positions``, ``key_mask``), if any."""
    return current().facts.get(name)


def contribute(output: str, value: Value) -> None:
    """Add `value` to the graph output called `output`, the sum of what all modules contribute (losses)."""
    contributed = current().contributed
    known = contributed.get(output)
    contributed[output] = value if known is None else ops.add(known, value, name=f"{output}_sum")


def keep(name: str, *values: Value) -> None:
    """Keep `values` for modules that run later (`kept`); the same name again replaces them."""
    current().kept[name] = values


def kept(name: str) -> tuple[Value, ...]:
    """The values that an earlier module kept under `name`.

    Raises:
        WeftError: if none did.
    """
    values = current().kept.get(name)
    if values is None:
        raise WeftError(f"no earlier layer keeps {name!r}; kept are {', '.join(current().kept) or 'none'}")
    return values
