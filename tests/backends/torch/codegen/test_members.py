"""Constructors of generated classes: modules, parameters, buffers and lists, in order of first use."""

from __future__ import annotations

import torch
from torch import nn

from weft.backends.torch.codegen.members import write_constructor
from weft.backends.torch.codegen.structure import Method
from weft.backends.torch.program.statements import ParamRef, Statement, Submodule, Var


def construct(lines: list[str], **classes: type) -> nn.Module:
    """Run the constructor `lines` on an empty module."""
    module = nn.Module()
    exec("\n".join(lines), {"self": module, "torch": torch, "nn": nn, **classes})
    return module


def test_parameters_buffers_and_modules() -> None:
    members = {
        "m.w": ParamRef("m.w", (3, 4)),
        "m.t": ParamRef("m.t", (2,), True, "torch.int64"),
        "m.map": Submodule("m.map", "nn.Linear(4, 3)", ("weight", "bias")),
    }
    lines = write_constructor(Method("m", [], members=dict(members)), {}, ())
    assert lines == [
        "self.w = nn.Parameter(torch.empty(3, 4))",
        'self.register_buffer("t", torch.empty(2, dtype=torch.int64))',
        "self.map = nn.Linear(4, 3)",
    ]
    module = construct(lines)
    assert [name for name, _ in module.named_parameters()] == ["w", "map.weight", "map.bias"]
    assert module.get_buffer("t").dtype == torch.int64


def test_members_are_in_order_of_first_use() -> None:
    first, second = ParamRef("b", (1,)), ParamRef("a", (1,))
    item = Statement("{0} + {1}", (first, second), (Var("y"),), "")
    lines = write_constructor(Method("", [item], members={"a": second, "b": first}), {}, ())
    assert [line.partition(" ")[0] for line in lines] == ["self.b", "self.a"]


def test_indices_become_lists() -> None:
    inner = {f"layers.{i}": "Block" for i in range(3)}
    weights = {f"maps.{i}": ParamRef(f"maps.{i}", (2,)) for i in range(2)}
    lines = write_constructor(Method("", [], members=dict(weights)), inner, ())
    assert lines == [
        "self.layers = nn.ModuleList(Block() for _ in range(3))",
        "self.maps = nn.ParameterList([nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))])",
    ]
    module = construct(lines, Block=nn.Identity)
    assert len(module.get_submodule("layers").__dict__["_modules"]) == 3


def test_lists_with_gaps_are_filled_with_empty_modules() -> None:
    lines = write_constructor(Method("", []), {"layers.0": "A", "layers.2": "A"}, ())
    assert lines == ["self.layers = nn.ModuleList(kind() for kind in [A, nn.Module, A])"]


def test_tables_are_embeddings() -> None:
    members = {"embed.weight": ParamRef("embed.weight", (5, 4))}
    assert write_constructor(Method("", [], members=dict(members)), {}, {"embed.weight"}) == [
        "self.embed = nn.Embedding(5, 4)"
    ]


def test_class_without_members_passes() -> None:
    assert write_constructor(Method("", []), {}, ()) == ["pass"]
