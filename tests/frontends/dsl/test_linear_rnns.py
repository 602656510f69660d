"""Recurrent layers of published models: Griffin against transformers, RWKV and xLSTM against their equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

from weft.frontends import dsl
from weft.frontends.dsl import GatedDeltaNet, RMSNorm
from weft.ir import Value, interpret, ops

from .formulas.elementary import Array, Weights, in_scope
from .formulas.recurrences import gated_delta_net, mlstm, rwkv4, rwkv4_channel_mix, rwkv6, rwkv7, slstm
from .harness import RUNNERS, Row, check, trace_checked


def test_rg_lru_equals_transformers(rng: np.random.Generator) -> None:
    """The block of RecurrentGemma, whose first token is driven in full."""
    config = RecurrentGemmaConfig(hidden_size=16, lru_width=12, num_attention_heads=3, conv1d_width=3)
    theirs = RecurrentGemmaRecurrentBlock(config, 0)
    drawn = {n: torch.from_numpy(rng.standard_normal(t.shape)).float() for n, t in theirs.state_dict().items()}
    theirs.load_state_dict(drawn)
    weights = {name: t.numpy().astype(np.float64) for name, t in drawn.items()}
    names = {"in": "linear_x", "gate": "linear_y", "out": "linear_out"}
    params = {
        f"{n}.{part}": weights[f"{theirs_}.{part}"] for n, theirs_ in names.items() for part in ("weight", "bias")
    }
    params |= {"conv.weight": weights["conv_1d.weight"][:, 0], "conv.bias": weights["conv_1d.bias"]}
    for name, gate in (("input", "input_gate"), ("recur", "recurrent_gate")):
        params[f"{name}.weight"] = weights[f"rg_lru.{gate}_weight"].transpose(0, 2, 1).reshape(12, 4)
        params[f"{name}.bias"] = weights[f"rg_lru.{gate}_bias"].reshape(12)
    params["rate"] = weights["rg_lru.recurrent_param"]
    x, at = rng.standard_normal((2, 6, 16)), np.arange(6)[None].repeat(2, 0)
    graph = trace_checked(dsl.RGLRU(3, 12, 3))
    assert {n: v.shape for n, v in graph.params.items()} == {n: v.shape for n, v in params.items()}
    (found,) = interpret(graph, {"x": x, "position_ids": at}, params=params).values()
    with torch.no_grad():
        want, _ = theirs(torch.from_numpy(x).float(), torch.from_numpy(at), None, use_cache=False)
    np.testing.assert_allclose(found, want.numpy(), atol=2e-5 * float(want.abs().max()))


@pytest.mark.parametrize("runner", RUNNERS)
def test_rwkv4_time_mix(runner: str) -> None:
    check(Row(dsl.RWKVTimeMix(10), rwkv4), runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_rwkv4_channel_mix(runner: str) -> None:
    check(Row(dsl.RWKVChannelMix(11), rwkv4_channel_mix), runner)


def test_rwkv4_weights_of_old_tokens_do_not_overflow() -> None:
    """Exponents of ±300 leave the means of values between their extremes."""
    graph = trace_checked(dsl.RWKVTimeMix(16))
    params = {n: np.eye(16) for n in ("v.weight", "out.weight")} | {"k.weight": 300 * np.eye(16)}
    params |= {"r.weight": np.zeros((16, 16)), "decay": np.zeros(16), "first": np.zeros(16)}
    params |= {f"{n}.mix": np.ones(16) for n in "kvr"}
    x = np.sign(np.random.default_rng(0).standard_normal((2, 6, 16)))
    (found,) = interpret(graph, {"x": x}, params=params).values()
    assert np.isfinite(found).all()
    assert (np.abs(found) <= 0.5 + 1e-12).all()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("static", [True, False])
def test_rwkv5_and_6_time_mix(static: bool, runner: str) -> None:
    module = dsl.RWKV6TimeMix(4, 5, 6, static=static)
    check(Row(module, rwkv6(module)), runner)


@dsl.module
class TwoLayers:
    """Two mixers, the second of which reads the values of the first."""

    first: dsl.RWKV7TimeMix
    second: dsl.RWKV7TimeMix

    def __call__(self, x: Value) -> Value:
        return self.second(ops.affine(self.first(x), by=0.001))


@pytest.mark.parametrize("runner", RUNNERS)
def test_rwkv7_time_mix(runner: str) -> None:
    def formula(x: Array, w: Weights) -> Array:
        y, values = rwkv7(x, in_scope(w, "first."), 4)
        return rwkv7(0.001 * y, in_scope(w, "second."), 4, values)[0]

    layers = (dsl.RWKV7TimeMix(4, 5, 6, 7, 8, **{f"{role}_values": "v"}) for role in ("keep", "mix"))
    check(Row(TwoLayers(*layers), formula), runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_mlstm(runner: str) -> None:
    module = dsl.MLSTM(2, 6, 10, cap=3.0, eps=1e-2)
    check(Row(module, mlstm(module)), runner)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("conv", [None, 3])
def test_slstm(conv: int | None, runner: str) -> None:
    module = dsl.SLSTM(4, conv)
    check(Row(module, slstm(module)), runner)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2, "v_head_dim": 5, "conv": 2, "norm": RMSNorm(1e-2), "negative": True},
        {"gate": "sigmoid", "per_key": True, "rank": 7},
    ],
    ids=str,
)
def test_gated_delta_net(options: dict[str, Any], runner: str) -> None:
    module = GatedDeltaNet(4, 3, **options)
    check(Row(module, gated_delta_net(module)), runner)
