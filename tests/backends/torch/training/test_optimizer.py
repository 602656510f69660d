"""Parameter groups, and schedules of the learning rate."""

from __future__ import annotations

import pytest
from torch import nn

from weft.backends.torch.training.optimizer import compute_rate, group_parameters


def test_only_named_parameters_decay_and_each_is_in_one_group() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2).requires_grad_(False))
    groups = group_parameters(net, {"0.weight"}, 0.1, {"0.bias": 0.5})
    names = {id(p): name for name, p in net.named_parameters()}
    found = {names[id(p)]: (group["weight_decay"], group["factor"]) for group in groups for p in group["params"]}
    assert found == {"0.weight": (0.1, 1.0), "0.bias": (0.0, 0.5), "1.weight": (0.0, 1.0), "1.bias": (0.0, 1.0)}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", [0.5, 1.0, 0.55, 0.1]),
        ("wsd", [0.5, 1.0, 1.0, 0.0]),
        ("constant", [0.5, 1.0, 1.0, 1.0]),
    ],
)
def test_rates_rise_and_fall_as_the_schedule_says(schedule: str, expected: list[float]) -> None:
    assert [compute_rate(schedule, done, 0.1) for done in (0.05, 0.1, 0.55, 1.0)] == pytest.approx(expected)


def test_wsd_falls_in_the_last_fifth_only() -> None:
    rates = [compute_rate("wsd", done, 0.0) for done in (0.79, 0.8, 0.9)]
    assert rates == pytest.approx([1.0, 1.0, 0.5])
