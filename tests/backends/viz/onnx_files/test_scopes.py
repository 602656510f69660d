"""Scopes of operations, from metadata and names that exporters write."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.backends.viz.model.outline import PicturePart, build_outline
from weft.backends.viz.onnx_files.onnx_constants import Constant, OnnxOperation
from weft.backends.viz.onnx_files.scopes import find_layer_segments, make_unique, name_operations, read_exported_scope

from .. import onnx_models
from ..onnx_models import Builder
from .operations import operation
from .reading import read_model


@pytest.mark.parametrize(
    ("metadata", "scope"),
    [
        ({"pkg.torch.onnx.name_scopes": "['', 'model', 'model.layers.0', 'linear_3']"}, ("model", "layers", "0")),
        (
            {"namespace": ": Net/model: Model/model.layers.0: Layer/linear_3: aten.linear.default"},
            ("model", "layers", "0"),
        ),
        ({"pkg.torch.onnx.name_scopes": "['', 'add']"}, ()),
        ({"pkg.torch.onnx.name_scopes": "damaged"}, None),
        ({}, None),
    ],
)
def test_exported_scope_is_that_of_the_innermost_module(
    metadata: dict[str, str], scope: tuple[str, ...] | None
) -> None:
    assert read_exported_scope(metadata) == scope


def test_slashed_names_give_scopes_without_the_common_root() -> None:
    ops = [
        operation("Gather", "table ids", "x", "/model/embed/Gather"),
        *(operation("MatMul", f"x{i} w", f"x{i + 1}", f"/model/layers.{i}/attn/MatMul") for i in range(2)),
        operation("Relu", "x2", "logits", "/head/Relu_7"),
    ]
    assert name_operations(ops, {}) == [
        ("embed", "embed.Gather"),
        ("layers.0.attn", "layers.0.attn.MatMul"),
        ("layers.1.attn", "layers.1.attn.MatMul"),
        ("head", "head.Relu"),  # the number counts over the entire model
    ]


def test_operation_without_a_scope_joins_its_producer_and_reader() -> None:
    ops = [
        operation("Relu", "x", "a", "/layers.0/attn/Relu"),
        operation("Cast", "a", "b", "Cast_1"),
        operation("Relu", "b", "c", "/layers.0/attn/Relu_1"),
        operation("Relu", "c", "y", "/layers.1/attn/Relu"),
    ]
    assert [scope for scope, _ in name_operations(ops, {})] == ["layers.0.attn"] * 3 + ["layers.1.attn"]


def test_numbered_words_are_layers_if_they_have_enough_operations() -> None:
    def ops(count: int) -> list[str]:
        names = [f"net/layer_{i}/op{k}" for i in range(2) for k in range(count)]
        found = name_operations([operation("Relu", f"x{n}", f"y{n}", name) for n, name in enumerate(names)], {})
        return sorted({scope for scope, _ in found})

    assert ops(4) == ["layer.0", "layer.1"]
    assert ops(3) == ["layer_0", "layer_1"]


def test_unique_names_are_numbered() -> None:
    taken = {"a", "a_2"}
    assert [make_unique("a", taken), make_unique("a", taken), make_unique("b", taken)] == ["a_3", "a_4", "b"]
    assert taken == {"a", "a_2", "a_3", "a_4", "b"}


def test_unnamed_layers_fold_without_the_odd_one(tmp_path: Path) -> None:
    """If one layer of six has another activation, the others form two runs or none, never with the odd layer."""
    model = Builder(onnx_models.nameless).model(6)
    gelu = [n for n in model.graph.node if n.op_type == "Gelu"]
    gelu[3].op_type = "Relu"
    root = build_outline(read_model(model, tmp_path))
    assert [p.count for p in root.children if p.count > 1] == [3, 2]
    (odd,) = [p for p in root.children if p.count == 1 and any(v.op == "Relu" for v in p.all_vertices())]
    assert isinstance(odd, PicturePart) and {"Gelu"}.isdisjoint(v.op for v in odd.all_vertices())


def layer(i: int, odd: str = "Relu") -> list[OnnxOperation]:
    """Return five operations that read x<i> and produce x<i + 1>."""
    kinds = ("MatMul", odd, "Tanh", "Exp", "Add")
    values = [f"x{i}", *(f"{kind}{i}" for kind in kinds[:-1]), f"x{i + 1}"]
    first = f"x{i} w{i}"
    reads = [first, *values[1:4], f"{values[4]} x{i}"]
    return [operation(kind, read, value) for kind, read, value in zip(kinds, reads, values[1:], strict=True)]


WEIGHTS = {f"w{i}": Constant("f32", (4, 4), None) for i in range(9)}


def test_equal_consecutive_segments_are_layers() -> None:
    ops = [
        operation("Gather", "table ids", "x0"),
        *(op for i in range(3) for op in layer(i)),
        operation("Neg", "x3", "y"),
    ]
    scopes = find_layer_segments(ops, WEIGHTS)
    assert scopes == [(), *(("layers", str(i)) for i in range(3) for _ in range(5)), ()]


def test_segments_differ_by_operator_weight_shape_and_attributes() -> None:
    def count(*layers: list[OnnxOperation], weights: dict[str, Constant] = WEIGHTS) -> int:
        ops = [operation("Gather", "table ids", "x0"), *(op for ops in layers for op in ops)]
        return len({scope for scope in find_layer_segments(ops, weights) if scope})

    assert count(layer(0), layer(1)) == 2
    assert count(layer(0), layer(1, "Sigmoid")) == 0
    assert count(layer(0), layer(1), weights={**WEIGHTS, "w1": Constant("f32", (4, 5), None)}) == 0
    with_axis = layer(1)
    with_axis[2] = operation("Tanh", "Relu1", "Tanh1", axis=1)
    assert count(layer(0), with_axis) == 0
    assert count() == 0


def test_separate_runs_of_layers_have_names_of_their_own() -> None:
    ops = [op for i in range(3) for op in layer(i)] + [op for i in range(3, 6) for op in layer(i, "Sigmoid")]
    assert {scope[0] for scope in find_layer_segments(ops, WEIGHTS) if scope} == {"layers", "layers_2"}
