"""The network that a picture shows: operations that read and make values, with facts for their panels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.graph.analysis import attributes
from weft.ir.graph.origins import Origin
from weft.ir.graph.step import Step
from weft.ir.op import OPS, Cost, Trait
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.recipes.recipe import Recipe
from weft.ir.recipes.spelling import spell
from weft.ir.types import sizes
from weft.ir.types.block_layouts import BlockLayout
from weft.passes.analysis.costs import cached, elements, learned
from weft.passes.analysis.recurrences.formulas import formulas

from ...blocks import packed_bytes, quantized_layout
from .marks import Mark
from .work import NONE, Work, of_node, state, step


@dataclass(frozen=True)
class Weight:
    """A parameter: its name, shape and dtype, how many bytes it has, and the recipe that makes them.

    Of one in quantized blocks the dtype is that of the blocks (int4_64), `bytes` are those of codes, scales and zero
    points, `bits` is what a number takes of them, and `packing` says it in words.

    `learned` is how many numbers of it count as the model's, in the first operation that reads it; `rotary` are the
    frequencies that it is made of, if these are rotary positions.
    """

    name: str
    shape: str
    dtype: str
    bytes: int
    recipe: str
    learned: int = 0
    rotary: RopeFrequencies | None = None
    bits: float | None = None
    packing: str = ""

    @property
    def dims(self) -> tuple[str, ...]:
        """The sizes of its axes."""
        inner = self.shape.strip("[]")
        return tuple(inner.split(", ")) if inner else ()


@dataclass(frozen=True)
class Vertex:
    """One operation. `reads` and `makes` are names of values; weights are not among `reads`.

    `roles` are the names of the operands that `reads` are given to, `types` tell what it makes ("f32[seq, 576]").
    A `view` moves no data. `cost` is None where nobody knows it. `cache` is how many numbers it keeps of a token for
    those after it, and of how many tokens at most (None: all); `state` what it keeps of every text, however long:
    numbers in the dtype of the model, and bytes of others. `like` is the operation of weft that one of another format
    amounts to. `work` is `cost` with numbers and bytes
    apart, `step` the work for one more token; `mark` is what a comparison says of the operation.
    """

    name: str
    op: str
    scope: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    roles: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[Weight, ...] = ()
    cost: Cost | None = None
    view: bool = False
    cache: tuple[int, int | None] | None = None
    state: tuple[int, int] = (0, 0)
    asks: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    like: Vertex | None = None
    mark: Mark | None = None
    work: Work | None = None
    step: Work = NONE

    @property
    def meant(self) -> Vertex:
        """The operation in the words of weft, where there is one."""
        return self.like or self

    def text(self, name: str, default: str = "") -> str:
        """The attribute `name` as text without quotes."""
        return str(self.attrs.get(name, default)).strip("'\"")

    @property
    def attends(self) -> bool:
        """Return whether this is an attention with a softmax over keys."""
        return self.op in OPS and Trait.ATTENTION in OPS[self.op].traits


@dataclass(frozen=True)
class Network:
    """Operations in an order in which they can be computed; `inputs` and `outputs` are values by name, with types.

    `marks` are what a comparison says of inputs, by name, and of outputs, by "out." and name. `context` is how many
    tokens the model is made for, if that is known; `origins` what the parts of a scope were made by: the text of the
    module, and "file:line" where that is known; `unread` are weights that no operation reads.
    """

    name: str
    vertices: tuple[Vertex, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, tuple[str, str]]  # name -> value, type
    marks: Mapping[str, Mark] = field(default_factory=dict)
    context: int | None = None
    origins: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    unread: tuple[Weight, ...] = ()


def network(graph: Graph) -> Network:
    """Convert a weft graph to a network to draw."""
    unseen, known = {p: elements(p) for p in learned(graph)}, dict[Any, dict[str, Any]]()
    return Network(
        graph.name,
        tuple(_vertex(node, unseen, known) for node in graph.nodes),
        {v.name: str(v.type) for v in graph.inputs.values()},
        {name: (v.name, str(v.type)) for name, v in graph.outputs.items()},
        context=graph.meta.get("context"),
        origins={scope: _made(origin) for scope, origin in graph.origins.items() if scope},
        unread=tuple(_weight(p, unseen.get(p, 0)) for p in graph.params.values() if not p.users),
    )


def _made(origin: Origin) -> tuple[str, str | None]:
    """Return the text of the module that made a scope, and its source line."""
    return repr(origin.made), origin.file and f"{Path(origin.file).name}:{origin.line}"


def _numbers(node: Node) -> dict[str, Any]:
    """The fields of a vertex that follow from the attributes of `node` and the types of its operands."""
    work, cache = _packed(node, of_node(node)), next(iter(cached([node])), None)
    return {
        "cost": node.op.node_cost(node),
        "cache": cache,
        "state": state(node),
        "work": work,
        "step": step(work, node),
    }


def _packed(node: Node, work: Work) -> Work:
    """`work` of `node` where it reads weights as the blocks that they are quantized to; lookups read few rows."""
    if node.op is ops.embedding:
        return work
    for param in {v: None for v in node.inputs if isinstance(v, Param)}:
        if (layout := quantized_layout(param)) is not None:
            work += Work(0, -elements(param), 0, packed_bytes(param, layout))
    return work


def _vertex(node: Node, unseen: dict[Param, int], known: dict[Any, dict[str, Any]]) -> Vertex:
    """Convert `node` to a vertex that owns the parameters it is the first to read; they are removed from `unseen`.

    Layers repeat their operations: `known` has the numbers of those before it.
    """
    read = list(_read(node))
    attrs = attributes(node)
    kinds = tuple(None if v is None else v.type for v in node.inputs), tuple(v.type for v in node.outputs)
    key = node.op.name, kinds, tuple(attrs.items()), tuple(quantized_layout(v) for v in node.inputs)
    numbers = known.get(key) or known.setdefault(key, _numbers(node))
    return Vertex(
        node.output.name,
        node.op.name,
        node.scope,
        tuple(v.name for v, _ in read if not isinstance(v, Param)),
        tuple(v.name for v in node.outputs),
        tuple(role for v, role in read if not isinstance(v, Param)),
        tuple(str(v.type) for v in node.outputs),
        {k: "\n".join(formulas(a)) if isinstance(a, Step) else spell(a) for k, a in attrs.items()},
        tuple(_weight(v, unseen.pop(v, 0)) for v, _ in read if isinstance(v, Param)),
        view=Trait.VIEW in node.op.traits,
        **numbers,
    )


def _read(node: Node) -> Iterable[tuple[Value, str]]:
    """The operands that are there, with what the op calls them."""
    names = node.op.operand_names(node.inputs, node.attrs)
    for i, value in enumerate(node.inputs):
        if value is not None:
            yield value, names[i]


def _weight(param: Param, learned: int) -> Weight:
    kind = param.type
    shape = ", ".join(map(str, kind.shape))
    size = sizes.evaluate(kind.bytes, {})
    if (layout := quantized_layout(param)) is not None:
        size, bits = packed_bytes(param, layout), layout.bits_per_weight
        recipe = str(param.recipe)
        return Weight(param.name, f"[{shape}]", str(layout), size, recipe, learned, None, bits, in_words(layout))
    return Weight(param.name, f"[{shape}]", kind.dtype.name, size, str(param.recipe), learned, _rotary(param.recipe))


def in_words(layout: BlockLayout) -> str:
    """Say what codes are, how many share a scale, and that they have zero points."""
    kind = f"fp{layout.bits}" if layout.floats else f"int{layout.bits}"
    return f"{kind}, groups of {layout.group}" + (" with zero points" if layout.has_zeros else "")


def _rotary(recipe: Recipe) -> RopeFrequencies | None:
    """The frequencies of rotary positions in a recipe."""
    if isinstance(recipe, RopeFrequencies):
        return recipe
    return next(filter(None, map(_rotary, recipe.parts)), None)
