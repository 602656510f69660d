"""Lower attention: softmax to the attention functions of transformers, with its caches and its masks, one for each set
of visible keys that layers share; relative to torch.
"""

from __future__ import annotations

from collections.abc import Collection

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Node, Value
from weft.passes.analysis.states import find_cache_owner
from weft.passes.library.target.sides import HIDDEN, MASK

from ...ops.calls import FunctionCall
from ...ops.elementwise import format_number
from ...ops.masks import is_dense, write_visibility
from ...program.statements import Operand, Statement, Submodule, Var
from .lower_embeddings import emit_distances
from .model_emitter import (
    BIDIRECTIONAL,
    CACHE,
    CHUNKED,
    FULL,
    INDEX,
    RECURRENT,
    SLIDING,
    STANDARD_MASKS,
    AttentionRecord,
    HFEmitter,
    SharedMask,
    find_param,
    get_first_operand,
    hf_lowering,
)

FETCH = "ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, {eager})"


@hf_lowering(ops.attention)
def _lower_attention(e: HFEmitter, node: Node) -> Operand | None:
    if not is_batched(node):
        return None  # attention within groups of tokens, whose masks differ: SDPA, as in target torch
    a, width = node.attrs, e.size_of(node.required_operand("q"))
    heads, kv_heads = e.attr(node, "heads"), e.attr(node, "kv_heads")
    q = e.split_heads(node.required_operand("q"), heads, "q")
    k = e.split_heads(node.required_operand("k"), kv_heads, "k")
    # Keys that are also values are passed as both: caches of engines have one width.
    v = k if a["value_dim"] else e.split_heads(node.required_operand("v"), kv_heads, "v")
    mask = get_mask(e, node)
    default = f"{parenthesize(width // heads)} ** -0.5"
    scale = default if a["scale"] is None else format_number(e.attr(node, "scale"))
    attending = AttentionRecord(node, scale, "1" if a["heads"] == a["kv_heads"] else f"{heads // kv_heads}".strip("()"))
    operands: list[Value | Operand] = [q, k, v, mask]
    keywords = _write_score_keywords(e, node, attending, operands)
    if len(_list_distinct(node)) == 1 and not e.separate:
        return _emit_inline(e, node, attending, operands, keywords)
    if node in e.cross_attentions:
        operands[1:3] = _emit_cross_cache(e, k, v)
    path = next(n.output.name for n in _list_alike(node) if _find_key(n) == _find_key(node))
    cached = node in e.cached
    order = _list_distinct(node, e.cached).index(_find_key(node)) if cached else 0
    index = (f"layer_idx + {order}" if order else "layer_idx") if cached and not e.shares_weights else "None"
    causal = "" if attending.causal else ", is_causal=False"
    leaf = Submodule(path, f"SoftmaxAttention(config, {index}, {attending.groups}, {attending.scaling}{causal})")
    slots = [CACHE, INDEX][: 1 + e.shares_weights] if cached else []
    last, arguments = len(operands), "".join(f", {text}" for text in keywords)
    past = f", past_key_values={e.write_self_cache(f'{{{last + 1}}}')}" if cached else ""
    past += f", layer_idx={{{last + 2}}}" if INDEX in slots else ""
    text = f"{{{last}}}({{0}}, {{1}}, {{2}}, {{3}}{arguments}{past}, **kwargs)"
    x = e.emit(text, *operands, leaf, *slots, name="x")
    _record_attention(e, attending)
    return x


@hf_lowering(ops.lightning_index)
def _lower_lightning_index(e: HFEmitter, node: Node) -> Operand:
    raise WeftError(
        f"target transformers has no cache for the keys of a lightning index (%{node.output.name}): choose target torch"
    )


def is_batched(node: Node) -> bool:
    """Return whether the first axis of the queries is the batch axis of a graph input."""
    return node.required_operand("q").shape[0] in {value.shape[0] for value in node.graph.inputs.values()}


def _list_alike(node: Node) -> list[Node]:
    """Return the attentions in the scope of `node`, in order."""
    return [n for n in node.graph.nodes if n.scope == node.scope and n.op is ops.attention]


def _list_distinct(node: Node, among: Collection[Node] | None = None) -> list[tuple[Value, ...]]:
    """Return the distinct keys (`_find_key`) of attentions in the scope of `node`, if given only of `among`."""
    return [*dict.fromkeys(_find_key(n) for n in _list_alike(node) if among is None or n in among)]


