"""Softmax attention with grouped heads, its variants and its sparse patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends import dsl
from weft.frontends.dsl import Attention, QKNorm, RMSNorm, RoPE, module, trace
from weft.ir import TensorType, Value, ops, verify
from weft.ir.types import dtypes, sizes

from ...masks import SETTINGS
from .formulas.attention import attention
from .harness import RUNNERS, Row, X, check, trace_checked


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_heads": 2},
        {"kv_heads": 1, "qkv_bias": True, "out_bias": True},
        {"head_dim": 6, "window": 3},
        {"causal": False, "window": 3},
        {"kv_heads": 2, "softcap": 1.5, "scale": 0.7},
        {"sinks": True, "gate": True},
        {"qk_norm": RMSNorm(1e-6), "kv_heads": 2},
    ],
    ids=str,
)
def test_attention(options: dict[str, Any], runner: str) -> None:
    module = Attention(4, **options)
    kv, d = options.get("kv_heads", 4), options.get("head_dim", 4)
    assert trace_checked(module).params["k.weight"].shape == (kv * d, 16)
    check(Row(module, attention(module)), runner)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_attention_rotates_part_of_queries_and_keys(interleaved: bool, runner: str) -> None:
    module = Attention(2, rope=RoPE(100.0, fraction=0.5, interleaved=interleaved))
    assert trace_checked(module).params["rope.frequencies"].shape == (2,)
    for positions in (np.arange(11), np.arange(11) + 9, np.arange(11)[::-1]):
        check(Row(module, attention(module, positions=positions), positions=positions), runner)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_attention_pattern(name: str, causal: bool, runner: str) -> None:
    module = Attention(3, causal=causal, **SETTINGS[name])
    check(Row(module, attention(module), 24, 17), runner)


def test_qk_norm_over_the_full_width() -> None:
    params = trace_checked(Attention(4, kv_heads=2, qk_norm=QKNorm(RMSNorm(), over="full"))).params
    assert (params["q_norm.weight"].shape, params["k_norm.weight"].shape) == ((16,), (8,))


def test_attention_to_memory_is_bidirectional() -> None:
    @module
    class Cross:
        attn: Attention

        def __call__(self, x: Value, memory: Value) -> Value:
            return self.attn(x, memory)

    memory = TensorType(dtypes.f32, (sizes.sym("batch"), sizes.sym("keys"), 8))
    graph = trace(Cross(Attention(4)), {"x": X, "memory": memory})
    verify(graph, recipes=True)
    assert graph.params["attn.k.weight"].shape == (16, 8)
    (node,) = [n for n in graph.nodes if n.op is ops.attention]
    assert not node.attrs["causal"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"qk_norm": dsl.RMSNorm(), "qk_norm_full": True, "qk_norm_last": True},
            {"qk_norm": dsl.QKNorm(dsl.RMSNorm(), "full", after_rope=True)},
        ),
        ({"qk_norm": dsl.RMSNorm(), "qk_norm_each": False}, {"qk_norm": dsl.RMSNorm()}),
        (
            {"gate": True, "gate_activation": "softplus", "gate_by_head": True},
            {"gate": dsl.Gate("softplus", by_head=True)},
        ),
        ({"gate_by_head": True}, {}),
        ({"pattern": "fixed", "stride": 4, "summary": 2}, {"mask": dsl.Mask(pattern="fixed", stride=4, summary=2)}),
        ({"sparse": dsl.BlockSparse(4)}, {"mask": dsl.BlockSparse(4)}),
    ],
)
def test_arguments_of_earlier_versions_become_records_with_a_note(
    old: dict[str, Any], new: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert dsl.Attention(8, **old) == dsl.Attention(8, **new)
    assert "is deprecated: use Attention(" in caplog.text and len(caplog.records) == 1
    cross = dsl.CrossAttention(8, **old)
    assert cross == dsl.CrossAttention(8, **new)
