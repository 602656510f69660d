"""The residual stream: its writers, norms and readers."""

from __future__ import annotations

import pytest

from weft import MLP, Attention, Block, Decoder, RMSNorm, linear, module, trace
from weft.ir import Graph, Node, Param, TensorType, Value, ops
from weft.ir.types import dtypes, sizes
from weft.passes.analysis.residual import ResidualStream, find_layers_without_residual, find_streams

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


@pytest.mark.long
def test_layers_of_published_architectures_have_residual_connections() -> None:
    """Those whose norms, gates, routers or several streams are on the way, too."""
    assert not {name: layers for name in ZOO if (layers := find_layers_without_residual(ZOO[name]()))}


@module
class Plain:
    """A block that forgets the second of its two additions."""

    attn: Attention
    ffn: MLP
    forgets: str

    def __call__(self, x: Value) -> Value:
        x = self.attn(RMSNorm()(x)) + (0 if self.forgets == "attn" else x)
        y = self.ffn(RMSNorm()(x))
        return y if self.forgets == "ffn" else x + y


@module
class Outside:
    """A layer without an addition, which its caller makes."""

    def __call__(self, x: Value) -> Value:
        return linear(x, x.width, "map")


@module
class Stack:
    """Layers whose additions are outside of them."""

    layers: tuple[Outside, ...]

    def __call__(self, x: Value) -> Value:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("forgets", ["attn", "ffn", ""])
def test_layer_that_forgets_an_addition_is_found(forgets: str) -> None:
    """In an architecture whose other layers have them."""
    good, plain = Block(Attention(2), MLP(16), RMSNorm()), Plain(Attention(2), MLP(16), forgets)
    graph = Decoder(20, 8, [good, plain, good]).graph()
    assert find_layers_without_residual(graph) == (["layers.1"] if forgets else [])


def test_addition_outside_of_the_layers_counts() -> None:
    inputs = {"x": TensorType(dtypes.f32, (sizes.sym("batch"), 4, 8))}
    assert find_layers_without_residual(trace(Stack((Outside(), Outside())), inputs)) == []
