"""Sampling on the device draws the tokens that the samplers of the host draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.runtime.core.sampler import Sampler, Sampling
from weft.backends.runtime.torch.device_sampling import DeviceSampler

BATCH, VOCAB = 2, 30


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({}, True),
        ({"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.5}, False),
        ({"logit_bias": {3: 1.0}}, False),
    ],
)
def test_penalties_and_biases_need_the_host(options: dict[str, Any], possible: bool) -> None:
    assert Sampling(**options).has_adjustments != possible


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3}, {"temperature": 0.9, "top_k": 7, "top_p": 0.8}])
def test_tokens_are_those_of_the_host(options: dict[str, Any], rng: np.random.Generator) -> None:
    sampling = Sampling(**options, seed=4) if options else Sampling()
    device, host = ([Sampler(sampling, [], row) for row in range(BATCH)] for _ in range(2))
    draw = DeviceSampler(sampling, BATCH, 9, torch.device("cpu"))
    draw.refill(device)
    ids, positions, active = torch.zeros(BATCH, 1).long(), torch.full((BATCH, 1), 3), torch.ones(BATCH, 1).bool()
    for step in range(4):
        logits = (3 * rng.standard_normal((BATCH, VOCAB))).astype(np.float32)
        found = draw(torch.from_numpy(logits), (ids, positions, active)).tolist()
        assert found == [sampler(row) for sampler, row in zip(host, logits, strict=True)]
        assert ids[:, 0].tolist() == found and positions[:, 0].tolist() == [4 + step] * BATCH


def test_idle_rows_keep_their_inputs_and_refills_start_anew() -> None:
    sampling = Sampling(temperature=1.0, seed=2)
    samplers = [Sampler(sampling, [], row) for row in range(BATCH)]
    draw = DeviceSampler(sampling, BATCH, 4, torch.device("cpu"))
    draw.refill(samplers)
    ids, positions = torch.full((BATCH, 1), 7), torch.zeros(BATCH, 1).long()
    draw(torch.zeros(BATCH, VOCAB), (ids, positions, torch.tensor([[True], [False]])))
    assert ids[1].item() == 7 and positions[:, 0].tolist() == [1, 0]
    (spent,) = draw.changed_tensors
    assert spent[0].item() == 1
    draw.refill(samplers)
    assert not spent.any()
