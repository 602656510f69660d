"""Emission of nodes by modules: scopes from field names, parameters on first use, values provided by outer modules.

While a graph is being built (`building`), every module call runs in a frame. A module called by another module gets the
name of its field there ("attn", "layers.3") as its scope; `named` and `scope` override it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, ParamSpec, TypeVar, dataclass_transform, overload

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param, Value
from weft.ir.graph.graph import Origin
from weft.ir.op import Op
from weft.ir.recipes import Full, Normal, Recipe, Uniform
from weft.ir.recipes.recipe import order_fields
from weft.ir.types import TensorType, dtypes

from .checks import check_fields

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger("weft")
_HERE = str(Path(__file__).parent.parent)  # weft.frontends
Renamed = Mapping[str, tuple[tuple[str, ...], Callable[[Any, dict[str, Any]], Any]]]
Layer = Callable[..., Value]  # a module that maps x [batch, seq, dim], and maybe more operands, to the same shape
Init = Callable[[tuple[int, ...], str, int], Recipe]  # shape, full name, seed -> recipe
STD = 0.02  # default of `normal`


@dataclass
class _Frame:
    """A running call of `module` in the scope `name`.

    children: the path of each module in its fields, such as "layers.3", by the module's id.
    inline: each module that was created during the call, and its name, by the module's id.
    """

    module: Any
    name: str
    children: dict[int, str]
    inline: dict[int, tuple[Any, str]] = field(default_factory=dict)


@dataclass
class _Builder:
    graph: Graph
    seed: int
    frames: list[_Frame]
    provided: dict[str, Value]
    contributed: dict[str, Value] = field(default_factory=dict)
    stored: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    init: Init | None = None
    override: str | None = None


_CURRENT: ContextVar[_Builder | None] = ContextVar("weft_builder", default=None)


def get_builder() -> _Builder:
    """Return the active builder; raise WeftError if no graph is being built."""
    builder = _CURRENT.get()
    if builder is None:
        raise WeftError("no graph is being built: call modules in model.graph(), trace(...) or `with building(graph)`")
    return builder


def get_layer_index() -> int:
    """Return the index of the layer in whose scope (``layers.3.attn``) modules are called now; 0 outside of layers."""
    match = re.search(r"(?:^|\.)layers\.(\d+)", get_builder().graph.insertion_scope)
    return int(match[1]) if match else 0


@contextlib.contextmanager
def building(graph: Graph, seed: int = 0) -> Iterator[Graph]:
    """Yield `graph`, into which module calls inside the block emit; `seed` seeds random initial parameters.
    At the end of the block, the sums of contributed values become further outputs (see `contribute`)."""
    builder = _Builder(graph, seed, [_Frame(None, "", {})], {})
    token = _CURRENT.set(builder)
    try:
        yield graph
    finally:
        _CURRENT.reset(token)
    for output, value in builder.contributed.items():
        graph.add_output(output, value)


def trace(model: Callable[..., Any], inputs: Mapping[str, TensorType], seed: int = 0, name: str = "model") -> Graph:
    """Return a graph called `name` of `model`, called with inputs of the types `inputs` (by name, in argument order).
    `model` returns a dict of outputs by name, or one value, which becomes the output ``output``."""
    return trace_as(model, inputs, seed, name, "output")


def trace_as(model: Callable[..., Any], inputs: Mapping[str, TensorType], seed: int, name: str, output: str) -> Graph:
    """Return the graph of `model` as `trace` does; a single value that `model` returns becomes the output `output`."""
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
def module(*, leaf: bool = False, renamed: Renamed = ...) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True)
def module(
    cls: type[T] | None = None, *, leaf: bool = False, renamed: Renamed = MappingProxyType({})
) -> type[T] | Callable[[type[T]], type[T]]:
    """Convert a class to a module: a frozen dataclass whose ``__call__`` emits ops in its own scope.

    A module in two fields (or repeated in a list) is copied into each, so every place has its own parameters; calling
    the same field twice shares them. A `leaf`, such as `RMSNorm`, emits in the scope of its caller and names its value
    and parameters after itself (`get_leaf_name`). Modules of weft check their fields first (`check_fields`).

    `renamed` keeps arguments of earlier versions valid. It maps a field to the names of old arguments and a function,
    which gets the field's value (None if not given) and a dict of the old arguments, and returns the new value.
    """

    def declare(c: type[T]) -> type[T]:
        if c.__module__.startswith(__package__):
            _add_checks(c)
        wrapped: Any = dataclass(frozen=True, repr=False)(c)
        if not any("__call__" in vars(base) for base in wrapped.__mro__):
            raise TypeError(f"module {c.__name__} needs a __call__ that emits ops")
        wrapped.__weft_renamed__ = {**getattr(c, "__weft_renamed__", {}), **renamed}
        original = wrapped.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **_rename_arguments(c.__name__, kwargs, wrapped.__weft_renamed__))
            for f in fields(self):
                object.__setattr__(self, f.name, _copy_modules(getattr(self, f.name)))
            object.__setattr__(self, "__weft_site__", _find_creation_site(sys._getframe(1)))

        wrapped.__init__, wrapped.__repr__, wrapped.__weft_leaf__ = init, format_module, leaf
        if "__call__" in vars(wrapped):
            wrapped.__call__ = _run_in_scope(wrapped.__call__, leaf)
        result: type[T] = wrapped
        return result

    return declare if cls is None else declare(cls)


def _add_checks(cls: Any) -> None:
    """Let the dataclass `cls` check its fields before its own ``__post_init__``."""
    check = getattr(cls, "__post_init__", None)

    def post_init(self: Any) -> None:
        check_fields(self)
        if check is not None:
            check(self)

    cls.__post_init__ = post_init


def _rename_arguments(owner: str, arguments: dict[str, Any], renamed: Renamed) -> dict[str, Any]:
    """Replace arguments of earlier versions in `arguments` of the class `owner`, log a warning, and return the dict."""
    for target, (names, convert) in renamed.items():
        old = {name: arguments.pop(name) for name in names if name in arguments}
        if old:
            arguments[target] = convert(arguments.get(target), old)
            spelled = ", ".join(f"{name}={value!r}" for name, value in old.items())
            _log.warning("%s(%s) is deprecated: use %s(%s=%r)", owner, spelled, owner, target, arguments[target])
    return arguments


def _find_creation_site(frame: FrameType | None) -> tuple[str, int] | None:
    """Return the file and line where `frame` creates a module; None in weft.frontends, except in presets.py."""
    while frame is not None and Path(frame.f_code.co_filename).name == "dataclasses.py":
        frame = frame.f_back  # dataclasses.replace
    if frame is None:
        return None
    file = frame.f_code.co_filename
    inside = file.startswith(_HERE) and not file.endswith("presets.py")
    return None if inside else (file, frame.f_lineno)


def _copy_modules(value: Any) -> Any:
    if is_module(value):
        return copy.copy(value)
    if isinstance(value, (list, tuple)) and any(is_module(v) for v in value):
        return tuple(_copy_modules(v) for v in value)
    return value


def _run_in_scope(call: Callable[..., Any], leaf: bool) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        builder = get_builder()
        if builder.frames[-1].module is self:  # super().__call__(x) is the same call
            return call(self, *args, **kwargs)
        name = _choose_name(self, builder)
        frame = _Frame(self, name, dict(_list_children(self)))
        builder.frames.append(frame)
        try:
            with builder.graph.scope("" if leaf else name):
                _record_origin(self, builder.graph, name if leaf else "")
                return call(self, *args, **kwargs)
        except WeftError as e:
            if not hasattr(e, "site"):  # only the innermost module adds its name, and its file and line if known
                e = WeftError(f"{_describe_location(builder)}: {e}")
                vars(e)["site"] = getattr(self, "__weft_site__", None)
            raise e from None
        finally:
            builder.frames.pop()

    return run


def _record_origin(module: Any, graph: Graph, name: str) -> None:
    """Record `module` and its creation site in `graph.origins`, under the current scope or the leaf `name` in it. Do
    nothing if the scope has a record, or for a leaf without a creation site."""
    place = getattr(module, "__weft_site__", None)
    if place or not name:
        scope = f"{graph.insertion_scope}.{name}".strip(".")
        graph.origins.setdefault(scope, Origin(module, *(place or ())))


def _describe_location(builder: _Builder) -> str:
    frame = builder.frames[-1]
    path = f"{builder.graph.insertion_scope}.{frame.name}".strip(".")
    kind = type(frame.module).__name__
    return f"{path} ({kind})" if path else kind


def format_module(module: Any) -> str:
    """Return the Python call that creates `module`, without default values; equal list items become [Block(…)] * 6."""
    fields = [(f.name, getattr(module, f.name)) for f in order_fields(module) if getattr(module, f.name) != f.default]
    return f"{type(module).__name__}({', '.join(f'{name}={_format_field(value)}' for name, value in fields)})"


def _format_field(value: Any) -> str:
    if not isinstance(value, tuple) or not any(map(is_module, value)):
        return repr(value)
    texts = [repr(item) for item in value]
    period = next(p for p in range(1, len(texts) + 1) if texts == texts[:p] * (len(texts) // p))
    runs = [(text, len(list(run))) for text, run in itertools.groupby(texts[:period])]
    period_text = " + ".join(f"[{text}] * {count}" if count > 1 else f"[{text}]" for text, count in runs)
    repeats = len(texts) // period
    if repeats == 1:
        return period_text
    return f"({period_text}) * {repeats}" if period > 1 else f"{period_text} * {repeats}"


def _list_children(module: Any) -> Iterator[tuple[int, str]]:
    for f in fields(module):
        value = getattr(module, f.name)
        if is_module(value):
            yield id(value), f.name
        elif isinstance(value, tuple):
            yield from ((id(v), f"{f.name}.{i}") for i, v in enumerate(value) if is_module(v))


def _choose_name(module: Any, builder: _Builder) -> str:
    override, builder.override = builder.override, None
    default_name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(module).__name__).lower()
    if override is not None:
        return override or (default_name if module.__weft_leaf__ else "")
    frame = builder.frames[-1]
    if id(module) in frame.children:
        return frame.children[id(module)]
    if id(module) not in frame.inline:
        used_names = {name for _, name in frame.inline.values()}
        numbered = (f"{default_name}_{i}" for i in itertools.count(2))
        name = next(n for n in itertools.chain([default_name], numbered) if n not in used_names)
        frame.inline[id(module)] = module, name
    return frame.inline[id(module)][1]


def named(module: Callable[P, R], name: str) -> Callable[P, R]:
    """Return a function that calls `module` in the scope `name` ("": the caller's): ``named(self.norm, "n")(x)``."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_module(module):
            get_builder().override = name
            return module(*args, **kwargs)
        with scope(name):
            return module(*args, **kwargs)

    return run


def scope(name: str) -> contextlib.AbstractContextManager[None]:
    """Append `name` to the current scope, for ops and parameters created inside the block."""
    return get_builder().graph.scope(name)


def get_leaf_name() -> str:
    """Return the name under which the running leaf module was called."""
    return get_builder().frames[-1].name


def select_attrs(module: Any, op: Op) -> dict[str, Any]:
    """Return the fields of `module` that have the same names as attributes of `op`, with their values."""
    return {name: value for name, value in vars(module).items() if name in op.attrs}


# -- parameters


@dataclass(frozen=True)
class _Init:
    """The initialization `make` with the repr `text`, the call that creates it."""

    text: str
    make: Init = field(compare=False)

    def __call__(self, shape: tuple[int, ...], name: str, seed: int) -> Recipe:
        return self.make(shape, name, seed)

    def __repr__(self) -> str:
        return self.text


def normal(std: float = STD) -> Init:
    """Return random initialization N(0, std²), with a separate random stream for every parameter name."""
    return _Init(f"normal({std})", lambda shape, name, seed: Normal(shape, std, name, seed))


def uniform(bound: float) -> Init:
    """Return uniform random initialization over ±`bound`, with a separate random stream for every parameter name."""
    return _Init(f"uniform({bound})", lambda shape, name, seed: Uniform(shape, -bound, bound, name, seed))


def fill(value: float) -> Init:
    """Return initialization of every element with `value`."""
    return _Init(f"fill({value})", lambda shape, name, seed: Full(value, shape))


@contextlib.contextmanager
def initializing(init: Init) -> Iterator[None]:
    """Initialize parameters created inside the block by `init`, except those with their own `init`."""
    builder = get_builder()
    outer, builder.init = builder.init, init
    try:
        yield
    finally:
        builder.init = outer


def param(name: str, shape: tuple[int, ...], init: Init | None = None) -> Param:
    """Return the f32 parameter `name` of the current scope, created on first use; the same name is the same parameter.

    `init` (`normal`, `uniform` or `fill`) declares initial values; default: that of an outer `Initialized`, or
    normal(0.02).

    Raises:
        WeftError: if the parameter exists with another shape.
    """
    builder = get_builder()
    graph = builder.graph
    prefix = graph.insertion_scope
    full_name = f"{prefix}.{name}" if prefix else name
    existing = graph.params.get(full_name)
    if existing is not None:
        if existing.shape != shape:
            raise WeftError(
                f"parameter {full_name} {list(existing.shape)} already exists: use another name for {list(shape)}"
            )
        return existing
    recipe = (init or builder.init or normal())(shape, full_name, builder.seed)
    return graph.add_param(full_name, TensorType(dtypes.f32, shape), recipe)


def constant_param(name: str, shape: tuple[int, ...], recipe: Recipe) -> Param:
    """Return the f32 parameter of the graph with an equal `recipe`; without one, add `name`, outside any scope."""
    graph = get_builder().graph
    for existing in graph.params.values():
        if existing.recipe == recipe:
            return existing
    return graph.add_param(name, TensorType(dtypes.f32, shape), recipe)


# -- provided and stored values


@contextlib.contextmanager
def providing(**facts: Value) -> Iterator[None]:
    """Provide the values `facts` by name to modules called inside the block, which read them with `provided`."""
    builder = get_builder()
    outer = builder.provided
    builder.provided = outer | facts
    try:
        yield
    finally:
        builder.provided = outer


def provided(name: str) -> Value | None:
    """Return the value that an enclosing module provides under `name` (such as ``positions``); None if none does."""
    return get_builder().provided.get(name)


def contribute(output: str, value: Value) -> None:
    """Add `value` to the graph output `output`, the sum of all contributions under this name (such as ``aux_loss``)."""
    contributed = get_builder().contributed
    previous = contributed.get(output)
    contributed[output] = value if previous is None else ops.add(previous, value, name=f"{output}_sum")


def keep(name: str, *values: Value) -> None:
    """Store `values` under `name` for modules that run later (see `kept`), in place of earlier values of this name."""
    get_builder().stored[name] = values


def kept(name: str) -> tuple[Value, ...]:
    """Return the values that an earlier module stored under `name` with `keep`; raise WeftError if there are none."""
    values = get_builder().stored.get(name)
    if values is None:
        raise WeftError(f"no earlier layer keeps {name!r}; kept are {', '.join(get_builder().stored) or None}")
    return values
