"""Multi-head latent attention: attend to the latent instead of the keys and values of all heads, and the inverse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, Value, ops
from weft.ir.ops.latent import emit_absorbed, emit_expanded
from weft.ir.recipes import Take
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.recipes.readers import Array

from ... import Pass, Trace
from ...analysis.index_tracking import trace_sources
from ...analysis.projections import Branch, is_zero, slice_rows, split_linear, unpack_branch
from ...edits.edit import add_scope, backward_slice, derive_param, erase_unused, replace_uses, require_param
from ..heads.head_layout import take_rows

Linear: TypeAlias = tuple[Recipe, Recipe | None]  # weight and bias
FORM_ATTRS = ("heads", "kv_heads", "value_dim", "rolling")  # attributes of attention that the two forms set


class MlaAbsorb(Pass):
    """Attend to the latent from which keys and values are computed, used as one KV head of the latent's width.

    With k_h = [W_UK,h c; k_r] and v_h = W_UV,h c, scores are q_h·W_UK,h c = (W_UK,hᵀ q_h)·c, and Σ α v_h is
    W_UV,h Σ α c. So W_UK moves to the queries and W_UV moves after the attention, and the cache holds only c and the
    rotary part k_r. If one weight contains W_UK and W_UV (as two blocks or interleaved by head), recipes split it.

    Condition: keys and values come from linears without bias of one value c, which is narrower than the keys. A rotary
    part of keys comes last and is the same for all heads; without such a part, nothing else may read c
    (use slim-attention then). The pass refuses attentions with a cache.

    Source: DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434), 2.1.2.

    Example mla-absorb::

        graph example {
          input %q: f32[batch, seq, 8]
          input %c: f32[batch, seq, 3]
          param %k_up.weight: f32[8, 3] = normal([8, 3], std=1.0, stream="k")
          param %v_up.weight: f32[10, 3] = normal([10, 3], std=1.0, stream="v")
          %k: f32[batch, seq, 8] = linear(%c, %k_up.weight)
          %v: f32[batch, seq, 10] = linear(%c, %v_up.weight)
          %y: f32[batch, seq, 10] = attention(%q, %k, %v, heads=2, kv_heads=2, causal=true)
          output y = %y
        }
    """

    name = "mla-absorb"
    effect = "exact"
    purpose = "Fold into weights"
    see = ("mla-expand",)
    tradeoff = "scores and sums over vectors as long as the latent, for a cache of one of them"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            latent = _find_latent(node)
            if latent is None or (latent.shared is None and not latent.has_only_readers):
                continue  # ordinary attention
            keys, reason = node.attrs["kv_heads"] * latent.k_rows.shape[1], latent.reason
            if reason is None and latent.latent.width >= keys:
                reason = f"its keys of {keys} features are not wider than their source of {latent.latent.width}"
            trace.record_result(self.name, node.output.name, reason)
            if reason is None:
                _absorb_weights(node, latent)


class SlimAttention(Pass):
    """Attend to the input x of the key and value projections, so that the cache holds x instead of keys and values.

    Without positions in the keys, k_h = W_K,h x and v_h = W_V,h x make x a latent like that of MLA: scores are
    (W_K,hᵀ q_h)·x, results W_V,h Σ α x. For multi-head attention the cache halves, without loss. (The paper caches K,
    as wide as x, and computes V = K W_K⁻¹ W_V; caching x needs no inverse.)

    Condition: keys and values come from linears without bias (see drop-k-bias, v-bias-to-o-bias) of one value, which is
    narrower than both together. Norms of keys, RoPE (except on a part that all heads share) or a cache prevent it.

    Source: Graef 2025, Slim attention (arXiv 2503.05840).

    Example slim-attention::

        graph example {
          input %q: f32[batch, seq, 8]
          input %x: f32[batch, seq, 8]
          param %k.weight: f32[8, 8] = normal([8, 8], std=1.0, stream="k")
          param %v.weight: f32[8, 8] = normal([8, 8], std=1.0, stream="v")
          %k: f32[batch, seq, 8] = linear(%x, %k.weight)
          %v: f32[batch, seq, 8] = linear(%x, %v.weight)
          %y: f32[batch, seq, 8] = attention(%q, %k, %v, heads=2, kv_heads=2, causal=true)
          output y = %y
        }
    """

    name = "slim-attention"
    effect = "exact"
    purpose = "Fold into weights"
    tradeoff = (
        "scores and sums over vectors as long as the model is wide, for half the cache: where memory is the limit"
    )

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            if (latent := _find_latent(node)) is None:
                continue
            kv_width = sum(v.width for v in node.inputs[1:3] if v is not None)
            width = latent.latent.width + (0 if latent.shared is None else latent.shared.width)
            reason = latent.reason
            if reason is None and width >= kv_width:
                reason = f"its keys and values of {kv_width} features are not wider than their source of {width}"
            trace.record_result(self.name, node.output.name, reason)
            if reason is None:
                _absorb_weights(node, latent)


class MlaExpand(Pass):
    """Compute the keys and values of all heads from the latent, and attend to them: the inverse of mla-absorb.

    W_UK is applied to the latent instead of the queries, W_UV to the latent instead of the attention's output. This
    needs fewer FLOPs if many queries attend to the same keys (prefill, training), and any attention kernel supports it.

    Condition: the keys of the attention are a latent, W_UKᵀ is applied to the queries head by head, and only W_UV reads
    the result. The pass refuses attentions with a cache, whose contents would change.

    Source: DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434), 2.1.2.

    Example mla-expand::

        graph example {
          input %q: f32[batch, seq, 8]
          input %c: f32[batch, seq, 3]
          param %k_up.weight: f32[8, 3] = normal([8, 3], std=1.0, stream="k")
          param %v_up.weight: f32[10, 3] = normal([10, 3], std=1.0, stream="v")
          %q_c: f32[batch, seq, 6] = head_linear(%q, %k_up.weight, heads=2, inverse=true)
          %y_c: f32[batch, seq, 6] = attention(%q_c, %c, _, heads=2, kv_heads=1, causal=true, scale=0.5, value_dim=3)
          %y: f32[batch, seq, 10] = head_linear(%y_c, %v_up.weight, heads=2)
          output y = %y
        }
    """

    name = "mla-expand"
    effect = "exact"
    purpose = "Fold into weights"
    see = ("mla-absorb",)
    tradeoff = "keys and values of every head are computed, and cached, instead of one latent"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            if node.op is ops.attention and node.operand("v") is None:
                trace.record_result(self.name, node.output.name, _expand_attention(node))


def attend_to_latent(node: Node, linears: Mapping[str, Linear], pairs: Sequence[int] | None = None) -> Node:
    """Replace the attention `node` by latent attention in its expanded form; return the node of its result.

    linears: of the queries the part without positions (q; without it, all features), the rotary part of queries and
    keys (q_rope and k_rope; not without a RoPE), the latent, and k_up and v_up, which map it to all query heads.
    pairs: the rotary pairs that these rotary parts have; None: all of them.
    """
    graph, (q, k) = node.graph, (unpack_branch(node, role) for role in "qk")
    attrs = {name: value for name, value in node.attrs.items() if name not in FORM_ATTRS}

    def derive(name: str, old: Param, recipe: Recipe) -> Param:
        return derive_param(old, recipe, recipe.shape(graph.reader), add_scope(graph, name))

    def emit_linear(branch: Branch, role: str) -> Value:
        weight, bias = linears[role]
        bias_param = None if bias is None else derive(f"{role}.bias", branch.bias or branch.weight, bias)
        x = branch.linear.inputs[0]
        return ops.linear(x, derive(f"{role}.weight", branch.weight, weight), bias_param, name=role)

    def emit_rotated(branch: Branch, role: str) -> Value | None:
        if role not in linears or branch.rope is None:
            return None
        x, (at, frequencies) = emit_linear(branch, role), branch.rope.inputs[1:]
        assert frequencies is not None
        if pairs is not None and isinstance(frequencies, Param):
            frequencies = derive_param(frequencies, _select_frequencies(frequencies.recipe, pairs), (len(pairs),))
        elif pairs is not None:
            frequencies = ops.slice_(frequencies, axis=0, start=0, stop=len(pairs))
        return ops.rope(x, at, frequencies, **{**branch.rope.attrs, "heads": x.width // (2 * frequencies.width)})

    with graph.inserting(before=node):
        plain = emit_linear(q, "q") if "q" in linears else node.required_operand("q")
        rotated = [emit_rotated(q, "q_rope"), emit_rotated(k, "k_rope")]
        latent = emit_linear(k, "latent")
        ups = (derive(f"{role}.weight", k.weight, linears[role][0]) for role in ("k_up", "v_up"))
        heads, masks = node.attrs["heads"], node.inputs[3:6]
        y = emit_expanded(plain, rotated[0], latent, rotated[1], *ups, *masks, heads=heads, **attrs)
    old_nodes = backward_slice([node.output], (k.linear.inputs[0], q.linear.inputs[0], *node.inputs[3:6]))
    replace_uses(node.output, y)
    erase_unused(graph, old_nodes)
    assert y.producer is not None
    return y.producer


def _select_frequencies(recipe: Recipe, pairs: Sequence[int]) -> Recipe:
    """Return a recipe of the RoPE frequencies in `recipe` at the indices `pairs`, as `RopeFrequencies` if possible."""
    count = len(pairs)
    if isinstance(recipe, RopeFrequencies) and pairs[-1] < count:
        dim, theta = recipe.dim, recipe.theta
        if recipe == RopeFrequencies(dim, theta):
            return RopeFrequencies(2 * count, theta ** (2 * count / dim))
    return Take(recipe, tuple(pairs))


@dataclass(frozen=True)
class _Latent:
    """The factorization of an attention's keys and values into linears of one value, `latent`.

    k_rows, v_rows: [kv_heads, d] and [kv_heads, dv], the weight rows of `k_linear` and `v_linear` for each KV head.
    shared: the rotary features of the keys, which all heads share; None without.
    reason: why the attention cannot attend to the latent; None if it can.
    """

    latent: Value
    k_linear: Node
    v_linear: Node
    k_rows: Array
    v_rows: Array
    shared: Value | None
    reason: str | None

    @property
    def has_only_readers(self) -> bool:
        """Return whether only `k_linear` and `v_linear` read the latent, and keys and values use all of their rows."""
        linears = {self.k_linear: set(self.k_rows.flat), self.v_linear: set(self.v_rows.flat)}
        if self.k_linear is self.v_linear:
            linears = {self.k_linear: set(self.k_rows.flat) | set(self.v_rows.flat)}
        reads_only = set(self.latent.users) == set(linears) and not self.latent.is_output
        return reads_only and all(len(used_rows) == linear.output.width for linear, used_rows in linears.items())


def _find_latent(node: Node) -> _Latent | None:
    """Return the latent of attention `node`; None if k and v are not linear in one value or its cache is quantized."""
    k, v = (node.operand(name) for name in "kv") if node.op is ops.attention else (None, None)
    if k is None or v is None or node.attrs["cache_bits"] is not None:  # it keeps keys and values of heads
        return None
    kv_heads = node.attrs["kv_heads"]
    of_k, of_v = ({x: n.reshape(kv_heads, -1) for x, n in trace_sources(y).items()} for y in (k, v))
    k_from, v_from = ([x for x in parts if x.producer and x.producer.op is ops.linear] for parts in (of_k, of_v))
    if len(k_from) != 1 or len(v_from) != 1 or len(of_v) != 1 or len(of_k) > 2:
        return None
    k_linear, v_linear = k_from[0].producer, v_from[0].producer
    assert k_linear is not None and v_linear is not None
    latent, labels = k_linear.inputs[0], of_k.pop(k_from[0])
    if latent is None or v_linear.inputs[0] is not latent:
        return None
    d = int((labels[0] > 0).sum())
    fits = (labels[:, :d] > 0).all() and not labels[:, d:].any()
    shared = next(iter(of_k), None)
    if shared is not None:
        expected = np.arange(1, shared.width + 1)
        fits &= (of_k[shared][:, d:] == expected).all() if shared.width == labels.shape[1] - d else False
    if not fits:
        return None
    k_rows, v_rows, reason = labels[:, :d] - 1, of_v[v_from[0]] - 1, None
    if node.operand("past_k") is not None:
        reason = "it has a cache of its keys and values; run the pass before kv-cache"
    elif _has_bias(k_linear, k_rows) or _has_bias(v_linear, v_rows):
        reason = "its keys or values have a bias"
    elif not all(isinstance(n.operand("weight"), Param) for n in (k_linear, v_linear)):
        reason = "the weights of its keys or values are computed"
    return _Latent(latent, k_linear, v_linear, k_rows, v_rows, shared, reason)


def _has_bias(linear: Node, index: Array) -> bool:
    """Return whether the rows `index` of `linear` have a nonzero bias."""
    bias = linear.operand("bias")
    if not isinstance(bias, Param):
        return bias is not None
    return not is_zero(slice_rows(bias.recipe, int(index.min()), int(index.max()) + 1, linear.graph.reader))


def _absorb_weights(node: Node, latent: _Latent) -> None:
    heads, shared = node.attrs["heads"], latent.shared
    attrs = {name: value for name, value in node.attrs.items() if name not in FORM_ATTRS}
    with node.graph.inserting(before=node):
        ups = (
            _derive_up_weight(latent.k_linear, latent.k_rows, heads, "k_up"),
            _derive_up_weight(latent.v_linear, latent.v_rows, heads, "v_up"),
        )
        plain, rotary = _split_heads(node.required_operand("q"), heads, latent.k_rows.shape[1])
        y = emit_absorbed(plain, rotary, latent.latent, shared, *ups, *node.inputs[3:6], heads=heads, **attrs)
    _replace_value(node, node.output, y, (plain, rotary, latent.latent, shared))


def _derive_up_weight(linear: Node, head_rows: Array, heads: int, name: str) -> Param:
    """Return the weight [heads·d, rank] that maps the latent to keys or values of `heads` query heads. `head_rows`
    [kv_heads, d] are the rows of `linear` per KV head, `name` is the scope-local name if a new parameter is needed."""
    weight = require_param(linear, "weight")
    # Every query head gets the rows of its KV head, as ⌊h · kv_heads / heads⌋.
    index = head_rows[np.arange(heads) * len(head_rows) // heads].reshape(-1).tolist()
    if index == list(range(weight.shape[0])):
        return weight
    name = add_scope(linear.graph, f"{name}.weight")
    return derive_param(weight, take_rows(weight.recipe, index), (len(index), weight.width), name)


def _split_heads(x: Value, heads: int, first: int) -> tuple[Value, Value | None]:
    """Split every head of x [batch, n, heads·w] after `first` features; return [batch, n, heads·first] and the rest.
    The rest is None if `first` is w."""
    head_width = x.width // heads
    if first == head_width:
        return x, None
    lead = (*x.shape[:2], heads)
    merged = x.producer.inputs[0] if x.producer and x.producer.op is ops.reshape else None
    node = merged.producer if merged is not None and len(merged.shape) == 4 else None
    parts = list(node.inputs) if node is not None and node.op is ops.concat and node.attrs["axis"] % 4 == 3 else []
    if [p.shape for p in parts if p is not None] != [(*lead, first), (*lead, head_width - first)]:
        parts = list(ops.split.emit(ops.reshape(x, shape=(*lead, head_width)), sizes=(first, head_width - first)))
    plain, rotary = (_merge_heads(p) for p in parts if p is not None)
    return plain, rotary


def _merge_heads(part: Value) -> Value:
    """Reshape [batch, n, heads, w] to [batch, n, heads·w]; return the source instead if it already had that shape."""
    shape = (*part.shape[:2], int(part.shape[2]) * part.width)
    source = part.producer.inputs[0] if part.producer and part.producer.op is ops.reshape else None
    return source if source is not None and source.shape == shape else ops.reshape(part, shape=shape)


def _replace_value(node: Node, old: Value, new: Value, sources: tuple[Value | None, ...]) -> None:
    """Replace `old` by `new`, and erase the nodes between `sources` and `old` that are left without readers. A packed
    linear of which a piece has no readers is split, and the linear of this piece is erased."""
    graph = node.graph
    old_nodes = backward_slice([old], sources)
    replace_uses(old, new)
    erase_unused(graph, old_nodes)
    for split in [n for n in old_nodes if not n.erased and n.op is ops.split]:
        source = split.required_operand("x")
        is_packed = source.producer is not None and source.producer.op is ops.linear and len(source.uses) == 1
        if is_packed and any(not v.uses for v in split.outputs):
            erase_unused(graph, [v.producer for v in split_linear(split) if v.producer is not None])


def _expand_attention(node: Node) -> str | None:
    """Replace the latent attention `node` by one on keys and values; return None, or a reason (str) against it."""
    heads, rank, q = node.attrs["heads"], node.attrs["value_dim"], node.required_operand("q")
    if node.operand("past_k") is not None:
        return "it has a cache of the latent; run mla-expand before kv-cache"
    if node.attrs["cache_bits"] is not None:
        return "its cache has scales of latents; run mla-expand before quantize-cache"
    if node.attrs["kv_heads"] != 1:
        return f"it has {node.attrs['kv_heads']} KV heads, not one latent"
    after = node.output.users
    by_head = len(node.output.uses) == 1 and not node.output.is_output and after[0].op is ops.head_linear
    if not by_head or after[0].attrs["inverse"] or after[0].attrs["heads"] != heads:
        return "its result has other readers than one head_linear with W_UV"
    first = np.arange(1, heads * rank + 1).reshape(heads, rank)
    sources = (x for x, n in trace_sources(q).items() if np.array_equal(n.reshape(heads, -1)[:, :rank], first))
    candidates = (x.producer for x in sources if x.producer is not None and x.producer.op is ops.head_linear)
    k_up = next((n for n in candidates if n.attrs["inverse"]), None)
    if k_up is None or k_up.attrs["heads"] != heads:
        return "its queries do not come from a head_linear with W_UKᵀ"
    plain, *ups = k_up.required_operand("x"), *(n.required_operand("weight") for n in (k_up, after[0]))
    attrs = {name: value for name, value in node.attrs.items() if name not in FORM_ATTRS}
    if attrs["scale"] is None:
        # The default scale would follow the new width of the heads.
        attrs["scale"] = 1 / math.sqrt(q.width // heads)
    with node.graph.inserting(before=node):
        latent, shared = _split_features(node.required_operand("k"), rank)
        rotary = None if shared is None else _split_heads(q, heads, rank)[1]
        y = emit_expanded(plain, rotary, latent, shared, *ups, *node.inputs[3:6], heads=heads, **attrs)
    _replace_value(after[0], after[0].output, y, (plain, rotary, latent, shared))
    return None


def _split_features(x: Value, first: int) -> tuple[Value, Value | None]:
    """Split the last axis of x [batch, n, width] after `first` features; the second part is None if first = width."""
    if first == x.width:
        return x, None
    parts = x.producer.inputs if x.producer is not None and x.producer.op is ops.concat else ()
    if [p.width for p in parts if p is not None] != [first, x.width - first]:
        parts = ops.split.emit(x, sizes=(first, x.width - first))
    head, tail = parts
    assert head is not None
    return head, tail
