"""Biases on attention scores by distance, in PyTorch."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.ops.distances import is_shared
from weft.ir import Value, dtypes, ops
from weft.ir.types.sizes import sym

from .op_cases import build_graph, check, examples, write_forward

B, S = sym("batch"), sym("seq")


@pytest.mark.parametrize(("name", "number", "held", "dtype"), examples("distances"))
def test_cases_agree_with_the_reference(name: str, number: int, held: bool, dtype: torch.dtype) -> None:
    check(name, number, held, dtype)


def positions(x: Value) -> Value:
    return ops.cast(x, to=dtypes.i64)


@pytest.mark.parametrize(("symmetric", "distance"), [(False, "distance"), (True, "-distance.abs()")])
def test_alibi_multiplies_slopes_by_the_distance(symmetric: bool, distance: str) -> None:
    graph = build_graph(
        lambda x, y, w: ops.alibi(w, positions(x), positions(y), symmetric=symmetric), (B, S), (B, S), w=(2,)
    )
    difference = "y.to(torch.int64)[:, None, :] - x.to(torch.int64)[:, :, None]"
    forward = write_forward(graph).replace(f"distance = {difference}\n", "").replace(difference, "distance")
    assert forward == f"return alibi(self.w.weight, {distance})"


@pytest.mark.parametrize(("both", "function"), [(True, "relative_bias"), (False, "causal_relative_bias")])
def test_relative_position_bias_is_causal_or_of_both_directions(both: bool, function: str) -> None:
    graph = build_graph(
        lambda x, y, w: ops.relative_position_bias(w, positions(x), positions(y), bidirectional=both, max_distance=64),
        *((B, S), (B, S)),
        w=(8, 2),
    )
    assert f"{function}(self.w.weight, distance, 64)" in write_forward(graph)


def test_values_of_the_models_own_forward_are_shared_between_layers() -> None:
    graph = build_graph(lambda x: ops.exp(x), (B, S))
    x = graph.inputs["x"]
    with graph.scope("layers.0"):
        inner = ops.exp(x)
    assert [is_shared(v) for v in (x, x.uses[0][0].output, inner)] == [True, True, False]