def _find_key(node: Node) -> tuple[Value, ...]:
    """Return the nearest parameter before each of q, k, v (see `find_param`): equal for repeated runs of a module."""
    return tuple(find_param(v) for v in node.inputs[:3] if v is not None)


def _write_score_keywords(
    e: HFEmitter, node: Node, attending: AttentionRecord, operands: list[Value | Operand]
) -> list[str]:
    """Return the source of the keyword arguments softcap, s_aux (sinks), position_bias and sliding_window that the
    attention needs. Their names are added to `attending.features`, the operands that they read to `operands`."""
    keywords = []
    if node.attrs["softcap"] is not None:
        attending.features.add("softcap")
        keywords.append(f"softcap={format_number(e.attr(node, 'softcap'))}")
    for name, operand in (("s_aux", "sinks"), ("position_bias", "bias")):
        if (value := node.operand(operand)) is not None:
            attending.features.add(name)
            keywords.append(f"{name}={{{len(operands)}}}")
            operands.append(value)
    if node.attrs["window"] is not None and is_dense(node) and not node.attrs["keep_first"]:
        attending.features.add("sliding_window")
        keywords.append(f"sliding_window={e.attr(node, 'window')}")
    return keywords


def _emit_inline(
    e: HFEmitter, node: Node, attending: AttentionRecord, operands: list[Value | Operand], keywords: list[str]
) -> Operand:
    """Emit the call of the attention function in the module of its projections; return the result [batch, seq, dim]."""
    q, k, v, *rest = operands
    if node in e.cached:
        assert isinstance(k, Var) and isinstance(v, Var)
        new = k, v
        k, cached_v = e.emit_keys_once(node, lambda: emit_cache_update(e, *new))
        v = cached_v or v
    elif node in e.cross_attentions:
        k, v = _emit_cross_cache(e, k, v)
    eager = "eager_scored_attention" if attending.features - {"sliding_window"} else "eager_attention"
    attend = e.emit(FETCH.format(eager=eager), name="attention_interface")
    # An attention that reads the cache of another also needs a cache number, by which engines find their caches.
    numbered = (CACHE, INDEX) if node in e.cached and find_cache_owner(node) is not node else ()
    arguments = "".join(f", {text}" for text in keywords)
    text = f"{{{len(operands)}}}(self, {{0}}, {{1}}, {{2}}, {{3}}, scaling=self.scaling{arguments}, **kwargs)"
    x, _ = e.emit_tuple(text, q, k, v, *rest, attend, *numbered, names=("x", "weights"))
    _record_attention(e, attending)
    hidden, latent = _find_hidden_states(node), e.attr(node, "value_dim")
    if latent:
        width = e.size_of(node.required_operand("k")) // e.attr(node, "kv_heads")
        return e.emit(f"{{0}}.reshape(*{{1}}.shape[:-1], -1, {width})[..., :{latent}].flatten(2)", x, hidden, name="x")
    return e.emit("{0}.reshape(*{1}.shape[:-1], -1)", x, hidden, name="x", replaces=0)


def emit_cache_update(e: HFEmitter, k: Value | Operand, v: Value | Operand) -> tuple[Var, Var]:
    """Emit the cache update with new keys and values k, v; return (all keys, all values). Without a cache these are k,
    v. Paged caches of continuous batching read `kwargs`."""
    part = ".self_attention_cache" if e.cross_attentions else ""
    text = f"({{2}}, {{3}}) if {{0}} is None else {{0}}{part}.update({{2}}, {{3}}, {{1}}, kwargs=kwargs)"
    outputs = e.emit_tuple(text, CACHE, INDEX, k, v, names=("k", "v"))
    return outputs[0], outputs[1]


def _emit_cross_cache(e: HFEmitter, k: Value | Operand, v: Value | Operand) -> tuple[Value | Operand, ...]:
    """Return (keys, values) of a cross-attention. In a model with caches, emit that the first forward computes and
    stores them, and that later ones read them."""
    if not e.cached:
        return k, v
    assert isinstance(k, Var) and isinstance(v, Var)
    text_k, operands_k = e.inline(k, 2)
    text_v, operands_v = e.inline(v, 2 + len(operands_k))
    text = f"update_cross_cache({{0}}, {{1}}, lambda: ({text_k}, {text_v}))"
    outputs = e.emit_tuple(text, CACHE, INDEX, *operands_k, *operands_v, names=("k", "v"))
    e.cross_writes.add(e.program.statements[-1])
    return outputs


