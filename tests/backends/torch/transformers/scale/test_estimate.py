"""Costs of a model on several devices: bytes by hand, the pipeline bubble, and their JSON form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.backends.torch.transformers.scale.estimate import (
    Collective,
    ParallelCosts,
    compute_bubble,
    estimate_costs,
    list_collectives,
)
from weft.backends.torch.transformers.scale.shards import Split, Stages
from weft.backends.weights import StoredTensor
from weft.ir import WeftError
from weft.ir.types import dtypes

from ..tiny import DIM, HEAD, KV, VOCAB, base_of, plans_of

TOKENS = 10


def costs(name: str, split: Split) -> ParallelCosts:
    base = base_of(name)
    params = {f"model.{key}": p for key, p in base.lowered.base.weights.items()}
    params |= {} if base.lowered.head is None else base.lowered.head.weights
    tensors = {k: StoredTensor(p.recipe, dtypes.f16, tuple(p.type.concrete({}))) for k, p in params.items()}
    return estimate_costs(base, plans_of(name), tensors, split, "f16", 2, TOKENS)


def test_devices_share_linear_maps_and_caches() -> None:
    (one,), (shared,) = costs("dense", Split()).stages, costs("dense", Split(tp=4)).stages
    norms = (2 * 3 + 1) * DIM * 2
    assert shared.weights - norms == (one.weights - norms) // 4
    assert one.cache_per_token == 2 * 3 * 2 * KV * HEAD
    assert shared.cache_per_token == one.cache_per_token // 4
    assert (one.cache, one.layers, one.state) == (TOKENS * one.cache_per_token, (0, 3), 0)


def test_stages_share_layers() -> None:
    (one,), (first, last) = costs("dense", Split()).stages, costs("dense", Split(pp=2)).stages
    assert (first.layers, last.layers) == ((0, 2), (2, 3))
    for name in ("weights", "cache", "flops"):
        assert getattr(first, name) + getattr(last, name) == getattr(one, name)


def test_windows_limit_the_cache_and_states_do_not_grow() -> None:
    assert costs("windows", Split()).stages[0].cache == 2 * 2 * KV * HEAD * (3 + 3 + TOKENS)
    (stage,) = costs("mamba", Split()).stages
    assert stage.cache == 0 and stage.state > 0


def test_experts_are_divided_as_wholes() -> None:
    whole, half = (costs("experts", split).stages[0].weights for split in (Split(), Split(ep=2)))
    assert whole - half == 2 * 2 * 8 * 3 * DIM * 16 // 2


@pytest.mark.parametrize(
    ("work", "microbatches", "share"),
    [([5, 5], 1, 1 / 2), ([3, 3, 3, 3], 4, 3 / 7), ([1, 3], 2, 1 - 8 / 14), ([0, 0], 2, 0), ([4], 3, 0)],
)
def test_bubble_of_equal_and_unequal_stages(work: list[int], microbatches: int, share: float) -> None:
    assert abs(compute_bubble(work, microbatches) - share) < 1e-12


def test_costs_as_json() -> None:
    data = json.loads(json.dumps(costs("dense", Split(tp=2)).json()))
    assert data["split"] == {"tp": 2, "ep": 1, "pp": 1, "microbatches": 1, "devices": 2}
    assert {"kind": "all-gather", "sent": 2 * VOCAB / 2}.items() <= data["collectives"][-1].items()


def test_uneven_split_is_refused() -> None:
    with pytest.raises(WeftError, match="tp=3 cannot share the 4 key/value heads"):
        costs("dense", Split(tp=3))


def collectives(name: str, split: Split) -> list[Collective]:
    base = base_of(name)
    return list_collectives(base.lowered, plans_of(name), split, Stages(base.lowered, base, split.pp), 2)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-reduce", 2 * 100 * 3 / 4), ("all-gather", 100 * 3 / 4), ("all-to-all", 100 * 3 / 4), ("send", 100)],
)
def test_bytes_sent_with_optimal_algorithms(kind: str, sent: float) -> None:
    assert Collective(kind, "tp", 4, 0, "x", 100).sent_bytes == sent


def test_tensor_parallelism_sums_twice_per_layer_and_gathers_logits() -> None:
    found = [(c.kind, c.path, c.size) for c in collectives("dense", Split(tp=4))]
    layers = [("all-reduce", f"layers.{i}.{part}", 2 * DIM) for i in range(3) for part in ("attn.o", "ffn.down")]
    assert sorted(found) == sorted(
        [*layers, ("all-reduce", "embed_tokens", 2 * DIM), ("all-gather", "logits", 2 * VOCAB)]
    )


def test_stages_send_hidden_states_and_broadcast_logits() -> None:
    found = [(c.kind, c.stage, c.size) for c in collectives("dense", Split(pp=3))]
    assert found == [("send", 0, 2 * DIM), ("send", 1, 2 * DIM), ("broadcast", 2, 2 * VOCAB)]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (Split(tp=2, ep=2), [("all-reduce", 2 * DIM)]),
        (Split(ep=2), [("all-to-all", 2 * 2 * DIM)] * 2),  # two experts of each token
        (Split(tp=2, ep=4), [("all-to-all", 2 * DIM)] * 2 + [("all-gather", 2 * DIM)]),
        (Split(tp=2), [("all-reduce", 2 * DIM)]),
    ],
)
def test_experts_exchange_tokens(split: Split, expected: list[Any]) -> None:
    found = collectives("experts", split)
    assert [(c.kind, c.size) for c in found if c.path == "layers.0.ffn.experts"] == expected


def test_one_device_sends_nothing() -> None:
    assert collectives("experts", Split()) == []
