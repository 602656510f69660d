from __future__ import annotations

import networkx as nx

from weft.ir import Graph, Node, TensorType, ops
from weft.ir.graph.analysis import (
    find_critical_path,
    group_by_scope,
    hash_structure,
    select_explicit_attributes,
    sum_node_costs,
)
from weft.ir.recipes import Full
from weft.ir.types import dtypes
from weft.ir.types.sizes import sym

B = sym("batch")


def blocks(widths: tuple[int, ...] = (8, 8, 16)) -> Graph:
    """Residual blocks x + down(relu(up(x))) of the given hidden widths, each in a scope."""
    graph = Graph("blocks")
    x = graph.add_input("x", TensorType(dtypes.f32, (B, 4)))
    for i, width in enumerate(widths):
        with graph.scope(f"layers.{i}"):
            up, down = (
                graph.add_param(f"{i}.{name}", TensorType(dtypes.f32, shape), Full(0.1, shape))
                for name, shape in (("up", (width, 4)), ("down", (4, width)))
            )
            x = ops.add(x, ops.linear(ops.relu(ops.linear(x, up)), down))
    graph.add_output("y", x)
    return graph


def test_multigraph_has_everything() -> None:
    graph = blocks()
    view = graph.to_networkx()
    kinds = nx.get_node_attributes(view, "kind")
    assert [list(kinds.values()).count(k) for k in ("input", "param", "node", "output")] == [1, 6, 12, 1]
    assert view.number_of_edges() == sum(len(n.inputs) for n in graph.nodes) + 1
    assert nx.is_directed_acyclic_graph(view)
    doubled = Graph()
    x = doubled.add_input("x", TensorType(dtypes.f32, (2,)))
    ops.add(x, x)
    assert doubled.to_networkx().number_of_edges() == 2


def test_critical_path_takes_the_heavier_branch() -> None:
    graph = blocks((8,))
    path, flops = find_critical_path(graph, {"batch": 3})
    assert [n.op.name for n in path] == ["linear", "relu", "linear", "add"]
    assert flops == 3 * (2 * 4 * 8 + 8 + 2 * 8 * 4 + 4)


def test_equal_blocks_hash_equal() -> None:
    by_scope = group_by_scope(blocks())
    assert list(by_scope) == ["layers.0", "layers.1", "layers.2"]
    one, two, wide = map(hash_structure, by_scope.values())
    assert one == two != wide
    swapped = Graph()
    x = swapped.add_input("x", TensorType(dtypes.f32, (2,)))
    y = swapped.add_input("y", TensorType(dtypes.f32, (2,)))
    hashes = {
        hash_structure([node]) for v in (ops.sub(x, y), ops.sub(y, y), ops.add(x, y)) for node in [v.producer] if node
    }
    assert len(hashes) == 3


def test_total_cost_is_a_polynomial() -> None:
    cost = sum_node_costs(blocks((8,)).nodes)
    assert str(cost.flops) == "140*batch"
    assert str(cost.written) == "96*batch"
    assert str(cost.read) == "112*batch + 256"  # x, h, relu(h), x and the sum; both weights


def test_attributes_leave_defaults_out() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(dtypes.f32, (2,)))
    node = ops.affine(x, plus=2).producer
    assert isinstance(node, Node)
    assert select_explicit_attributes(node) == {"plus": 2.0}
