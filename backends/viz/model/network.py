"""The network that a picture shows: operations that read and produce values, with facts for their panels, and marks in
a comparison: new, removed or changed, with the differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.graph.analysis import select_explicit_attributes
from weft.ir.graph.step import Step
from weft.ir.op import OPS, Cost, Trait
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.recipes.recipe import Recipe
from weft.ir.recipes.spelling import spell
from weft.ir.types import sizes
from weft.ir.types.block_layouts import BlockLayout
from weft.passes.analysis.costs import count_elements, find_cache_sizes, find_learned_params
from weft.passes.analysis.recurrences.formulas import write_formulas

from ...block_weights import count_packed_bytes, find_quantized_layout
from .work import NONE, Work, compute_step_work, compute_work, measure_state

KEPT, REMOVED, NEW, CHANGED = SIGNS = ("kept", "removed", "new", "changed")


def sign_to_kind(sign: str) -> str:
    """Return the name of the kind of parts with `sign` (one of `SIGNS`) in a comparison, such as "sign-new"."""
    return f"sign-{sign}"


@dataclass(frozen=True)
class Change:
    """A changed property (`what`) of an operation, with the texts of its old and new value for a panel. `named`: these
    texts contain names of values or tensors, which differ between layers."""

    what: str
    before: str
    after: str
    named: bool = False


@dataclass(frozen=True)
class Mark:
    """A sign of `SIGNS`; `words` are lines for the operation's box ("was 9 heads"), `changes` lists all differences.
    `other`: the name of the corresponding operation in the other network, "" without one."""

    sign: str = KEPT
    words: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    other: str = ""

    @property
    def alike(self) -> str:
        """Return a key that is equal for operations of different layers whose changes differ at most in names."""
        changes = [(c.what, *(() if c.named else (c.before, c.after))) for c in self.changes]
        return f"{self.sign} {self.words} {changes}"


def find_common_sign(marks: Iterable[Mark | None]) -> str:
    """Return the common sign of `marks`, or "changed" if their signs differ; "" if all are None (no comparison)."""
    signs = {mark.sign for mark in marks if mark is not None}
    return signs.pop() if len(signs) == 1 else CHANGED if signs else ""


def count_signs(marks: Iterable[Mark | None]) -> str:
    """Return the number of operations per sign, except unchanged operations, as text: "2 removed, 1 changed"."""
    counts = Counter(mark.sign for mark in marks if mark is not None)
    return ", ".join(f"{counts[sign]} {sign}" for sign in SIGNS if sign != KEPT and counts[sign])


@dataclass(frozen=True)
class Weight:
    """A parameter: its name, shape, dtype and bytes, and the recipe that produces it.

    For a quantized parameter, dtype is the block layout (int4_64), `bytes` include codes, scales and zero points,
    `bits` are the bits per weight, and `packing` describes the layout in words.

    `learned`: the number of its elements that count as model parameters; 0 except in the first operation that reads it.
    `rotary`: the frequencies of rotary positions that it is computed from.
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
        """Return the sizes of its axes as strings."""
        inner = self.shape.strip("[]")
        return tuple(inner.split(", ")) if inner else ()


