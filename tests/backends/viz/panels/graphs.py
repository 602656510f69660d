"""Small decoders, their panels, and what their attention masks let through."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft import (
    Attention,
    Block,
    Decoder,
    GatedMLP,
    RMSNorm,
    RoPE,
    load_source,
)
from weft.backends.viz import panels
from weft.backends.viz.model.network import build_network
from weft.ir import Graph
from weft.ir.ops.softmax_attention import attention as op


def model(*kinds: dict[str, Any], context: int | None = 64) -> Graph:
    blocks = [Block(Attention(4, 2, rope=RoPE(), **kind), GatedMLP(48), RMSNorm()) for kind in kinds]
    graph: Graph = load_source(Decoder(50, 32, blocks, context=context)).graph
    return graph


def panels_of(graph: Graph) -> dict[str, Any]:
    return panels.build_panels(build_network(graph))


def find_visible_keys(graph: Graph, n: int) -> list[Any]:
    """Return the visible keys of each query by the attention's reference: values are unit vectors."""
    masks = []
    for node in graph.nodes:
        if node.op is op:
            attrs = {**node.attrs, "heads": 1, "kv_heads": 1, "value_dim": None}
            weights = op.reference(np.zeros((1, n, 2)), np.zeros((1, n, 2)), np.eye(n)[None], **attrs)
            masks.append(np.asarray(weights)[0] > 0)
    return masks


def count_cached(panel: dict[str, Any], name: str, tokens: int) -> int:
    variant = next(v for v in panel["variants"] if v["name"] == name)
    return sum(width * min(window or tokens, tokens) for width, window in variant["kept"])
