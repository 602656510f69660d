"""Mixers of hybrid models against formulas that go token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import (
    MLP,
    Attention,
    Decoder,
    GatedDeltaNet,
    Mamba2,
    MemoryBlock,
    MoE,
    ParallelHybrid,
    RMSNorm,
    RoPE,
    ShortConv,
    module,
)
from weft.ir import Value, WeftError, interpret, ops

from ..formulas import Array, close, rms, run, sigmoid, silu, softmax, softplus


def convolved(u: Array, p: dict[str, Array], name: str = "conv") -> Array:
    """The causal convolution of u [batch, seq, channels], tap by tap."""
    width = p[f"{name}.weight"].shape[1]
    y = np.zeros_like(u) + p.get(f"{name}.bias", 0)
    for back in range(min(width, u.shape[1])):
        y[:, back:] += u[:, : u.shape[1] - back] * p[f"{name}.weight"][:, width - 1 - back]
    return y


@pytest.mark.parametrize(("width", "bias"), [(2, False), (3, True), (9, False)])
def test_short_convolution(width: int, bias: bool, rng: np.random.Generator) -> None:
    x, y, p = run(ShortConv(width, bias), rng)
    before, after, u = np.split(x @ p["in.weight"].T + p.get("in.bias", 0), 3, -1)
    assert ("out.bias" in p, "conv.bias" in p) == (bias, bias)
    close(y, (after * convolved(before * u, p)) @ p["out.weight"].T + p.get("out.bias", 0))


@pytest.mark.parametrize("norm", [None, RMSNorm(1e-2)])
def test_attention_beside_a_state_space(norm: RMSNorm | None, rng: np.random.Generator) -> None:
    """Falcon-H1: the state space's norm comes before its gate, or there is none; its steps have a lower limit."""
    mamba = Mamba2(12, 4, state=5, norm=norm, norm_groups=2, norm_first=True, out_bias=True, least_step=0.4)
    x, y, p = run(ParallelHybrid(Attention(2), mamba), rng)
    q, k, v = (x @ p[f"attention.{n}.weight"].T for n in "qkv")
    mixed = np.zeros_like(x)
    for h in range(2):
        s = slice(8 * h, 8 * h + 8)
        scores = q[..., s] @ k[..., s].transpose(0, 2, 1) / 8**0.5
        mixed[..., s] = softmax(np.where(np.tri(6, dtype=bool), scores, -np.inf)) @ v[..., s]
    own = {name.removeprefix("ssm."): value for name, value in p.items() if name.startswith("ssm.")}
    want = mixed @ p["attention.o.weight"].T + state_space(x, own, norm)
    close(y, want, 100)


def state_space(x: Array, p: dict[str, Array], norm: RMSNorm | None) -> Array:
    gate, u, step = np.split(x @ p["in.weight"].T, [12, 34], -1)
    u, b, c = np.split(silu(convolved(u, p)), [12, 17], -1)
    delta = np.maximum(softplus(step + p["dt.bias"]), 0.4)
    out = np.zeros_like(u)
    for r, head in np.ndindex(2, 4):
        h, s = np.zeros((3, 5)), slice(3 * head, 3 * head + 3)
        for t in range(6):
            h = np.exp(-delta[r, t, head] * np.exp(p["a_log"][head])) * h
            h += delta[r, t, head] * np.outer(u[r, t, s], b[r, t])
            out[r, t, s] = h @ c[r, t] + p["d"][head] * u[r, t, s]
    if norm is not None:
        out = rms(out.reshape(2, 6, 2, 6), eps=norm.eps).reshape(2, 6, 12) * p["norm.weight"]
    return np.asarray((out * silu(gate)) @ p["out.weight"].T + p["out.bias"])


def test_experts_on_a_latent(rng: np.random.Generator) -> None:
    """The router and the shared expert see x, the experts its latent."""
    x, y, p = run(MoE(3, 4, 3, "relu", gated=False, shared=MLP(8, "relu"), latent=5), rng)
    assert p["experts.up"].shape == (3, 4, 5)
    weights, narrow = softmax(x @ p["router.weight"].T), x @ p["latent_in.weight"].T
    each = (np.maximum(narrow @ p["experts.up"][e].T, 0) @ p["experts.down"][e].T for e in range(3))
    wide = sum(weights[..., e, None] * made for e, made in enumerate(each)) @ p["latent_out.weight"].T
    close(y, wide + np.maximum(x @ p["shared.up.weight"].T, 0) @ p["shared.down.weight"].T)


