"""Classes of generated sources: their parts, and their order."""

from __future__ import annotations

import pytest

from weft.backends.torch.codegen.classes import ClassSource
from weft.backends.torch.codegen.model_source import ModelWriter
from weft.backends.torch.codegen.structure import group_statements
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
