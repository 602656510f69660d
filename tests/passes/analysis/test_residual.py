"""The residual stream: its writers, norms and readers."""

from __future__ import annotations

import pytest

from weft.ir import Graph, Node, Param, TensorType, ops
from weft.ir.types import dtypes, sizes
from weft.passes.analysis.residual import ResidualStream, find_streams

from ..models import weight
from ..zoo import ZOO


def ops_of(stream: ResidualStream) -> set[str]:
    return {w.op.name if isinstance(w, Node) else "parameter" for w in stream.writers}


@pytest.mark.parametrize(
    ("name", "found", "writers"),
    [
        ("family/llama-gqa-tied", 1, {"embedding", "linear"}),
        ("family/gpt2-tied", 1, {"embedding", "linear"}),  # tokens and positions
        ("family/mixtral", 1, {"embedding", "linear", "moe"}),
        ("family/qwen2-moe", 1, {"embedding", "linear", "moe"}),  # with a gate on the shared expert
        ("family/granite", 1, {"embedding", "linear"}),  # with multipliers
        ("family/mamba", 1, {"embedding", "linear"}),
        ("family/gemma2", 1, {"embedding", "rms_norm"}),
        ("family/t5", 2, {"embedding", "linear"}),
        ("family/bert", 7, {"embedding"}),  # the sum of embeddings, then one for every norm
        ("packed/family bert", 7, {"embedding"}),
        ("packed/family llama-mha-biases", 1, {"embedding", "linear"}),
        ("cached/variant hybrid", 1, {"embedding", "linear"}),
    ],
)
def test_streams_of_families(name: str, found: int, writers: set[str]) -> None:
    every = find_streams(ZOO[name]())
    assert len(every) == found and ops_of(every[0]) == writers
    assert not any(s.obstacles for s in every[:-1])


def test_writers_norms_and_obstacles_of_a_stream() -> None:
    """A parameter that is added, rows that are weighed and moved, a linear and a softmax that read it."""
    g = Graph("stream")
    x = g.add_input("x", TensorType(dtypes.f32, (sizes.sym("n"), 3, 6)))
    start = ops.add(ops.linear(x, weight(g, "in.weight", 6, 6), name="in"), weight(g, "positions", 3, 6))
    gate = ops.sigmoid(ops.linear(x, weight(g, "gate.weight", 1, 6)))
    total = ops.add(start, ops.mul(gate, ops.linear(x, weight(g, "out.weight", 6, 6), name="out")), name="total")
    last = ops.slice_(ops.affine(total, by=0.5), axis=1, start=2, stop=3)
    g.add_output("y", ops.linear(ops.rms_norm(last), weight(g, "head.weight", 5, 6)))
    g.add_output("z", ops.softmax(total, name="soft"))
    g.add_output("w", ops.linear(total, weight(g, "direct.weight", 5, 6), name="direct"))
    (stream,) = find_streams(g)
    writers = {w.name if isinstance(w, Param) else w.output.name for w in stream.writers}
    assert writers == {"in", "positions", "out"}
    assert [n.op.name for n in stream.norms] == ["rms_norm"] and [n.output.name for n in stream.linears] == ["direct"]
    assert stream.obstacles == ["%total is read by softmax (%soft)"]