def _record_attention(e: HFEmitter, attending: AttentionRecord) -> None:
    """Record that the last statement computes `attending`; the outer module also returns its weights, if any."""
    statement, node = e.program.statements[-1], attending.node
    e.attentions[statement] = attending
    outer = node.scope.rpartition(".")[0]
    if len(statement.results) == 2 and outer:
        e.program.statements.append(Statement("", statement.results[1:], (), outer))


def _find_hidden_states(node: Node) -> Value:
    """Return the hidden states [batch, seq, dim] from which the scope of `node` computes queries, else the queries."""
    value = node.required_operand("q")
    while value.producer is not None and value.producer.scope == node.scope and len(value.producer.inputs) > 0:
        before = get_first_operand(value.producer)
        if len(before.shape) != len(value.shape) and value.producer.op is not ops.reshape:
            break
        value = before
    return value if len(value.shape) == 3 else node.required_operand("q")


def parenthesize(x: object) -> str:
    """Return the source of `x` as an operand of a product or power: in parentheses if it contains spaces and does not
    start with one (then all of it must be in parentheses)."""
    text = str(x)
    return f"({text})" if " " in text and not text.startswith("(") else text


@hf_lowering(ops.relative_attention)
def _lower_relative_attention(e: HFEmitter, node: Node) -> Operand:
    if node in e.cross_attentions:
        raise WeftError(f"target transformers has no relative cross-attention (%{node.output.name}): use torch")
    heads = e.attr(node, "heads")
    q, k, v = (e.split_heads(node.required_operand(n), heads, n) for n in ("q", "k", "v"))
    mask, distance = get_mask(e, node), emit_distances(e)
    text = f"visible({{0}}, {{1}}{', causal=False' * (not node.attrs['causal'])})"
    seen = e.hoist(("visible", mask), text, mask, distance, name="seen")
    if node in e.cached:
        k, v = emit_cache_update(e, k, v)
    tables = node.required_operand("key_table"), node.operand("value_table")
    call = FunctionCall("relative_attention").add(q, k, v, *tables, distance, seen)
    return e.emit(f"{call}.transpose(1, 2).flatten(2)", *call.operands, name="x")


def get_mask(e: HFEmitter, node: Node) -> Var:
    """Return the mask of the attention `node`, emitted once for all attentions with the same visible keys; for a
    cross-attention the padding mask of the source. Raise WeftError if a cross-attention has a window or pattern."""
    if node in e.cross_attentions:
        return _emit_source_mask(e, node)
    kind, condition = get_mask_kind(e, node)
    name = "mask" if kind in (FULL, BIDIRECTIONAL) else kind.split("_")[0] + "_mask"
    operands: tuple[Operand, ...] = (e.embeds, e.attention_mask, *((e.self_past, e.positions) if e.is_decoder else ()))
    # Any: a tensor, a BlockMask of flex_attention, or None
    shared = e.share_mask(kind, condition, operands, name, "Any", bool(node.attrs["causal"]))
    shared.nodes.append(node)
    return shared.statement.results[0]


def _emit_source_mask(e: HFEmitter, node: Node) -> Var:
    """Return the padding mask of the source for the cross-attention `node`, emitted once."""
    if node.attrs.get("pattern", "dense") != "dense" or node.attrs.get("window") is not None:
        raise WeftError(f"target transformers has no window or pattern in cross-attention: %{node.output.name} has one")
    text = f"{STANDARD_MASKS[BIDIRECTIONAL]}(self.config, {{0}}, {{1}}, encoder_hidden_states={{2}})"
    mask = e.hoist("source mask", text, e.embeds, e.arguments[MASK], e.arguments[HIDDEN], name="source_mask")
    mask.type = "Any"
    return mask


