"""fuse-embedding: embeddings of a decode step, and the angles of all layers."""

from __future__ import annotations

from collections import Counter

import pytest

from weft.ir import ops
from weft.passes import run_passes

from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


def test_embedding_computes_the_angles_of_all_layers() -> None:
    graph = run_passes(ZOO["variant/grouped"](), "decode-torch")
    first = next(iter(graph.nodes))
    assert first.op is ops.embed_tokens and len(first.outputs) == 3
    counts = Counter(n.op for n in graph.nodes)
    assert counts[ops.rotary_angles] == counts[ops.rope] == 0
    assert all(n.operand("cosines") is first.outputs[1] for n in graph.nodes if n.op is ops.norm_qkv)
