"""Mixtures of experts in a decode step."""

from __future__ import annotations

import pytest

from weft.backends.torch.kernels.shared import launch

from ..fused_ops import KERNELS, cases_of, check, write_statements


@pytest.mark.parametrize("name", cases_of("step_experts"))
def test_torch_computes_the_cases_of_ops(name: str) -> None:
    check(name, kernel=False)


@KERNELS
@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("name", cases_of("step_experts"))
def test_kernels_compute_the_cases_of_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    check(name, kernel=True)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("choose_experts-0", "*route({0}.flatten(0, 1), k=2)"),
        ("norm_route-0", "*norm_route({0}.flatten(0, 1), {1}, norm={2}, k=2, tickets={3})"),
        ("norm_route-1", "scoring='sigmoid', scale=2.5, groups=3, top_groups=2, group_score='top2', tickets={4})"),
        ("mixture-1", "residual={6}.flatten(0, 1), norm={7}, activation='relu2', tickets={8}"),
    ],
)
def test_the_router_is_an_argument_of_the_mixture(name: str, call: str) -> None:
    statement = write_statements(name).rpartition("\n")[2]
    assert statement.startswith("moe_decode(")
    assert call in statement
