"""The distinct kinds of attention in a network, and the layers that have them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from weft.ir.schema.visible_keys import VisibleBlocks, VisibleKeys

from ..model.network import Network, Vertex

_NUMBER = re.compile(r"(?:(?P<stem>.+?)\.)?(?P<number>\d+)(?:\.|$)")


@dataclass(frozen=True)
class Kind:
    """A kind of softmax attention: its numbers of heads and the keys visible to its queries.

    `sinks`: every head has an extra learned logit.
    `cross`: keys belong to another sequence.
    `latent`: keys and values are projected from a latent that all heads share (DeepSeek-V2).
    `blocks`: the visible blocks of block-sparse attention, else None.
    `chosen`: the number of visible keys that an index selects for each query; None: all.
    """

    heads: int
    kv_heads: int
    keys: VisibleKeys
    sinks: bool
    cross: bool
    latent: bool
    blocks: VisibleBlocks | None = None
    chosen: int | None = None


def list_attentions(network: Network) -> Iterator[tuple[Vertex, Kind]]:
    """Yield (vertex, kind) for every softmax attention, in order. Leave out those whose windows are folded into the
    batch axis: its size is a product."""
    shapes = _list_shapes(network)
    lengths = {name: shape[1] for name, shape in shapes.items()}
    chosen = {v.makes[0]: int(v.text("top_k")) for v in network.vertices if v.op == "lightning_index"}
    for v in network.vertices:
        if v.weft_op.attends and not any("*" in shapes[name][0] for name in v.weft_op.reads[:1] if name in shapes):
            yield v, _read_kind(v.weft_op, lengths, chosen)


def _read_kind(v: Vertex, lengths: Mapping[str, str], chosen: Mapping[str, int]) -> Kind:
    def number(name: str, default: int) -> int:
        return int(v.text(name, str(default)))

    heads = number("heads", 1)
    window = v.text("window")
    operands = dict(zip(v.roles, v.reads, strict=False))
    q, k = lengths.get(operands.get("q", "")), lengths.get(operands.get("k", ""))
    return Kind(
        heads,
        number("kv_heads", heads),
        VisibleKeys(
            causal=v.text("causal").lower() in ("true", "1"),
            window=None if window in ("", "none", "None") else int(window),
            keep_first=number("keep_first", 0),
            pattern=v.text("pattern", "dense"),
            stride=number("stride", 1),
            summary=number("summary", 1),
        ),
        "sinks" in v.roles or any(w.name.rpartition(".")[2] == "sinks" for w in v.weights),
        None not in (q, k) and q != k,
        "value_dim" in v.attrs,
        VisibleBlocks(**{f.name: int(v.attrs[f.name]) for f in fields(VisibleBlocks) if f.name in v.attrs})
        if v.op == "block_sparse_attention"
        else None,
        chosen.get(operands.get("bias", "")),
    )


def _list_shapes(network: Network) -> dict[str, list[str]]:
    """Map each value with two or more axes to its sizes, as strings; axis 1 counts tokens, as in [batch, seq, …]."""
    types = [*network.inputs.items(), *(pair for v in network.vertices for pair in zip(v.makes, v.types, strict=False))]
    sizes = {name: text.partition("[")[2].rstrip("]").split(", ") for name, text in types}
    return {name: shape for name, shape in sizes.items() if len(shape) > 1}


def group_by_kind(network: Network) -> dict[Kind, list[Vertex]]:
    """Group the attentions of a network by kind, in order of first appearance."""
    kinds: dict[Kind, list[Vertex]] = {}
    for v, kind in list_attentions(network):
        kinds.setdefault(kind, []).append(v)
    return kinds


def abbreviate_layers(scopes: Iterable[str]) -> str:
    """Return scopes as "layers 0–31" for layers.0.attn, layers.1.attn, …; "layers 0, 2 … 94" for every second."""
    numbers: dict[str, list[int]] = {}
    for scope in scopes:
        match = _NUMBER.match(scope)
        numbers.setdefault(match["stem"] or "" if match else scope, []).extend([int(match["number"])] if match else [])
    phrases = []
    for stem, group in numbers.items():
        distinct = sorted(set(group))
        name = stem.replace(".", " ") if len(distinct) != 1 else stem.replace(".", " ").removesuffix("s")
        phrases.append(" ".join(filter(None, [name, _abbreviate_numbers(distinct)])))
    return "; ".join(filter(None, phrases))


def _abbreviate_numbers(numbers: Sequence[int]) -> str:
    """Return a short form of sorted numbers: "0, 2 … 94" if the step is constant and not 1, else runs, as "0–3, 7"."""
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]} … {numbers[-1]}" if len(numbers) > 3 else ", ".join(map(str, numbers))
    starts = [n for i, n in enumerate(numbers) if not i or n != numbers[i - 1] + 1]
    ends = [n for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    runs = [str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(runs if len(runs) < 9 else [*runs[:4], "…", runs[-1]])
