"""Collectives of a forward pass: their sizes by hand, and the bytes that a device sends."""

from __future__ import annotations

from typing import Any

import pytest

from weft.backends.torch.transformers.scale.shards import Stages
from weft.backends.torch.transformers.scale.split import Split
from weft.backends.torch.transformers.scale.traffic import Collective, list_collectives

from ..tiny import DIM, VOCAB, base_of, plans_of


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
