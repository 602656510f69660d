"""Masks of softmax attention: one for each set of visible keys, made once for all layers."""

from __future__ import annotations

from weft.ir.graph import Node

from ...torch.ops.masks import seen_keys
from ...torch.program.statements import Operand, Statement, Var
from .emitter import BOTH, CHUNKED, FULL, RECURRENT, SLIDING, STANDARD, Mask, ShellEmitter


def mask_of(e: ShellEmitter, node: Node) -> Var:
    """The mask of an attention, which all that see the same keys share."""
    kind, condition = kind_of(e, node)
    key = kind, condition
    if key not in e.masks:
        name = "mask" if kind in (FULL, BOTH) else kind.split("_")[0] + "_mask"
        given: tuple[Operand, ...] = (e.embeds, e.attention_mask)
        if e.decodes:
            given = (*given, e.past, e.positions)
        made = e.hoist(("mask", key), "...", *given, name=name)
        made.type = "Any"  # a tensor, a BlockMask of flex_attention, or None
        statement = next(s for s in e.program.statements if made in s.results)
        e.masks[key] = Mask(kind, condition, statement, bool(node.attrs["causal"]))
    e.masks[key].nodes.append(node)
    return e.masks[key].statement.results[0]


def kind_of(e: ShellEmitter, node: Node) -> tuple[str, str]:
    """The kind of the mask of an attention, and the conditions beside causality where no kind of transformers has
    them."""
    a = node.attrs
    if a.get("pattern", "dense") == "dense" and a.get("window") is None:
        return FULL if a["causal"] else BOTH, ""
    if a["causal"] and not a["keep_first"] and node.operand("bias") is None:
        if a["pattern"] == "dense" and a["window"] == e.fields.values.get("sliding_window"):
            return SLIDING, ""
        if (
            a["pattern"] == "chunked"
            and a["window"] is None
            and a["stride"] == e.fields.values.get("attention_chunk_size")
        ):
            return CHUNKED, ""
    word = "window" if a["pattern"] == "dense" else a["pattern"]
    condition = seen_keys(node).format("q", "k")
    taken = {mask.kind for mask in e.masks.values() if mask.condition != condition}
    name = next(n for n in (f"{word}_keys", *(f"{word}_keys_{i}" for i in range(2, 999))) if n not in taken)
    return name, condition


def finish_masks(e: ShellEmitter) -> str:
    """Say how masks are made, now that all are known; return the function that makes them, "" if transformers' own
    is called."""
    kinds = {mask.kind: mask for mask in e.masks.values()}
    most = max((len(mask.statement.operands) for mask in kinds.values()), default=0)
    arguments = ", ".join(["self.config", *(f"{{{i}}}" for i in range(most))])
    if len(kinds) <= 1 and kinds.keys() <= {FULL, BOTH}:  # of others generate() makes a dict, by their kinds
        for kind, mask in kinds.items():
            mask.statement.text = f"{STANDARD[kind]}({arguments})"
        return ""
    masks = Var("masks", type="dict[str, Any]")
    first = max((mask.statement for mask in kinds.values()), key=lambda s: len(s.operands))
    whole = Statement(f"attention_masks({arguments})", first.operands, (masks,), first.scope, early=True)
    e.program.statements.insert(e.program.statements.index(first), whole)
    for kind, mask in kinds.items():
        mask.statement.text, mask.statement.operands = f'{{0}}["{kind}"]', (masks,)
    return _masks_function([*kinds.values()])


def _masks_function(masks: list[Mask]) -> str:
    """A function of the whole model that makes all its masks."""
    lines = [
        "def attention_masks(",
        "    config: Any,",
        "    inputs_embeds: Tensor,",
        "    attention_mask: Any,",
        "    past_key_values: Cache | None = None,",
        "    position_ids: Tensor | None = None,",
        "    **kwargs: Any,",
        ") -> dict[str, Any]:",
        '    """The masks of all kinds of layers, for a call with inputs_embeds [batch, seq, width].',
        "",
        "    `attention_mask` [batch, past + seq] hides padding, or is what this function made before.",
        '    """',
        "    if isinstance(attention_mask, dict):",
        "        return attention_mask",
        "    given = (config, inputs_embeds, attention_mask, past_key_values, position_ids)",
    ]
    custom = [mask for mask in masks if mask.kind not in STANDARD]
    if any(mask.condition for mask in custom):
        lines.append("    first = first_shown(inputs_embeds, attention_mask)")
    for mask in custom:
        name = mask.kind
        lines += [
            "",
            f"    def {name}(batch: Any, head: Any, q: Any, k: Any) -> Any:",
            "        q, k = q - first[batch], k - first[batch]",
            f"        return {mask.condition}",
        ]
    lines += ["", "    return {"]
    for mask in masks:
        given = {RECURRENT: "*given[:4]", BOTH: "*given[:3]"}.get(mask.kind, "*given")
        if mask.kind in STANDARD:
            lines.append(f'        "{mask.kind}": {STANDARD[mask.kind]}({given}),')
        else:
            maker = "create_causal_mask(*given" if mask.causal else "create_bidirectional_mask(*given[:3]"
            lines.append(f'        "{mask.kind}": {maker}, and_mask_function={mask.kind}),')
    return "\n".join([*lines, "    }"])
