"""Statistics of stored weights: bytes by kind, and average bits by layer."""

from __future__ import annotations

import pytest

from weft.backends.weights import StoredTensor, average_bits, find_layer, summarize_weights
from weft.ir import Graph, TensorType, ops
from weft.ir.recipes import Normal
from weft.ir.types import dtypes


def test_layer_is_the_path_up_to_its_index() -> None:
    names = ["layers.0.attn.q.weight", "encoder.layers.12.ffn.up.weight", "embed.weight", "layers.3", ""]
    assert [find_layer(name) for name in names] == ["layers.0", "encoder.layers.12", None, None, None]


def test_bytes_of_a_tensor_follow_its_dtype() -> None:
    recipe = Normal((3, 5), 1.0, "w")
    assert StoredTensor(recipe, dtypes.f16, (3, 5)).nbytes == 30
    assert StoredTensor(recipe, dtypes.i4, (3, 5)).nbytes == 8  # two per byte, rounded up


@pytest.fixture
def graph() -> Graph:
    """Return an embedding, a linear layer and a norm; `spare` has no readers."""
    graph = Graph("model")
    ids = graph.add_input("ids", TensorType(dtypes.i64, (1, 4)))
    shapes = {"embed.weight": (10, 8), "layers.0.up.weight": (6, 8), "layers.0.norm.weight": (8,), "spare": (99,)}
    table, up, norm, _ = (
        graph.add_param(name, TensorType(dtypes.f32, shape), Normal(shape, 1.0, name)) for name, shape in shapes.items()
    )
    graph.add_output("y", ops.linear(ops.rms_norm(ops.embedding(ids, table), norm, eps=1e-6), up))
    return graph


def test_weights_are_counted_by_kind_and_layer(graph: Graph) -> None:
    stored = {
        "embed.weight": ((10, 8), dtypes.f16),
        "layers.0.up.weight.codes": ((6, 4), dtypes.u8),  # named after its parameter
        "layers.0.up.scales": ((6,), dtypes.f32),
        "layers.0.norm.weight": ((8,), dtypes.f32),
        "rope.cos": ((5,), dtypes.f32),  # of no parameter
    }
    tensors = {name: StoredTensor(Normal(shape, 1.0, name), dtype, shape) for name, (shape, dtype) in stored.items()}
    summary = summarize_weights(graph, tensors)
    assert summary["kinds"] == {
        "linear maps": {"numbers": 48, "bytes": 24 + 24},
        "embedding": {"numbers": 80, "bytes": 160},
        "norms and others": {"numbers": 8, "bytes": 32 + 20},
    }
    assert summary["layers"] == {"layers.0": 8.0}  # 48 bytes for 48 parameters
    assert average_bits(summary["kinds"]) == 8.0


def test_average_bits_are_none_without_linear_layers() -> None:
    assert average_bits({"embedding": {"numbers": 9, "bytes": 9}}) is None
    both = {"linear maps": {"numbers": 10, "bytes": 5}, "experts": {"numbers": 30, "bytes": 15}}
    assert average_bits(both) == 4.0