@dataclass(frozen=True)
class Vertex:
    """One operation.

    `reads`, `makes`: names of operand and result values; weights are not among `reads`.
    `roles`, `types`: the operand name of each of `reads`; the type of each of `makes` ("f32[seq, 576]").
    `view`: it moves no data.
    `cost`, `work`: the cost of a prefill (None: unknown); `cost` counts bytes, `work` elements and bytes (see `Work`).
    `step`: the work of a decode step.
    `cache`: (cached elements per token, window or None for all tokens).
    `state`: the size of its recurrent state: (elements in the model's dtype, bytes in other dtypes).
    `model_inputs`: the inputs of the model that it reads. `layer_inputs`: those of them that belong to a single layer.
    `layer_outputs`: the outputs of the model that it produces and that belong to a single layer (`find_layer_io`).
    `equivalent`: the equivalent weft operation of an operation of another format.
    `file_names`: the names of its results in the file, if `makes` has other ones.
    `mark`: its mark in a comparison.
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
    model_inputs: tuple[str, ...] = ()
    layer_inputs: tuple[str, ...] = ()
    layer_outputs: tuple[str, ...] = ()
    equivalent: Vertex | None = None
    file_names: tuple[str, ...] = ()
    mark: Mark | None = None
    work: Work | None = None
    step: Work = NONE

    @property
    def weft_op(self) -> Vertex:
        """Return the equivalent weft operation if there is one, else this operation."""
        return self.equivalent or self

    def text(self, name: str, default: str = "") -> str:
        """Return the attribute `name` as a string without quotes; `default` if it is absent."""
        return str(self.attrs.get(name, default)).strip("'\"")

    @property
    def attends(self) -> bool:
        """Return whether this is an attention with a softmax over keys."""
        return self.op in OPS and Trait.ATTENTION in OPS[self.op].traits


@dataclass(frozen=True)
class Network:
    """Operations in topological order, with the inputs and outputs of the model.

    `inputs`, `outputs`: input name → type; output name → (value, type).
    `marks`: marks of a comparison: input name, or "out." + output name → mark.
    `context`: the model's maximum length in tokens, if known.
    `origins`: scope → (source text of the module that created it, "file:line" if known).
    `unread`: weights that no operation reads.
    """

    name: str
    vertices: tuple[Vertex, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, tuple[str, str]]  # name -> value, type
    marks: Mapping[str, Mark] = field(default_factory=dict)
    context: int | None = None
    origins: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    unread: tuple[Weight, ...] = ()


def build_network(graph: Graph) -> Network:
    """Convert a weft graph to a network to draw."""
    uncounted, cache = {p: count_elements(p) for p in find_learned_params(graph)}, dict[Any, dict[str, Any]]()
    return Network(
        graph.name,
        tuple(_make_vertex(node, uncounted, cache) for node in graph.nodes),
        {v.name: str(v.type) for v in graph.inputs.values()},
        {name: (v.name, str(v.type)) for name, v in graph.outputs.items()},
        context=graph.meta.get("context"),
        origins={
            scope: (repr(o.module), o.file and f"{Path(o.file).name}:{o.line}")
            for scope, o in graph.origins.items()
            if scope
        },
        unread=tuple(_make_weight(p, uncounted.get(p, 0)) for p in graph.params.values() if not p.users),
    )


def _derive_costs(node: Node) -> dict[str, Any]:
    """Return the fields of a vertex that depend only on attributes, operand types and weight layouts of `node`."""
    work, cache = _adjust_packed(node, compute_work(node)), next(iter(find_cache_sizes([node])), None)
    return {
        "cost": node.op.node_cost(node),
        "cache": cache,
        "state": measure_state(node),
        "work": work,
        "step": compute_step_work(work, node),
    }


def _adjust_packed(node: Node, work: Work) -> Work:
    """Return `work` with quantized weights counted as packed bytes; lookups, which read few rows, are unchanged."""
    if node.op is ops.embedding:
        return work
    for param in {v: None for v in node.inputs if isinstance(v, Param)}:
        if (layout := find_quantized_layout(param)) is not None:
            work += Work(0, -count_elements(param), 0, count_packed_bytes(param, layout))
    return work


def _make_vertex(node: Node, uncounted: dict[Param, int], cache: dict[Any, dict[str, Any]]) -> Vertex:
    """Return `node` as a vertex. The `learned` elements of its weights are taken out of `uncounted`, so that each
    parameter counts once. `cache` maps op, attributes, types and layouts to costs, as layers repeat operations."""
    operands = list(_list_operands(node))
    attrs = select_explicit_attributes(node)
    kinds = tuple(None if v is None else v.type for v in node.inputs), tuple(v.type for v in node.outputs)
    key = node.op.name, kinds, tuple(attrs.items()), tuple(find_quantized_layout(v) for v in node.inputs)
    costs = cache.get(key) or cache.setdefault(key, _derive_costs(node))
    return Vertex(
        node.output.name,
        node.op.name,
        node.scope,
        tuple(v.name for v, _ in operands if not isinstance(v, Param)),
        tuple(v.name for v in node.outputs),
        tuple(role for v, role in operands if not isinstance(v, Param)),
        tuple(str(v.type) for v in node.outputs),
        {k: "\n".join(write_formulas(a)) if isinstance(a, Step) else spell(a) for k, a in attrs.items()},
        tuple(_make_weight(v, uncounted.pop(v, 0)) for v, _ in operands if isinstance(v, Param)),
        view=Trait.VIEW in node.op.traits,
        **costs,
    )


def _list_operands(node: Node) -> Iterable[tuple[Value, str]]:
    names = node.op.operand_names(node.inputs, node.attrs)
    for i, value in enumerate(node.inputs):
        if value is not None:
            yield value, names[i]


def _make_weight(param: Param, learned: int) -> Weight:
    kind = param.type
    shape = ", ".join(map(str, kind.shape))
    size = sizes.evaluate(kind.bytes, {})
    if (layout := find_quantized_layout(param)) is not None:
        size, bits = count_packed_bytes(param, layout), layout.bits_per_weight
        recipe = str(param.recipe)
        return Weight(param.name, f"[{shape}]", str(layout), size, recipe, learned, None, bits, describe_layout(layout))
    return Weight(param.name, f"[{shape}]", kind.dtype.name, size, str(param.recipe), learned, _find_rope(param.recipe))


def describe_layout(layout: BlockLayout) -> str:
    """Describe a layout: the type of codes, the group size of scales, and whether it has zero points."""
    kind = f"fp{layout.bits}" if layout.floats else f"int{layout.bits}"
    return f"{kind}, groups of {layout.group}" + (" with zero points" if layout.has_zeros else "")


def _find_rope(recipe: Recipe) -> RopeFrequencies | None:
    if isinstance(recipe, RopeFrequencies):
        return recipe
    return next(filter(None, map(_find_rope, recipe.parts)), None)
