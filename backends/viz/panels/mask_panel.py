"""Attention masks at a size that shows their pattern, rolling caches, and receptive fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from weft.ir.ops import caches
from weft.ir.schema.visible_keys import VisibleBlocks

from ..model.labels import RECURRENT
from ..model.network import Network, Vertex
from .kinds import Kind, abbreviate_layers, group_by_kind, list_attentions

TOKENS = 24  # queries, and keys of self-attention, in a drawn mask
SOURCE = 16  # keys of cross-attention in a drawn mask
SMALL = 8  # the drawn size of a window of more than TOKENS/2
MAX_SINKS = 4  # maximum number of always-visible first tokens in a drawn mask
STEPS = 20  # least number of drawn steps of a rolling cache


def build_panel(network: Network) -> dict[str, Any] | None:
    """Return "kinds" (the data of each kind of attention, with its mask) and "reach" (the receptive fields); None for a
    network without attention."""
    kinds = group_by_kind(network)
    if not kinds:
        return None
    return {
        "kinds": [_to_dict(kind, vertices, network.context) for kind, vertices in kinds.items()],
        "reach": compute_reach(network),
    }


def _to_dict(kind: Kind, vertices: list[Vertex], context: int | None) -> dict[str, Any]:
    small = shrink_kind(kind)
    rolls = kind.keys.causal and kind.keys.window and kind.keys.pattern == "dense"
    return {
        "title": name_kind(kind),
        "where": abbreviate_layers(v.scope or v.name for v in vertices),
        "count": len(vertices),
        "at": vertices[0].name,
        "sentences": list(_describe_kind(kind, small, context)),
        "scaled": small != kind,
        "mask": ["".join(map(str, row.astype(int))) for row in compute_mask(small)],
        "sinks": kind.sinks,
        "cross": kind.cross,
        "rolling": _draw_rolling_cache(small, kind) if rolls else None,
    }


def name_kind(kind: Kind) -> str:
    """Return the title of a kind of attention, such as "Causal, window 4,096"."""
    if kind.cross:
        return "Cross-attention"
    first = "Causal" if kind.keys.causal else "Bidirectional"
    properties = [] if kind.keys.pattern == "dense" else [f"{kind.keys.pattern} by {kind.keys.stride:,}"]
    properties += [f"window {kind.keys.window:,}"] if kind.keys.window is not None else []
    properties += [f"first {kind.keys.keep_first} kept"] if kind.keys.keep_first else []
    properties += [f"blocks of {kind.blocks.block:,}"] if kind.blocks is not None else []
    return ", ".join([first, *properties, *(["sinks"] if kind.sinks else [])])


def shrink_kind(kind: Kind) -> Kind:
    """Return `kind` with windows, strides, blocks and always-visible tokens reduced to show within `TOKENS` tokens."""
    stride, summary = kind.keys.stride, kind.keys.summary
    if kind.keys.pattern != "dense":
        stride = min(kind.keys.stride, 3 if kind.keys.pattern == "dilated" else 6)
        summary = min(stride, max(1, round(kind.keys.summary * stride / kind.keys.stride)))
    window = kind.keys.window
    if window is not None and window > TOKENS // 2:
        window = stride * 3 if kind.keys.pattern == "dilated" else SMALL
    first = min(kind.keys.keep_first, MAX_SINKS)
    if (blocks := kind.blocks) is not None:
        few = {name: min(getattr(blocks, name), 2) for name in ("block", "sides", "first", "last")}
        kind = replace(kind, blocks=replace(blocks, **few, dense=0))
    return replace(kind, keys=replace(kind.keys, window=window, stride=stride, summary=summary, keep_first=first))


def compute_mask(kind: Kind) -> Any:
    """Return the mask of a short sequence, bool [queries, keys] (True: visible), with TOKENS queries and TOKENS keys;
    for cross-attention with SOURCE keys."""
    if kind.blocks is not None:
        return kind.blocks.counts(TOKENS) > 0
    query, key = np.arange(TOKENS)[:, None], np.arange(SOURCE if kind.cross else TOKENS)[None]
    return kind.keys.mask(query, key)


def _describe_kind(kind: Kind, small: Kind, context: int | None) -> Iterator[str]:
    """Yield sentences that describe `kind`; where the drawn kind `small` has another size, state that too."""
    if kind.cross:
        yield "Every token attends to all source tokens."
    elif kind.blocks is not None:
        yield from _describe_blocks(kind.blocks, small.blocks or kind.blocks)
    elif kind.keys.causal:
        yield "Causal: a token attends to itself and earlier tokens."
    else:
        yield "Bidirectional: a token attends to all tokens."
    if kind.keys.window is not None:
        drawn = f"; {small.keys.window} in the picture" if small.keys.window != kind.keys.window else ""
        yield f"Window: only keys less than {kind.keys.window:,} positions away{drawn}."
        if context and kind.keys.window >= context:
            yield f"The context is {context:,} tokens, so the window has no effect."
    yield from _describe_pattern(kind, small)
    if kind.keys.keep_first:
        drawn = f" ({small.keys.keep_first} in the picture)" if small.keys.keep_first != kind.keys.keep_first else ""
        yield f"The first {kind.keys.keep_first} tokens{drawn} are always visible (attention sinks, Xiao 2023)."
    if kind.chosen:
        yield f"Of these, each token chooses the {kind.chosen:,} with the largest scores of an index (DeepSeek-V3.2)."
    if kind.sinks:
        yield "Learned sinks: each head has an extra logit without a value."
    if kind.latent:
        yield f"All {kind.heads} heads share one latent per token, which keys and values are projected from (MLA)."
    elif not kind.cross and kind.kv_heads != kind.heads:
        yield f"{kind.heads} query heads read {kind.kv_heads} key and value heads: {kind.heads // kind.kv_heads} each."


SENTENCES: dict[str, str] = {  # about patterns; a test checks that every pattern has one
    "dense": "",
    "dilated": "Every {stride:,}th token only{drawn}.",
    "strided": "The last {stride:,} tokens, and every {stride:,}th before{drawn} (Child 2019).",
    "fixed": "Tokens of the same block of {stride:,}{drawn}, and the last {summary:,} of every block (Child 2019).",
    "chunked": "Tokens of the same block of {stride:,}{drawn}.",
}


def _describe_blocks(blocks: VisibleBlocks, small: VisibleBlocks) -> Iterator[str]:
    drawn = f" ({small.block} in the picture)" if small.block != blocks.block else ""
    yield f"Bidirectional, in blocks of {blocks.block:,} tokens{drawn} (Zaheer 2020)."
    yield (
        f"A token attends to its own block and {blocks.sides} on each side, "
        f"the first {blocks.first} and the last {blocks.last}, whose tokens attend to all."
    )
    if blocks.first_weight > 1:
        yield f"Keys of the first blocks count {blocks.first_weight} times."
    if blocks.dense:
        yield f"In sequences of at most {blocks.dense:,} tokens a token attends to all tokens."


def _describe_pattern(kind: Kind, small: Kind) -> Iterator[str]:
    drawn = f" ({small.keys.stride} in the picture)" if small.keys.stride != kind.keys.stride else ""
    if sentence := SENTENCES[kind.keys.pattern]:
        yield sentence.format(stride=kind.keys.stride, summary=kind.keys.summary, drawn=drawn)


def _draw_rolling_cache(small: Kind, kind: Kind) -> dict[str, Any]:
    """Return the data of a rolling cache, drawn with the sizes of `small`.

    "slots", "first": the number of slots and of sinks (always-visible first tokens) of `kind`.
    "keep": the number of sinks in the drawing.
    "held": for each step a list of the position in each slot (−1: empty), sinks first.
    """
    assert small.keys.window is not None and kind.keys.window is not None
    slots = small.keys.window + small.keys.keep_first
    newest = np.arange(max(STEPS, 2 * slots + 4))[:, None]
    slot_positions = caches.find_slot_positions(newest, slots, small.keys.keep_first)
    return {
        "slots": kind.keys.window + kind.keys.keep_first,
        "first": kind.keys.keep_first,
        "keep": small.keys.keep_first,
        "held": np.where((slot_positions >= 0) & (slot_positions <= newest), slot_positions, -1).tolist(),
    }


# -- layers together


def compute_reach(network: Network) -> dict[str, Any] | None:
    """Return the receptive field after every layer; None if every layer sees the full sequence.

    "steps" has [layer, number of earlier tokens visible to the last token of a long sequence (None: all), title] per
    layer. Each layer extends the field by the keys visible to the earliest visible token; a recurrence sees all tokens.
    """
    kinds = {v.name: kind for v, kind in list_attentions(network) if kind.keys.causal and not kind.cross}
    mixers = [v for v in network.vertices if v.name in kinds or v.weft_op.op in RECURRENT]
    if all(v.name not in kinds or not kinds[v.name].keys.is_local for v in mixers):
        return None
    last = max(network.context or 0, 1 + sum(k.keys.window or k.keys.stride for k in kinds.values())) - 1
    steps: list[list[Any]] = []
    for i, v in enumerate(mixers):
        first: int | None = last
        for below in reversed(mixers[: i + 1]):  # from the layer down to the tokens
            first = None if first is None or below.name not in kinds else _find_earliest(kinds[below.name], first)
        kind = kinds.get(v.name)
        title = name_kind(kind) if kind else "recurrence"
        steps.append([v.scope or v.name, None if first is None else last - first, title])
    return {"context": network.context, "steps": steps}


def _find_earliest(kind: Kind, token: int) -> int | None:
    """Return the first position visible to the token at position `token`, ignoring sinks; None if all are visible.
    Without a window, only the pattern "chunked" has such a bound: other patterns reach back to the start."""
    if kind.keys.window is None and kind.keys.pattern != "chunked":
        return None
    start = token + 1 - min(token + 1, kind.keys.window or kind.keys.stride)
    if kind.keys.pattern == "dense":
        return start
    if kind.keys.pattern == "chunked":
        return max(start, token // kind.keys.stride * kind.keys.stride)
    shift = start // kind.keys.stride * kind.keys.stride  # patterns are periodic; positions may exceed array sizes
    keys = np.arange(start - shift, min(start - shift + kind.keys.stride, token + 1 - shift))
    seen = replace(kind.keys, causal=True, keep_first=0).mask(np.array(token - shift), keys)
    return shift + int(keys[np.argmax(seen)])
