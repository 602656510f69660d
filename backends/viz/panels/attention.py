"""Which token sees which: masks of a size that shows their pattern, rolling caches, and how far layers see together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from weft.ir.ops import rolling
from weft.ir.ops.softmax_attention import allowed

from ..model.labels import RECURRENT
from ..model.network import Network, Vertex
from .kinds import Kind, attentions, grouped, layers

TOKENS = 24  # of a mask that is shown
SOURCE = 16  # of another text that is attended to
SMALL = 8  # what a window of more than TOKENS/2 is shown as
KEPT = 4  # tokens at the beginning that are shown as seen by all
STEPS = 20  # of a rolling cache


def data(network: Network) -> dict[str, Any] | None:
    """Every kind of attention with a mask, and the reach of the layers; nothing where there is no attention."""
    kinds = grouped(network)
    if not kinds:
        return None
    return {
        "kinds": [_told(kind, found, network.context) for kind, found in kinds.items()],
        "reach": reach(network),
    }


def _told(kind: Kind, found: list[Vertex], context: int | None) -> dict[str, Any]:
    small = shrunk(kind)
    scaled = small != kind
    return {
        "title": title(kind),
        "where": layers(v.scope or v.name for v in found),
        "count": len(found),
        "at": found[0].name,
        "said": list(_said(kind, small, context)),
        "scaled": scaled,
        "mask": ["".join(map(str, row.astype(int))) for row in mask(small)],
        "sinks": kind.sinks,
        "cross": kind.cross,
        "rolling": _rolling(small, kind) if kind.causal and kind.window and kind.pattern == "dense" else None,
    }


def title(kind: Kind) -> str:
    """What a kind of attention is called."""
    if kind.cross:
        return "Attention to the source"
    first = "Causal" if kind.causal else "Both ways"
    more = [] if kind.pattern == "dense" else [f"{kind.pattern} by {kind.stride:,}"]
    more += [f"window {kind.window:,}"] if kind.window is not None else []
    more += [f"first {kind.keep_first} kept"] if kind.keep_first else []
    return ", ".join([first, *more, *(["sinks"] if kind.sinks else [])])


def shrunk(kind: Kind) -> Kind:
    """A kind whose pattern shows within `TOKENS` tokens: windows and strides of more are smaller in it."""
    stride, summary = kind.stride, kind.summary
    if kind.pattern != "dense":
        most = 3 if kind.pattern == "dilated" else 6
        stride = min(kind.stride, most)
        summary = min(stride, max(1, round(kind.summary * stride / kind.stride)))
    window = kind.window
    if window is not None and window > TOKENS // 2:
        window = stride * 3 if kind.pattern == "dilated" else SMALL
    return replace(kind, window=window, stride=stride, summary=summary, keep_first=min(kind.keep_first, KEPT))


def mask(kind: Kind) -> Any:
    """Which of so many query tokens sees which key, bool [queries, keys], by the meaning of the op."""
    keys = SOURCE if kind.cross else TOKENS
    query, key = np.arange(TOKENS)[:, None], np.arange(keys)[None]
    settings = (kind.causal, kind.window, kind.keep_first, kind.pattern, kind.stride, kind.summary)
    return np.broadcast_to(allowed(query, key, *settings), (TOKENS, keys))


def _said(kind: Kind, small: Kind, context: int | None) -> Iterator[str]:
    """The true numbers, in sentences."""
    if kind.cross:
        yield "Every token sees all tokens of the source."
    elif kind.causal:
        yield "A token sees itself and those before it."
    else:
        yield "A token sees those before and behind it."
    if kind.window is not None:
        away = f"Of these, those less than {kind.window:,} away" + (
            f"; {small.window} in the picture" if kind != small and small.window != kind.window else ""
        )
        yield away + "."
        if context and kind.window >= context:
            yield f"The model is made for {context:,} tokens, so the window hides nothing."
    yield from _patterned(kind, small)
    if kind.keep_first:
        drawn = f" ({small.keep_first} in the picture)" if small.keep_first != kind.keep_first else ""
        yield f"The first {kind.keep_first} tokens of the text{drawn} are seen by all (Xiao 2023)."
    if kind.sinks:
        yield "Every head has a learned score beside the scores of keys: it takes weight and gives nothing."
    if kind.latent:
        yield f"All {kind.heads} heads read one latent of a token, of which its keys and values are made."
    elif not kind.cross and kind.kv_heads != kind.heads:
        yield f"{kind.heads} query heads read {kind.kv_heads} key and value heads: {kind.heads // kind.kv_heads} each."


def _patterned(kind: Kind, small: Kind) -> Iterator[str]:
    drawn = f" ({small.stride} in the picture)" if small.stride != kind.stride else ""
    if kind.pattern == "dilated":
        yield f"Every {kind.stride:,}th token only{drawn}."
    elif kind.pattern == "strided":
        yield f"The last {kind.stride:,} tokens, and every {kind.stride:,}th before{drawn} (Child 2019)."
    elif kind.pattern == "fixed":
        yield (
            f"Tokens of the same block of {kind.stride:,}{drawn}, and the last {kind.summary:,} of every block "
            "(Child 2019)."
        )
    elif kind.pattern == "chunked":
        yield f"Tokens of the same block of {kind.stride:,}{drawn}."


def _rolling(small: Kind, kind: Kind) -> dict[str, Any]:
    """Which position every slot of a rolling cache holds after every step, −1 for none, the first `keep` of them apart;
    `slots` and `first` are those of the true cache."""
    assert small.window is not None and kind.window is not None
    slots = small.window + small.keep_first
    newest = np.arange(max(STEPS, 2 * slots + 4))[:, None]
    held = rolling.held(newest, slots, small.keep_first)
    return {
        "slots": kind.window + kind.keep_first,
        "first": kind.keep_first,
        "keep": small.keep_first,
        "held": np.where((held >= 0) & (held <= newest), held, -1).tolist(),
    }


# -- layers together


def reach(network: Network) -> dict[str, Any] | None:
    """How many tokens before it a token knows of after every layer, None for all; nothing where every layer sees all.

    A token far into a text knows of what is seen by those that it sees, layer by layer. A recurrence knows of all.
    """
    kinds = {v.name: kind for v, kind in attentions(network) if kind.causal and not kind.cross}
    mixers = [v for v in network.vertices if v.name in kinds or v.meant.op in RECURRENT]
    if all(v.name not in kinds or kinds[v.name].sees_all for v in mixers):
        return None
    last = max(network.context or 0, 1 + sum(k.window or k.stride for k in kinds.values())) - 1
    steps: list[list[Any]] = []
    for i, v in enumerate(mixers):
        first: int | None = last
        for below in reversed(mixers[: i + 1]):  # from the layer down to the tokens
            first = None if first is None or below.name not in kinds else _earliest(kinds[below.name], first)
        kind = kinds.get(v.name)
        steps.append(
            [v.scope or v.name, None if first is None else last - first, title(kind) if kind else "recurrence"]
        )
    return {"context": network.context, "steps": steps}


def _earliest(kind: Kind, token: int) -> int | None:
    """The first position that the token at a position sees, the first ones of the text left out; None: all of them.

    Of a pattern without a window that has an end, only chunks: the others see something of every part of the text.
    """
    if kind.window is None and kind.pattern != "chunked":
        return None
    start = token + 1 - min(token + 1, kind.window or kind.stride)
    if kind.pattern == "dense":
        return start
    if kind.pattern == "chunked":
        return max(start, token // kind.stride * kind.stride)
    shift = start // kind.stride * kind.stride  # patterns repeat; positions may be beyond what an array holds
    keys = np.arange(start - shift, min(start - shift + kind.stride, token + 1 - shift))
    seen = allowed(np.array(token - shift), keys, True, kind.window, 0, kind.pattern, kind.stride, kind.summary)
    return shift + int(keys[np.argmax(seen)])