def test_layers_in_parallel_are_equally_wide() -> None:
    @module
    class Half:
        def __call__(self, x: Value) -> Value:
            return ops.slice(x, axis=2, start=0, stop=x.width // 2)

    with pytest.raises(WeftError, match=r"ParallelHybrid.*ssm makes .* where attention makes"):
        run(ParallelHybrid(Attention(2, rope=RoPE()), Half()), np.random.default_rng(0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2, "v_head_dim": 5, "conv": 2, "norm": RMSNorm(1e-2), "negative": True},
        {"gate": "sigmoid", "per_key": True, "rank": 7},
    ],
)
def test_gated_delta_net(options: dict[str, Any], rng: np.random.Generator) -> None:
    """Yang 2024, section 3.4; Kimi Linear, section 4: token by token, head by head."""
    x, y, p = run(GatedDeltaNet(4, 3, **options), rng)
    groups, dv, eps = options.get("groups", 4), options.get("v_head_dim", 3), options.get("norm", RMSNorm()).eps
    keys = 3 * groups
    q, k, v = np.split(silu(convolved(x @ p["qkv.weight"].T, p)), [keys, 2 * keys], -1)
    beta = sigmoid(x @ p["beta.weight"].T) * (2 if "negative" in options else 1)
    narrow = {n: x @ p[f"{n}_down.weight"].T if "rank" in options else x for n in ("dt", "gate")}
    steps = softplus(narrow["dt"] @ p["dt.weight"].T + p["dt.bias"])
    out = np.zeros((2, 6, 4, dv))
    for r, h in np.ndindex(2, 4):
        state, own = np.zeros((3, dv)), slice(3 * (h * groups // 4), 3 * (h * groups // 4) + 3)
        for t in range(6):
            qt, kt = (z[r, t, own] / np.sqrt((z[r, t, own] ** 2).sum() + 1e-6) for z in (q, k))
            step = steps[r, t, 3 * h : 3 * h + 3] if "per_key" in options else steps[r, t, h].repeat(3)
            state = np.exp(-np.exp(p["a_log"][h]) * step)[:, None] * state
            state = state + beta[r, t, h] * np.outer(kt, v[r, t, dv * h : dv * h + dv] - kt @ state)
            out[r, t, h] = qt @ state / 3**0.5
    normed = rms(out, p["norm.weight"], eps).reshape(2, 6, 4 * dv)
    opened = narrow["gate"] @ p["gate.weight"].T
    act = sigmoid(opened) if options.get("gate") == "sigmoid" else silu(opened)
    close(y, (normed * act) @ p["out.weight"].T, 100)


def test_a_memory_block_reads_the_embeddings(rng: np.random.Generator) -> None:
    """Zamba2: the second layer's transformer block sees what the first made beside the embeddings of the model."""
    block = MemoryBlock(MLP(9, "relu"), Attention(2, out_dim=16), MLP(7, "relu"), RMSNorm(1e-2))
    graph = Decoder(11, 16, [MLPBlock(), block]).graph()
    p = {n: rng.standard_normal(v.shape) for n, v in graph.params.items()}
    ids = rng.integers(0, 11, (2, 6))
    (found,) = interpret(graph, {"input_ids": ids}, params=p).values()
    own = {n.removeprefix("layers.1."): v for n, v in p.items()}
    e = p["embed.weight"][ids]
    x = e + np.maximum(e @ p["layers.0.mlp.up.weight"].T, 0) @ p["layers.0.mlp.down.weight"].T
    both = rms(np.concatenate([x, e], -1), own["attn_norm.weight"], 1e-2)
    q, k, v = (both @ own[f"attn.{n}.weight"].T for n in "qkv")
    mixed = np.zeros_like(q)
    for s in (slice(0, 16), slice(16, 32)):
        scores = q[..., s] @ k[..., s].transpose(0, 2, 1) / 4
        mixed[..., s] = softmax(np.where(np.tri(6, dtype=bool), scores, -np.inf)) @ v[..., s]
    y = rms(mixed @ own["attn.o.weight"].T, own["ffn_norm.weight"], 1e-2)
    y = np.maximum(y @ own["ffn.up.weight"].T, 0) @ own["ffn.down.weight"].T @ own["link.weight"].T
    fed = rms(x + y, own["norm.weight"], 1e-2)
    x = x + np.maximum(fed @ own["mamba.up.weight"].T, 0) @ own["mamba.down.weight"].T
    close(found, rms(x, p["final_norm.weight"], 1e-2) @ p["lm_head.weight"].T, 100)


def test_a_memory_block_needs_a_model() -> None:
    block = MemoryBlock(MLP(9), Attention(2, out_dim=16), MLP(7))
    with pytest.raises(WeftError, match="it belongs in a Decoder"):
        run(block, np.random.default_rng(0))


@module
class MLPBlock:
    def __call__(self, x: Value) -> Value:
        return ops.add(x, MLP(5, "relu")(x))
