"""Classes of generated sources: their parts, and their order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.backends.torch.codegen.classes import ClassSource, write_constructor
from weft.backends.torch.codegen.model_source import ModelWriter
from weft.backends.torch.codegen.structure import Method, group_statements
from weft.backends.torch.program.statements import ParamRef, Statement, Submodule, Var
from weft.ir import ops
from weft.ir.graph import Value

from ....lowered import lower
from ..small_graphs import small_graph, weight


def two_layers(x: Value) -> Value:
    for i in range(2):
        with x.graph.scope(f"layers.{i}"):
            x = ops.linear(x, weight(x.graph, f"layers.{i}.map.weight", 4, 4))
    return x


def test_classes_are_written_innermost_first_and_shared_by_equal_layers() -> None:
    program = lower(small_graph(two_layers)).program
    writer = ModelWriter(program)
    assert writer.write(group_statements(program)) == "Model"
    assert list(writer.classes) == ["Block", "Model"]
    block, model = writer.classes.values()
    assert block.parameters == model.parameters == ["self", "x: Tensor"]
    assert (block.returns, block.cache, block.constants) == ("Tensor", "", False)
    assert block.lines == ["return self.map(x)"]


@pytest.mark.parametrize(
    ("cache", "like"), [("", ""), ("KVCache(batch, length, like)", ", like: Tensor"), ("KVCache(alike)", "")]
)
def test_new_cache_takes_a_weight_if_its_source_reads_like(cache: str, like: str) -> None:
    assert ClassSource("A", "", [], [], [], "Tensor", cache).like == like


def test_checkpointing_is_found_in_the_lines() -> None:
    for line, found in (("run = layer if self.checkpointing else layer", True), ("run = layer", False)):
        assert ClassSource("A", "", [], [], ["x = 1", line], "Tensor").checkpointing is found


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
