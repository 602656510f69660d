"""Recurrences in a decode step."""

from __future__ import annotations

import re

import pytest

from weft.backends.torch.decode.step_emitter import STEPS, StepEmitter
from weft.backends.torch.kernels.shared import launch
from weft.ir import ops
from weft.ir.op import Op
from weft.ir.testing import build_node_graph

from ..fused_ops import KERNELS, cases_of, check, write_statements


@pytest.mark.parametrize("name", cases_of("step_recurrences"))
def test_torch_computes_the_cases_of_ops(name: str) -> None:
    check(name, kernel=False)


@KERNELS
@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("name", cases_of("step_recurrences"))
def test_kernels_compute_the_cases_of_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    check(name, kernel=True)


@pytest.mark.parametrize(
    ("name", "function", "arguments"),
    [
        ("matrix_recurrence-0", "matrix_step", "heads=2, beta={4}[:, 0], unit={5}, q_scale=0.5"),
        ("matrix_recurrence-1", "matrix_step", "a_log={6}, bias={7}, norm={8}, tickets={9}, norm_groups=2"),
        ("gated_selective_scan-0", "selective_step", "bias={7}, softplus=True, log_a=True, gate={8}[:, 0]"),
        ("gated_ssd-0", "ssd_step", "log_a=True, heads=2, groups=1, gate={8}[:, 0]"),
    ],
)
def test_states_are_updated_in_place_by_one_call(name: str, function: str, arguments: str) -> None:
    statement = write_statements(name).rpartition("\n")[2]
    assert statement.startswith(f"{function}(") and statement.endswith(f"{arguments})[0][:, None]")
    state = re.findall(r"\{\d+\}\.values\[0\]", statement)
    assert len(state) == 2 and state[0] == state[1]  # the state before and after


@pytest.mark.parametrize("op", [ops.causal_conv, ops.linear_attention, ops.matrix_recurrence, ops.gated_ssd])
def test_recurrences_without_a_cached_state_fall_back_to_the_model(op: Op) -> None:
    graph, _ = build_node_graph(op, op.cases[0])
    graph.meta["kind"] = "encoder"
    emitter = StepEmitter(graph, {})
    (node,) = graph.nodes
    emitter.enter(node)
    assert STEPS[op.name].emit(emitter, node) is None
    assert emitter.choices == []
