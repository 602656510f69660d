"""Linear recurrences of the language against formulas, token by token, and against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

from weft.frontends.dsl import (
    MLP,
    MLSTM,
    RGLRU,
    SLSTM,
    LightningAttention,
    NormedResidual,
    RMSNorm,
    RWKV6TimeMix,
    RWKV7TimeMix,
    RWKVChannelMix,
    RWKVTimeMix,
    module,
    trace,
)
from weft.ir import Graph, Value, interpret, ops

from ..formulas import Array, X, close, rms, run, sigmoid, silu


@pytest.mark.parametrize("size", [None, 6])
def test_lightning_attention(size: int | None, rng: np.random.Generator) -> None:
    """Qin 2024, equation 3: a sum over all earlier tokens, which fade by λ per token."""
    x, y, p = run(LightningAttention(4, size, decay=0.7), rng)
    d = size or 4
    q, k, v = (silu(x @ p[f"{n}.weight"].T) for n in "qkv")
    out = np.zeros_like(q)
    for h in range(4):
        fade, s = np.exp(-0.7 * 2.0 ** (-2 * (h + 1))), slice(d * h, d * h + d)
        gap = np.arange(6)[:, None] - np.arange(6)
        out[..., s] = (q[..., s] @ k[..., s].transpose(0, 2, 1) * np.where(gap >= 0, fade**gap, 0)) @ v[..., s]
    gated = rms(out, p["norm.weight"]) * sigmoid(x @ p["gate.weight"].T)
    close(y, gated @ p["out.weight"].T, 100)


def test_the_residual_is_the_normed_input(rng: np.random.Generator) -> None:
    block = NormedResidual(MLP(5, "relu"), MLP(7, "relu"), RMSNorm(1e-2), (0.5, 2.0), (3.0, 1.0))
    x, y, p = run(block, rng)
    for name, (alpha, beta) in (("attn", (0.5, 2.0)), ("ffn", (3.0, 1.0))):
        x = rms(x, p[f"{name}_norm.weight"], 1e-2)
        made = np.maximum(x @ p[f"{name}.up.weight"].T, 0) @ p[f"{name}.down.weight"].T
        x = alpha * x + beta * made
    close(y, x)


def test_griffin(rng: np.random.Generator) -> None:
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
    graph = graph_of(RGLRU(3, 12, 3))
    assert {n: v.shape for n, v in graph.params.items()} == {n: v.shape for n, v in params.items()}
    (found,) = interpret(graph, {"x": x, "position_ids": at}, params=params).values()
    with torch.no_grad():
        want, _ = theirs(torch.from_numpy(x).float(), torch.from_numpy(at), None, use_cache=False)
    np.testing.assert_allclose(found, want.numpy(), atol=2e-5 * float(want.abs().max()))


def graph_of(model: Any) -> Graph:
    return trace(model, {"x": X})


def shifted(x: Array, mix: Array) -> Array:
    before = np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return np.asarray(mix * x + (1 - mix) * before)


def test_rwkv(rng: np.random.Generator) -> None:
    """Peng 2023, equations 11 to 18: the weighted mean over all earlier tokens, with powers written out."""
    x, y, p = run(RWKVTimeMix(10), rng)
    k, v, r = (shifted(x, p[f"{n}.mix"]) @ p[f"{n}.weight"].T for n in "kvr")
    fade, out = np.exp(p["decay"]), np.zeros_like(v)
    for t in range(6):
        weights = [np.exp(-(t - 1 - s) * fade + k[:, s]) for s in range(t)] + [np.exp(p["first"] + k[:, t])]
        out[:, t] = sum(w * v[:, s] for s, w in enumerate(weights)) / sum(weights)
    close(y, (sigmoid(r) * out) @ p["out.weight"].T, 100)


def test_channel_mixing_of_rwkv(rng: np.random.Generator) -> None:
    x, y, p = run(RWKVChannelMix(11), rng)
    hidden = np.maximum(shifted(x, p["k.mix"]) @ p["k.weight"].T, 0) ** 2
    close(y, sigmoid(shifted(x, p["r.mix"]) @ p["r.weight"].T) * (hidden @ p["v.weight"].T))


def test_weights_of_old_tokens_do_not_overflow() -> None:
    """Exponents of ±300 leave the means of values, between their extremes."""
    graph = graph_of(RWKVTimeMix(16))
    params = {n: np.eye(16) for n in ("v.weight", "out.weight")} | {"k.weight": 300 * np.eye(16)}
    params |= {"r.weight": np.zeros((16, 16)), "decay": np.zeros(16), "first": np.zeros(16)}
    params |= {f"{n}.mix": np.ones(16) for n in "kvr"}
    x = np.sign(np.random.default_rng(0).standard_normal((2, 6, 16)))
    (found,) = interpret(graph, {"x": x}, params=params).values()
    assert np.isfinite(found).all()
    assert (np.abs(found) <= 0.5 + 1e-12).all()


def test_mlstm(rng: np.random.Generator) -> None:
    """Beck 2024, equations 19 to 27, without the stabilizer, whose only trace is a term beside the divisor."""
    x, y, p = run(MLSTM(2, 6, 10, cap=3.0, eps=1e-2), rng)
    q, k, v = (x @ p[f"{n}.weight"].T for n in "qkv")
    i, f = (3 * np.tanh((x @ p[f"{n}.weight"].T + p[f"{n}.bias"]) / 3) for n in "if")
    out = np.zeros((2, 6, 2, 5))
    for r, h in np.ndindex(2, 2):
        state, norm, largest = np.zeros((3, 5)), np.zeros(3), 0.0
        for t in range(6):
            kt, vt = k[r, t, 3 * h : 3 * h + 3], v[r, t, 5 * h : 5 * h + 5]
            keep, new = sigmoid(f[r, t, h]), np.exp(i[r, t, h])
            state, norm = keep * state + new * np.outer(kt, vt), keep * norm + new * kt
            largest = max(np.log(keep) + largest, i[r, t, h])
            qt = q[r, t, 3 * h : 3 * h + 3] / 3**0.5
            out[r, t, h] = qt @ state / (max(abs(qt @ norm), 1) + 1e-2 * np.exp(largest))
    centred = out - out.mean(-1, keepdims=True)
    normed = (centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)).reshape(2, 6, 10) * p["norm.weight"]
    close(y, (normed * sigmoid(x @ p["gate.weight"].T)) @ p["out.weight"].T, 1e3)


def earlier(x: Array) -> Array:
    return np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], 1)


def normed(y: Array, weight: Array, bias: Array | float, eps: float, heads: int = 4) -> Array:
    apart = y.reshape(*y.shape[:2], heads, -1)
    apart = apart - apart.mean(-1, keepdims=True)
    return (apart / np.sqrt((apart**2).mean(-1, keepdims=True) + eps)).reshape(y.shape) * weight + bias


@pytest.mark.parametrize("static", [True, False])
def test_rwkv_5_and_6(static: bool, rng: np.random.Generator) -> None:
    """Peng 2024, sections 4.1 and 4.2, token by token and head by head."""
    x, y, p = run(RWKV6TimeMix(4, 5, 6, static=static), rng)
    change = earlier(x) - x

    def share(name: str) -> Array:
        if static:
            return x + change * p[f"{name}.mix"]
        lora = np.tanh((x + change * p["mix"]) @ p[f"{name}.mix_down.weight"].T) @ p[f"{name}.mix_up.weight"].T
        return x + change * (p[f"{name}.mix"] + lora)

    r, k, v, g = (share(name) @ p[f"{name}.weight"].T for name in "rkvg")
    d = np.broadcast_to(p["decay"], x.shape)
    if not static:
        d = d + np.tanh(share("w") @ p["decay_down.weight"].T) @ p["decay_up.weight"].T
    w, out = np.exp(-np.exp(d)), np.zeros_like(x)
    for row in range(2):
        for h in range(4):
            s, state = slice(4 * h, 4 * h + 4), np.zeros((4, 4))
            for t in range(6):
                now = np.outer(k[row, t, s], v[row, t, s])
                out[row, t, s] = r[row, t, s] @ (np.diag(p["bonus"][s]) @ now + state)
                state = np.diag(w[row, t, s]) @ state + now
    close(y, (silu(g) * normed(out, p["norm.weight"], p["norm.bias"], 64e-5)) @ p["out.weight"].T, 200)


@module
class Pair:
    """Two mixers, of which the second has the values of the first."""

    first: RWKV7TimeMix
    second: RWKV7TimeMix

    def __call__(self, x: Value) -> Value:
        return self.second(ops.affine(self.first(x), by=0.001))


def test_rwkv_7(rng: np.random.Generator) -> None:
    """Peng 2025, section 4, token by token and head by head."""
    pair = Pair(RWKV7TimeMix(4, 5, 6, 7, 8, keep_values="v"), RWKV7TimeMix(4, 5, 6, 7, 8, mix_values="v"))
    x, y, params = run(pair, rng)
    shift, values = params.pop("shift.weight", None), None
    assert shift is None  # it follows from a formula
    for layer in ("first", "second"):
        p = {name.removeprefix(f"{layer}."): a for name, a in params.items() if name.startswith(layer)}
        change = earlier(x) - x
        mixed = {name: x + change * p[f"{name}.mix"] for name in "rwkvag"}

        def low(name: str, of: str, p: dict[str, Array] = p, mixed: dict[str, Array] = mixed) -> Array:
            return sigmoid(mixed[of] @ p[f"{name}_down.weight"].T @ p[f"{name}_up.weight"].T + p[f"{name}_up.bias"])

        r, k, v = (mixed[name] @ p[f"{name}.weight"].T for name in "rkv")
        values = v if values is None else values
        if layer == "second":
            v = v + (values - v) * low("value", "v")
        d = np.tanh(mixed["w"] @ p["decay_down.weight"].T) @ p["decay_up.weight"].T + p["decay_up.bias"]
        w, a = np.exp(-np.exp(-0.5) * sigmoid(d)), low("rate", "a")
        g = sigmoid(mixed["g"] @ p["gate_down.weight"].T) @ p["gate_up.weight"].T
        removal, out = k * p["removal"], np.zeros_like(x)
        k = k * (1 + (a - 1) * p["growth"])
        for row in range(2):
            for h in range(4):
                s, state = slice(4 * h, 4 * h + 4), np.zeros((4, 4))
                for t in range(6):
                    c = removal[row, t, s] / np.linalg.norm(removal[row, t, s])
                    state = state @ (np.diag(w[row, t, s]) - np.outer(c, a[row, t, s] * c))
                    state = state + np.outer(v[row, t, s], k[row, t, s])
                    out[row, t, s] = state @ r[row, t, s]
        own = (r * k * p["bonus"]).reshape(2, 6, 4, 4).sum(-1, keepdims=True) * v.reshape(2, 6, 4, 4)
        read = normed(out, p["norm.weight"], p["norm.bias"], 64e-5) + own.reshape(x.shape)
        made = (g * read) @ p["out.weight"].T
        x = 0.001 * made
    close(y, made, 1000)


@pytest.mark.parametrize("conv", [None, 3])
def test_the_scalar_lstm(conv: int | None, rng: np.random.Generator) -> None:
    """Beck 2024, equations 8 to 15, without their stabilizer."""
    x, y, p = run(SLSTM(4, conv), rng)
    smooth = x
    if conv is not None:
        padded = np.concatenate([np.zeros((2, conv - 1, 16)), x], 1)
        parts = (padded[:, i : i + 6] * p["conv.weight"][:, i] for i in range(conv))
        smooth = silu(np.sum([*parts], 0) + p["conv.bias"])
    out, c, n, h = np.zeros_like(x), *(np.zeros((2, 16)) for _ in range(3))
    for t in range(6):
        gates = {}
        for name in "zifo":
            recur = p[f"{name}.recur"].reshape(4, 4, 4)
            back = np.einsum("bhd,hed->bhe", h.reshape(2, 4, 4), recur).reshape(2, 16)
            given = (smooth if name in "if" else x)[:, t]
            gates[name] = given @ p[f"{name}.weight"].T + p[f"{name}.bias"] + back
        f, i = sigmoid(gates["f"]), np.exp(gates["i"])
        c, n = f * c + i * np.tanh(gates["z"]), f * n + i
        h = out[:, t] = sigmoid(gates["o"]) * c / n
    close(y, normed(out, p["norm.weight"], 0.0, 1e-6), 1000)