def get_mask_kind(e: HFEmitter, node: Node) -> tuple[str, str]:
    """Return (kind, condition) of the mask of the attention `node`; see `SharedMask`."""
    a = node.attrs
    if a.get("pattern", "dense") == "dense" and a.get("window") is None:
        return FULL if a["causal"] else BIDIRECTIONAL, ""
    if a["causal"] and not a["keep_first"] and node.operand("bias") is None:
        window, chunk = (e.fields.values.get(name) for name in ("sliding_window", "attention_chunk_size"))
        if a["pattern"] == "dense" and a["window"] == window:
            return SLIDING, ""
        if a["pattern"] == "chunked" and a["window"] is None and a["stride"] == chunk:
            return CHUNKED, ""
    word = "window" if a["pattern"] == "dense" else a["pattern"]
    condition = write_visibility(node, e).format("q", "k")
    used = {mask.kind for mask in e.masks.values() if mask.condition != condition}
    name = next(n for n in (f"{word}_keys", *(f"{word}_keys_{i}" for i in range(2, 999))) if n not in used)
    return name, condition


def finish_masks(e: HFEmitter) -> str:
    """Write the text of all mask statements, once all masks are known. A single mask that a function of transformers
    can compute calls it: return "". Otherwise emit the call of a new function of all masks, and return its source."""
    kinds = {mask.kind: mask for mask in e.masks.values()}
    most = max((len(mask.statement.operands) for mask in kinds.values()), default=0)
    arguments = ", ".join(["self.config", *(f"{{{i}}}" for i in range(most))])
    if len(kinds) <= 1 and all(kind in STANDARD_MASKS and kind != RECURRENT for kind in kinds):
        for kind, mask in kinds.items():
            cache = ", None" if mask.causal and not e.is_decoder else ""
            mask.statement.text = f"{STANDARD_MASKS[kind]}({arguments}{cache})"
        return ""
    masks = Var("masks", type="dict[str, Any]")
    first = max((mask.statement for mask in kinds.values()), key=lambda s: len(s.operands))
    call = Statement(f"{e.masks_name}({arguments})", first.operands, (masks,), first.scope, early=True)
    e.program.statements.insert(e.program.statements.index(first), call)
    for kind, mask in kinds.items():
        mask.statement.text, mask.statement.operands = f'{{0}}["{kind}"]', (masks,)
    return _write_masks_function(e.masks_name, [*kinds.values()], e.is_decoder)


def _write_masks_function(name: str, masks: list[SharedMask], decodes: bool) -> str:
    """Return the source of the function `name` that returns {kind: mask} of all `masks` of a model. In a decoder
    (`decodes`), positions in conditions count from the first token that is not padding."""
    lines = [
        f"def {name}(",
        "    config: Any,",
        "    inputs_embeds: Tensor,",
        "    attention_mask: Any,",
        "    past_key_values: Cache | None = None,",
        "    position_ids: Tensor | None = None,",
        "    cache: Cache | None = None,",
        "    **kwargs: Any,",
        ") -> dict[str, Any]:",
        '    """Return the masks of all kinds of layers for new tokens inputs_embeds [batch, seq, width].',
        "",
        "    `attention_mask` [batch, past + seq] is 0 at padding, or is a former result, which is returned.",
        '    """',
        "    if isinstance(attention_mask, dict):",
        "        return attention_mask",
        "    past_key_values = past_key_values if cache is None else cache",
        "    given = (config, inputs_embeds, attention_mask, past_key_values, position_ids)",
    ]
    custom = [mask for mask in masks if mask.kind not in STANDARD_MASKS]
    if decodes and any(mask.condition for mask in custom):
        lines.append("    first = first_visible(inputs_embeds, attention_mask)")
    for mask in custom:
        lines += [
            "",
            f"    def {mask.kind}(batch: Any, head: Any, q: Any, k: Any) -> Any:",
            *(["        q, k = q - first[batch], k - first[batch]"] if decodes else []),
            f"        return {mask.condition}",
        ]
    lines += ["", "    return {"]
    for mask in masks:
        arguments = {RECURRENT: "*given[:4]", BIDIRECTIONAL: "*given[:3]"}.get(mask.kind, "*given")
        if mask.kind in STANDARD_MASKS:
            lines.append(f'        "{mask.kind}": {STANDARD_MASKS[mask.kind]}({arguments}),')
        else:
            maker = "create_causal_mask(*given" if mask.causal else "create_bidirectional_mask(*given[:3]"
            lines.append(f'        "{mask.kind}": {maker}, and_mask_function={mask.kind}),')
    return "\n".join([*lines, "    }"])
