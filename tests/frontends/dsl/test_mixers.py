"""Mixers and position biases against formulas that go head by head and token by token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import (
    MLA,
    MLP,
    ALiBi,
    Attention,
    Block,
    Decoder,
    Encoder,
    LightningIndex,
    LinearAttention,
    Mamba,
    Mamba2,
    RelativeAttention,
    Repeat,
    RMSNorm,
    RoPE,
    T5Bias,
    module,
)
from weft.ir import Value, WeftError, interpret, ops, verify

from ..formulas import Array, close, rms, run, sigmoid, silu, softmax, softplus, turned

# -- latent attention


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_rank": 7},
        {"rope": RoPE(100.0, interleaved=True), "scale": 0.3},
        {"norm": RMSNorm(1e-2)},
        {"absorbed": False},
        {"index": LightningIndex(5, 6, top_k=2)},
        {"q_rank": 7, "index": LightningIndex(5, 6, top_k=3, rope=RoPE(50.0, dim=4))},
    ],
)
def test_latent_attention(options: dict[str, Any], rng: np.random.Generator) -> None:
    """Keys and values made from the latent, head by head (DeepSeek-V2, equations 9 to 19)."""
    rope, eps = options.get("rope", RoPE()), options.get("norm", RMSNorm()).eps
    x, y, p = run(MLA(3, 8, 6, 4, 5, **{"rope": rope} | options), rng)
    source = rms(x @ p["q_down.weight"].T, p["q_norm.weight"], eps) if "q_rank" in options else x
    q = source @ p["q_up.weight" if "q_rank" in options else "q.weight"].T
    seen = chosen(options["index"], source, x, p) if "index" in options else np.tri(6, dtype=bool)
    down = x @ p["kv_down.weight"].T
    latent = rms(down[..., :8], p["kv_norm.weight"], eps)
    k_rope = turned(down[..., 8:], rope.theta, rope.interleaved)
    keys, values = latent @ p["k_up.weight"].T, latent @ p["v_up.weight"].T
    outs = []
    for h in range(3):
        plain, spun = (
            q[..., 10 * h : 10 * h + 6],
            turned(q[..., 10 * h + 6 : 10 * h + 10], rope.theta, rope.interleaved),
        )
        qh = np.concatenate([plain, spun], -1)
        kh = np.concatenate([keys[..., 6 * h : 6 * h + 6], k_rope], -1)
        scores = qh @ kh.transpose(0, 2, 1) * options.get("scale", 10**-0.5)
        outs.append(softmax(np.where(seen, scores, -np.inf)) @ values[..., 5 * h : 5 * h + 5])
    close(y, np.concatenate(outs, -1) @ p["o.weight"].T, 100)


def chosen(index: LightningIndex, source: Array, x: Array, p: dict[str, Array]) -> Array:
    """Return which keys each query chooses, [batch, seq, keys] (DeepSeek-V3.2, equations 1 and 2)."""
    d, turning = index.head_dim, 0 if index.rope is None else index.rope.dim or 0

    def spun(t: Array) -> Array:
        theta = 1.0 if index.rope is None else index.rope.theta
        return np.concatenate([turned(t[..., :turning], theta, False), t[..., turning:]], -1) if turning else t

    k = x @ p["index.k.weight"].T
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k = spun(k * p["index.k_norm.weight"] + p["index.k_norm.bias"])
    weights, scores = x @ p["index.weights.weight"].T, np.zeros((len(x), x.shape[1], x.shape[1]))
    for h in range(index.heads):
        q = spun(source @ p["index.q.weight"].T[:, d * h : d * h + d])
        scores += weights[..., h, None] * np.maximum(q @ k.transpose(0, 2, 1), 0)
    scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    least = np.sort(scores, -1)[..., -index.top_k, None]
    return np.asarray((scores >= least) & np.isfinite(scores))


def test_latent_attention_keeps_one_head_of_the_latent() -> None:
    graph = Decoder(10, 16, 1, Block(MLA(4, 8, 6, 4, 5, RoPE()), MLP(8))).graph()
    (node,) = [n for n in graph.nodes if n.op is ops.attention]
    assert (node.attrs["kv_heads"], node.inputs[1].width) == (1, 8 + 4)


# -- relative and linear attention


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("values", [True, False])
def test_relative_keys_and_values(causal: bool, values: bool, rng: np.random.Generator) -> None:
    x, y, p = run(RelativeAttention(2, 3, values=values, causal=causal), rng)
    q, k, v = (x @ p[f"{n}.weight"].T for n in "qkv")
    out = np.zeros_like(x)
    for b, h, i in np.ndindex(2, 2, 6):
        s = slice(8 * h, 8 * h + 8)
        at = range(i + 1 if causal else 6)
        r = [max(-3, min(3, j - i)) + 3 for j in at]
        weights = softmax(np.array([q[b, i, s] @ (k[b, j, s] + p["keys"][r[j]]) / math.sqrt(8) for j in at]))
        for j in at:
            out[b, i, s] += weights[j] * (v[b, j, s] + (p["values"][r[j]] if values else 0))
    close(y, out @ p["o.weight"].T)


@pytest.mark.parametrize("rope", [None, RoPE(50.0), RoPE(50.0, interleaved=True)])
@pytest.mark.parametrize("causal", [True, False])
def test_linear_attention(rope: RoPE | None, causal: bool, rng: np.random.Generator) -> None:
    x, y, p = run(LinearAttention(2, rope, causal=causal), rng)
    q, k, v = (x @ p[f"{n}.weight"].T for n in "qkv")
    out = np.zeros_like(x)
    for h in range(2):
        s = slice(8 * h, 8 * h + 8)
        fq, fk = (np.where(t > 0, t + 1, np.exp(t)) for t in (q[..., s], k[..., s]))
        rq, rk = (t if rope is None else turned(t, rope.theta, rope.interleaved) for t in (fq, fk))
        for b, n in np.ndindex(2, 6):
            m = slice(0, n + 1 if causal else 6)
            out[b, n, s] = (rk[b, m] @ rq[b, n]) @ v[b, m, s] / (fk[b, m] @ fq[b, n]).sum()
    close(y, out @ p["o.weight"].T, 1e3)


@pytest.mark.parametrize(
    "mixer", [Attention(4), RelativeAttention(4, 2), LinearAttention(4), Attention(4, bias=ALiBi())]
)
def test_encoders_do_not_see_padding(mixer: Any, rng: np.random.Generator) -> None:
    graph = Encoder(10, 16, 2, Block(mixer, MLP(8))).graph()
    params = {n: rng.standard_normal(v.shape) for n, v in graph.params.items() if n != "alibi.slopes"}

    def hidden(ids: Array) -> Array:
        mask = np.broadcast_to((np.arange(7) < 5).astype(np.int64), ids.shape)
        return interpret(graph, {"input_ids": ids, "attention_mask": mask}, params=params)["last_hidden_state"][:, :5]

    ids = rng.integers(0, 9, (2, 7))
    other = np.where(np.arange(7) < 5, ids, 9)
    np.testing.assert_array_equal(hidden(ids), hidden(other))


# -- biases


def heads_of(x: Array, p: dict[str, Array], bias: Array, causal: bool = True) -> Array:
    """Attention with 4 heads of 4 and a bias [4, seq, seq]."""
    q, k, v = ((x @ p[f"{n}.weight"].T).reshape(2, -1, 4, 4).transpose(0, 2, 1, 3) for n in "qkv")
    scores = q @ k.swapaxes(2, 3) / 2 + bias
    weights = softmax(np.where(np.tri(x.shape[1], dtype=bool) | (not causal), scores, -np.inf))
    return np.asarray((weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ p["o.weight"].T)


@pytest.mark.parametrize(("causal", "scale"), [(True, 1.0), (False, 1.0), (True, 0.5)])
def test_alibi(causal: bool, scale: float, rng: np.random.Generator) -> None:
    x, y, p = run(Attention(4, bias=ALiBi(scale=scale), causal=causal), rng)
    slopes = scale * np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    close(y, heads_of(x, p, -slopes[:, None, None] * np.abs(np.subtract.outer(np.arange(6), np.arange(6))), causal))


def bucket(distance: int, bidirectional: bool) -> int:
    """Of j − i among 8 buckets up to a distance of 20 (Raffel 2020, section 2.1)."""
    count = 4 if bidirectional else 8
    first = count if bidirectional and distance > 0 else 0
    away = abs(distance) if bidirectional else max(-distance, 0)
    exact = count // 2
    if away < exact:
        return first + away
    grown = exact + int(math.log(away / exact) / math.log(20 / exact) * (count - exact))
    return first + min(grown, count - 1)


@pytest.mark.parametrize("causal", [True, False])
def test_t5_bias(causal: bool, rng: np.random.Generator) -> None:
    x, y, p = run(Attention(4, bias=T5Bias(8, 20), causal=causal), rng, length=30)
    table = p["bias.weight"]
    buckets = [[bucket(j - i, not causal) for j in range(30)] for i in range(30)]
    close(y, heads_of(x, p, table[buckets].transpose(2, 0, 1), causal))


@pytest.mark.parametrize("kind", [Decoder, Encoder])
def test_one_t5_bias_for_all_layers(kind: type, rng: np.random.Generator) -> None:
    shared = kind(10, 16, 2, Block(Attention(4)), position_bias=T5Bias(8, 20, heads=4)).graph()
    verify(shared, recipes=True)
    own = kind(10, 16, 2, Block(Attention(4, bias=T5Bias(8, 20)))).graph()
    assert [n for n in shared.params if "bias" in n] == ["position_bias.weight"]
    assert [n for n in own.params if "bias" in n] == ["layers.0.attn.bias.weight", "layers.1.attn.bias.weight"]
    assert sum(n.op is ops.relative_position_bias for n in shared.nodes) == 1
    params = {n: rng.standard_normal(v.shape) for n, v in own.params.items()}
    table = params["layers.1.attn.bias.weight"] = params["layers.0.attn.bias.weight"]
    feeds = {
        "input_ids": rng.integers(0, 10, (2, 9)),
        "position_ids": np.tile(np.arange(9), (2, 1)),
        "attention_mask": np.arange(9)[None] < [[9], [5]],
    }
    params["position_bias.weight"] = table
    one, other = (
        interpret(g, {n: feeds[n] for n in g.inputs}, params={n: params[n] for n in g.params}) for g in (shared, own)
    )
    for name, value in one.items():
        close(value, other[name])


def test_a_bias_of_ones_own(rng: np.random.Generator) -> None:
    @module
    class Nearest:
        """Keys farther than one away cost ten."""

        def __call__(self, x: Value, heads: int, causal: bool) -> Value:
            at = ops.iota(x, axis=1)
            distance = ops.abs(ops.sub(ops.unsqueeze(at, axes=(0,)), ops.unsqueeze(at, axes=(1,))))
            far = ops.cast(ops.less(ops.affine(distance, by=0, plus=1), distance), to=x.type.dtype)
            return ops.unsqueeze(ops.affine(far, by=-10.0), axes=(0, 1))

    x, y, p = run(Attention(4, bias=Nearest()), rng)
    close(y, heads_of(x, p, -10.0 * (np.abs(np.subtract.outer(np.arange(6), np.arange(6))) > 1)))


# -- state spaces


def convolved(u: Array, p: dict[str, Array]) -> Array:
    width = p["conv.weight"].shape[1]
    padded = np.concatenate([np.zeros((len(u), width - 1, u.shape[2])), u], 1)
    y = np.zeros_like(u)
    for t in range(u.shape[1]):
        y[:, t] = (padded[:, t : t + width] * p["conv.weight"].T).sum(1)
    return silu(y + p.get("conv.bias", 0))


@pytest.mark.parametrize(
    "options", [{}, {"dt_rank": 3, "conv": 2, "conv_bias": False, "bias": True}, {"norms": RMSNorm(1e-3)}]
)
def test_mamba(options: dict[str, Any], rng: np.random.Generator) -> None:
    x, y, p = run(Mamba(12, state=5, **options), rng)
    rank = options.get("dt_rank", 1)
    both = x @ p["in.weight"].T + p.get("in.bias", 0)
    u, gate = convolved(both[..., :12], p), both[..., 12:]
    step, b, c = np.split(u @ p["x.weight"].T, [rank, rank + 5], -1)
    if "norms" in options:
        step, b, c = (rms(v, p[f"{n}_norm.weight"], 1e-3) for n, v in (("dt", step), ("b", b), ("c", c)))
    delta = softplus(step @ p["dt.weight"].T + p["dt.bias"])
    out = np.zeros_like(u)
    for r, i in np.ndindex(2, 12):
        h = np.zeros(5)
        for t in range(6):
            h = np.exp(-delta[r, t, i] * np.exp(p["a_log"][i])) * h + delta[r, t, i] * b[r, t] * u[r, t, i]
            out[r, t, i] = c[r, t] @ h + p["d"][i] * u[r, t, i]
    close(y, (out * silu(gate)) @ p["out.weight"].T + p.get("out.bias", 0), 100)


@pytest.mark.parametrize("options", [{}, {"groups": 2, "norm_groups": 2, "norm": RMSNorm(1e-2), "bias": True}])
def test_mamba2(options: dict[str, Any], rng: np.random.Generator) -> None:
    x, y, p = run(Mamba2(12, 4, state=5, **options), rng)
    groups, eps = options.get("groups", 1), options.get("norm", RMSNorm(1e-5)).eps
    wide = 5 * groups
    gate, u, step = np.split(x @ p["in.weight"].T + p.get("in.bias", 0), [12, 24 + 2 * wide], -1)
    u, b, c = np.split(convolved(u, p), [12, 12 + wide], -1)
    delta = softplus(step + p["dt.bias"])
    out = np.zeros_like(u)
    for r, head in np.ndindex(2, 4):
        h, s, g = np.zeros((3, 5)), slice(3 * head, 3 * head + 3), head * groups // 4
        own = slice(5 * g, 5 * g + 5)
        for t in range(6):
            kept = np.exp(-delta[r, t, head] * np.exp(p["a_log"][head]))
            h = kept * h + delta[r, t, head] * np.outer(u[r, t, s], b[r, t, own])
            out[r, t, s] = h @ c[r, t, own] + p["d"][head] * u[r, t, s]
    runs = (out * gate * sigmoid(gate)).reshape(2, 6, options.get("norm_groups", 1), -1)
    normed = rms(runs, eps=eps).reshape(2, 6, 12) * p["norm.weight"]
    close(y, normed @ p["out.weight"].T + p.get("out.bias", 0), 100)


def test_state_spaces_start_as_their_authors_code_does() -> None:
    """A of −1, −2, … (Mamba) or uniform in −1 to −16 (Mamba-2); steps log-uniform in 0.001 to 0.1."""
    graph = Decoder(10, 16, [Block(Mamba(4000, state=3, dt_rank=4)), Block(Mamba2(4000, 2000, state=5))]).graph()

    def value(name: str) -> Array:
        return np.asarray(graph.params[f"layers.{name}"].recipe.evaluate(graph.reader))

    def spread(x: Array, low: float, high: float) -> None:
        assert low <= x.min() < low + 0.01 * (high - low) and high - 0.01 * (high - low) < x.max() <= high
        assert abs(x.mean() - (low + high) / 2) < 0.03 * (high - low)

    np.testing.assert_allclose(np.exp(value("0.attn.a_log")), np.tile([1.0, 2.0, 3.0], (4000, 1)), rtol=1e-6)
    spread(np.exp(value("1.attn.a_log")), 1, 16)
    for i in range(2):
        spread(np.log(softplus(value(f"{i}.attn.dt.bias"))), np.log(1e-3) - 1e-3, np.log(0.1) + 1e-3)
        spread(value(f"{i}.attn.conv.weight"), -0.5, 0.5)
    spread(value("0.attn.dt.weight"), -0.5, 0.5)


# -- whole stacks


def test_repeated_blocks_share_their_weights(rng: np.random.Generator) -> None:
    shared = Encoder(10, 16, 1, Repeat(Block(Attention(4), MLP(8)), 3), embed_dim=4, embed_norm=RMSNorm()).graph()
    verify(shared, recipes=True)
    assert (shared.params["embed.weight"].shape, shared.params["embed_norm.weight"].shape) == ((10, 4), (4,))
    plain = Encoder(10, 16, 3, Block(Attention(4), MLP(8)), embed_dim=4, embed_norm=RMSNorm()).graph()
    params = {n: rng.standard_normal(v.shape) for n, v in shared.params.items()}

    def source(name: str) -> str:
        layer, _, rest = name.removeprefix("layers.").partition(".")
        return f"layers.0.block.{rest}" if layer.isdigit() else name

    feeds = {"input_ids": rng.integers(0, 10, (2, 5)), "attention_mask": np.ones((2, 5), np.int64)}
    one = interpret(shared, feeds, params=params)["last_hidden_state"]
    close(one, interpret(plain, feeds, params={n: params[source(n)] for n in plain.params})["last_hidden_state"])


def test_latent_attention_is_for_decoders() -> None:
    with pytest.raises(WeftError, match=r"layers.0.attn \(MLA\): latent attention is causal: it belongs in a Decoder"):
        Encoder(10, 16, 1, Block(MLA(4, 8, 6, 4, 5, RoPE()))).graph()
