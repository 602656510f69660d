"""Scopes of operations, from metadata and names that exporters write."""

from __future__ import annotations

import pytest

from weft.backends.viz.onnx_files.scopes import make_unique, name_operations, read_exported_scope

from .operations import operation


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
