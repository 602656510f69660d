"""Pack linear layers that read the same input into one, and the inverse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.recipes import Concat, Full
from weft.ir.recipes.blocks import BlockRecipe, find_block_layout

from ... import ANY, Pass, Pattern, Refusal, Rule, Trace, apply_rules
from ...analysis.projections import TOKENWISE_TRAITS, split_linear
from ...edits.edit import add_common_prefix, are_params, derive_param, erase_unused, is_feature_split, replace_uses


def pack_linears(
    x: Value, weights: Sequence[Param], biases: Sequence[Value | None], name: str, widths: Sequence[int] | None = None
) -> tuple[Value, ...]:
    """Emit one linear of x with the concatenated `weights` and `biases`, and return the pieces of its result, in order.
    The pieces have the `widths`, by default the number of rows of each weight. If some biases are None, they become
    zeros; if all are, there is no bias. Packing the same linears again (a layer applied twice) reuses the parameters.
    `name` names the new linear."""
    rows = [int(w.shape[0]) for w in weights]
    full, shape = add_common_prefix(weights, name), (sum(rows), weights[0].width)
    weight = derive_param(weights[0], Concat(tuple(w.recipe for w in weights)), shape, f"{full}.weight")
    present_biases, bias = [b for b in biases if isinstance(b, Param)], None
    if present_biases:
        parts = (b.recipe if isinstance(b, Param) else Full(0.0, (n,)) for b, n in zip(biases, rows, strict=True))
        bias = derive_param(present_biases[0], Concat(tuple(parts)), (sum(rows),), f"{full}.bias")
    return ops.split.emit(ops.linear(x, weight, bias, name=name), sizes=tuple(widths or rows))


def find_packing_obstacle(weights: Sequence[Value | None], biases: Sequence[Value | None]) -> str | None:
    """Return a reason (str) why linears with these weights and biases cannot be packed; None if they can."""
    for w in (*weights, *(b for b in biases if b is not None)):
        if not isinstance(w, Param):
            return f"{w!r} is not a parameter"
        if not all(isinstance(s, int) for s in w.shape):
            return f"parameter {w!r} has no fixed shape"
    names = " and ".join(f"%{w.name}" for w in weights if w is not None)
    if any(len({v.type.dtype for v in values if v is not None}) > 1 for values in (weights, biases)):
        return f"{names} have different dtypes"
    params = [w for w in weights if isinstance(w, Param)]
    if any(w.recipe.has(BlockRecipe) for w in params) and has_different_layouts(params):
        return f"{names} are quantized in different ways"
    return None


def has_different_layouts(weights: Iterable[Param]) -> bool:
    """Return whether `weights` are stored in different block layouts, or only some of them in blocks."""
    return len({str(find_block_layout(w.recipe, w.graph.reader)) for w in weights}) > 1


class PackQkv(Pass):
    """Compute query, key and value with one linear: linear(x, [Wq; Wk; Wv]) → split.

    For every attention, the linears that compute its q, k and v from the same x are packed (in cross attention only k
    and v); rotations, reshapes and norms after the linears stay. The weights become one Concat recipe; a weight with
    other readers also stays. A linear without a bias gets zeros if another of them has one.

    Condition: the linears read the same value, and their weights are parameters of one dtype and block layout.

    Source: the way GPT-2 stores them (Radford 2019), and Megatron-LM (Shoeybi 2019, arXiv:1909.08053).

    Example pack-qkv, on the graph of gqa-to-mla.
    """

    name = "pack-qkv"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("unpack",)
    tradeoff = "the split copies its pieces where a backend cannot read them in place"

    def run(self, graph: Graph, trace: Trace) -> None:
        for attention in graph.nodes:
            if attention.op not in (ops.attention, ops.block_sparse_attention):
                continue
            linears: dict[Node, str] = {}
            for role in "qkv":
                if node := _find_linear(attention.operand(role)):
                    linears.setdefault(node, role)
            by_input: dict[Value | None, list[Node]] = {}
            for node in linears:
                by_input.setdefault(node.inputs[0], []).append(node)
            for x, group in by_input.items():
                if x is not None and len(group) > 1:
                    _pack_group(graph, x, group, "".join(linears[n] for n in group), trace)
        if not trace.rewrites[self.name]:
            trace.note(f"{self.name}: no attention has q, k or v from several linears of the same value")


def _find_linear(value: Value | None) -> Node | None:
    """Return the linear from which ops that treat tokens independently compute `value`; None if there is none."""
    while value is not None and (node := value.producer) is not None:
        if node.op is ops.linear:
            return node
        if not TOKENWISE_TRAITS & node.op.traits:
            return None
        value = node.inputs[0]
    return None


def _pack_group(graph: Graph, x: Value, group: list[Node], name: str, trace: Trace) -> None:
    weights, biases = [n.operand("weight") for n in group], [n.operand("bias") for n in group]
    reason = find_packing_obstacle(weights, biases)
    if reason:
        trace.note(f"pack-qkv: left %{group[0].output.name} alone: {reason}")
        return
    # x is computed before the first linear, and all readers of their results come later.
    with graph.inserting(before=graph.nodes.find_first(group)):
        pieces = pack_linears(x, [w for w in weights if isinstance(w, Param)], biases, name)
    for node, piece in zip(group, pieces, strict=True):
        replace_uses(node.output, piece)
    trace.record_rewrite("pack-qkv", pieces[0].name)
    erase_unused(graph, group)


class PackGateUp(Pass):
    """Compute gate and up of a gated MLP with one linear: linear(x, [Wgate; Wup]) → split → glu.

    The weights become one Concat recipe. A linear without a bias gets zeros if the other has one.

    Condition: both read the same value, only the glu, which has no shift, reads their results, and their weights are
    different parameters of one dtype and block layout.

    Source: the way Phi-3 stores them (Abdin 2024, arXiv:2404.14219); the unit is Shazeer's (2020, arXiv:2002.05202).

    Example pack-gate-up::

        graph example {
          input %x: f32[batch, seq, 4]
          param %wg: f32[6, 4] = normal([6, 4], std=0.5, stream="gate")
          param %wu: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          %gate: f32[batch, seq, 6] = linear(%x, %wg)
          %up: f32[batch, seq, 6] = linear(%x, %wu)
          %y: f32[batch, seq, 6] = glu(%gate, %up, activation="silu")
          output y = %y
        }
    """

    name = "pack-gate-up"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("unpack",)
    tradeoff = "the split copies its pieces where a backend cannot read them in place"

    def run(self, graph: Graph, trace: Trace) -> None:
        def build_gated(x: Value, gate: Param, up: Param, gate_bias: Param | None, up_bias: Param | None) -> Value:
            projections = ops.linear(x, gate, gate_bias), ops.linear(x, up, up_bias)
            return ops.glu(*projections, activation=ANY("activation"), limit=ANY("limit"))

        apply_rules(graph, [Rule(self.name, Pattern(build_gated), _pack_gated)], trace)


def _pack_gated(
    x: Value,
    gate: Param,
    up: Param,
    gate_bias: Param | None,
    up_bias: Param | None,
    activation: str,
    limit: float | None,
) -> Value | Refusal:
    if gate is up:
        return Refusal(f"gate and up both are %{gate.name}")
    reason = find_packing_obstacle((gate, up), (gate_bias, up_bias))
    if reason:
        return Refusal(reason)
    g, u = pack_linears(x, (gate, up), (gate_bias, up_bias), "gate_up")
    return ops.glu(g, u, activation=activation, limit=limit)


class Unpack(Pass):
    """Split a packed linear into separate linears.

    split(linear(x, [A; B])) becomes linear(x, A), linear(x, B). The new weights are rows of the packed weight. If that
    is a Concat recipe, they are its items.

    Condition: the split cuts the last axis, and nothing else reads the packed result.

    Source: linearity, [A; B] x = [A x; B x].

    Example unpack::

        graph example {
          input %x: f32[batch, seq, 4]
          param %qkv.weight: f32[8, 4] = normal([8, 4], std=0.5, stream="qkv")
          %qkv: f32[batch, seq, 8] = linear(%x, %qkv.weight)
          %q: f32[batch, seq, 4], %k: f32[batch, seq, 2], %v: f32[batch, seq, 2] = split(%qkv, sizes=[4, 2, 2])
          output q = %q
          output k = %k
          output v = %v
        }
    """

    name = "unpack"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("pack-qkv", "pack-gate-up")
    tradeoff = "several small products instead of a large one: equal FLOPs, but each reads x"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            x = node.inputs[0] if node.inputs else None
            if node.op is not ops.split or x is None or x.producer is None or x.producer.op is not ops.linear:
                continue
            at = node.output.name
            if not is_feature_split(node):
                trace.refuse(self.name, at, f"the split cuts axis {node.attrs['axis']}, not the last")
            elif len(x.users) > 1 or x.is_output:
                trace.refuse(self.name, at, f"%{x.name} has other readers")
            elif not are_params(x.producer.inputs[1:]):
                trace.refuse(self.name, at, f"the weight of %{x.name} is computed")
            else:
                split_linear(node)
                trace.record_rewrite(self.name, at)
