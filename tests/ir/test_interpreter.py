from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, MemoryReader, Node, TensorType, WeftError, interpret, ops
from weft.ir.interpreter import bind_sizes, list_named_sizes
from weft.ir.recipes import Source
from weft.ir.types import dtypes
from weft.ir.types.sizes import sym

B, S, P = sym("batch"), sym("seq"), sym("past")


def small() -> Graph:
    graph = Graph("small", MemoryReader({"w": np.arange(12, dtype=np.float16).reshape(3, 4)}))
    x = graph.add_input("x", TensorType(dtypes.f16, (B, S, 4)))
    w = graph.add_param("w", TensorType(dtypes.f16, (3, 4)), Source("w"))
    y = ops.linear(x, w)
    graph.add_output("y", y)
    graph.add_output("flat", ops.reshape(y, shape=(B * S, 3)))
    graph.add_output("x again", x)
    graph.add_output("weight", w)
    return graph


def test_runs_in_float64() -> None:
    x = np.random.default_rng(0).standard_normal((2, 5, 4)).astype(np.float32)
    found = interpret(small(), {"x": x})
    assert list(found) == ["y", "flat", "x again", "weight"]
    assert {a.dtype for a in found.values()} == {np.dtype(np.float64)}
    wanted = x.astype(np.float64) @ np.arange(12.0).reshape(3, 4).T
    np.testing.assert_allclose(found["y"], wanted, rtol=1e-14)
    np.testing.assert_array_equal(found["flat"], found["y"].reshape(10, 3))
    np.testing.assert_array_equal(found["x again"], x)


def test_params_can_be_overridden() -> None:
    found = interpret(small(), {"x": np.ones((1, 1, 4))}, params={"w": np.eye(4)[:3]})
    np.testing.assert_array_equal(found["y"], np.ones((1, 1, 3)))


def test_watch_sees_every_node_in_order() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def watch(node: Node, outputs: tuple[np.ndarray, ...]) -> None:
        seen.append((node.op.name, outputs[0].shape))

    interpret(small(), {"x": np.ones((2, 3, 4))}, watch=watch)
    assert seen == [("linear", (2, 3, 3)), ("reshape", (6, 3))]


def test_values_are_dropped_after_their_last_use() -> None:
    """A chain of n big values needs memory for a few of them."""
    import tracemalloc

    graph = Graph()
    value = graph.add_input("x", TensorType(dtypes.f32, (1 << 16,)))
    for _ in range(40):
        value = ops.affine(value, plus=1.0)
    graph.add_output("y", value)
    tracemalloc.start()
    y = interpret(graph, {"x": np.zeros(1 << 16)})["y"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert y[0] == 40
    assert peak < 8 * y.nbytes


def test_sizes_in_attributes_are_bound() -> None:
    graph = Graph()
    mask = graph.add_input("mask", TensorType(dtypes.i64, (B, P + S)))
    x = graph.add_input("x", TensorType(dtypes.f32, (B, S)))
    graph.add_output("y", ops.expand(ops.unsqueeze(x, axes=(2,)), shape=(B, S, P + S)))
    graph.add_output("m", mask)
    found = interpret(graph, {"x": np.ones((2, 3)), "mask": np.ones((2, 10), bool)})
    assert found["y"].shape == (2, 3, 10)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "graph small needs a value for input 'x': f16[batch, seq, 4]"),
        ({"x": np.ones((1, 1, 4)), "z": np.ones(1)}, "graph small has no input 'z'; it has x"),
        ({"x": np.ones((1, 4))}, "input 'x' has shape [1, 4], but the graph expects f16[batch, seq, 4]"),
        ({"x": np.ones((1, 1, 5))}, "input 'x' has shape [1, 1, 5], but the graph expects f16[batch, seq, 4]"),
    ],
)
def test_bad_inputs(inputs: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(WeftError) as e:
        interpret(small(), inputs)
    assert str(e.value) == message


def test_inputs_must_agree_with_each_other() -> None:
    binding: dict[str, int] = {"batch": 2, "past": 4}
    bind_sizes(TensorType(dtypes.f32, (B, P + S)), (2, 7), binding, "a")
    assert binding["seq"] == 3
    with pytest.raises(WeftError, match="but the graph expects"):
        bind_sizes(TensorType(dtypes.f32, (B, S)), (2, 4), binding, "b")


def test_a_size_is_found_wherever_it_becomes_solvable() -> None:
    graph = Graph()
    total = graph.add_input("total", TensorType(dtypes.f32, (P + S,)))
    graph.add_input("s", TensorType(dtypes.f32, (S,)))
    graph.add_output("y", ops.reshape(total, shape=(P + S, 1)))
    assert interpret(graph, {"total": np.ones(5), "s": np.ones(2)})["y"].shape == (5, 1)
    graph.add_input("p", TensorType(dtypes.f32, (P,)))
    with pytest.raises(WeftError, match=r"has shape \[.\]"):
        interpret(graph, {"total": np.ones(5), "s": np.ones(2), "p": np.ones(2)})


def test_free_sizes() -> None:
    graph = Graph()
    graph.add_input("x", TensorType(dtypes.f32, (B, P + S)))
    graph.add_input("y", TensorType(dtypes.f32, (S, sym("n"))))
    assert list_named_sizes(graph) == ["batch", "past", "seq", "n"]
