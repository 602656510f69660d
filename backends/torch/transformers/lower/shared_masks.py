"""Masks of softmax attention: one for each set of visible keys, shared by all layers."""

from __future__ import annotations

from weft.ir.errors import WeftError
from weft.ir.graph import Node
from weft.passes.library.target.sides import HIDDEN, MASK

from ...ops.masks import write_visibility
from ...program.statements import Operand, Statement, Var
from .model_emitter import BIDIRECTIONAL, CHUNKED, FULL, RECURRENT, SLIDING, STANDARD_MASKS, HFEmitter, SharedMask


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
