"""The declarative language: names, sharing, building blocks against their formulas, errors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import weft
from weft.frontends.dsl import (
    MLP,
    Attention,
    Block,
    Decoder,
    Encoder,
    GatedMLP,
    LayerNorm,
    LearnedPositions,
    RMSNorm,
    RoPE,
    Sinusoidal,
    building,
    fill,
    linear,
    module,
    named,
    param,
    scope,
    trace,
)
from weft.frontends.dsl.blocks import ARRANGEMENTS
from weft.ir import Graph, TensorType, Value, WeftError, interpret, ops, verify
from weft.ir.recipes import Full, Normal
from weft.ir.types import dtypes, sizes

from ..formulas import TOLERANCE, Array, X, close, rms, run, softmax

# -- the examples of the plan, as written


def test_local_global_example(tmp_path: Any) -> None:
    (tmp_path / "local_global.py").write_text("""\
# local_global.py
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

local = Block(Attention(heads=8, kv_heads=2, rope=RoPE(10_000), window=512), GatedMLP(2048), norm=RMSNorm(1e-6))
wide = Block(Attention(heads=8, kv_heads=2, rope=RoPE(1_000_000)), GatedMLP(2048), norm=RMSNorm(1e-6))

model = Decoder(vocab=32_000, dim=512, layers=([local] * 5 + [wide]) * 4, tie_embeddings=True)
""")
    graph = weft.load_source(tmp_path / "local_global.py").graph
    verify(graph, recipes=True)
    windows = [n.attrs["window"] for n in graph.nodes if n.op is ops.attention]
    assert windows == ([512] * 5 + [None]) * 4
    assert "lm_head.weight" not in graph.params
    assert {n for n in graph.params if "rope" in n} == {"rope.frequencies", "rope.frequencies_2"}


def test_squared_relu_example(tmp_path: Any) -> None:
    (tmp_path / "squared.py").write_text("""\
from weft import module, linear, square, relu

@module
class SquaredReLU:
    hidden: int

    def __call__(self, x):
        return linear(square(relu(linear(x, self.hidden, "up"))), x.width, "down")

from weft import Attention, Block, Decoder
model = Decoder(100, 32, 2, Block(Attention(4), SquaredReLU(64)))
""")
    graph = weft.load_source(tmp_path / "squared.py:model").graph
    verify(graph, recipes=True)
    assert graph.params["layers.1.ffn.up.weight"].shape == (64, 32)
    assert [n.op.name for n in graph.nodes if n.scope == "layers.0.ffn"] == ["linear", "relu", "square", "linear"]


def test_paper_like_example() -> None:
    model = Decoder(vocab=32000, dim=4096, layers=32, block=Block(attn=Attention(heads=32, kv_heads=8, rope=RoPE(1e4),
                    window=4096), ffn=GatedMLP(14336), norm=RMSNorm(1e-5)))  # fmt: skip
    graph = model.graph()
    assert graph.params["layers.31.attn.k.weight"].shape == (1024, 4096)
    assert str(model) == (
        "Decoder(vocab=32000, dim=4096, layers=32, block=Block(attn=Attention(heads=32, kv_heads=8, rope=RoPE(), "
        "window=4096), ffn=GatedMLP(hidden=14336), norm=RMSNorm(eps=1e-05)))"
    )


def test_models_print_as_they_are_written() -> None:
    one, two = MLP(8), MLP(9)
    for layers, text in (
        ([one] * 3, "[MLP(hidden=8)] * 3"),
        ([one, two], "[MLP(hidden=8)] + [MLP(hidden=9)]"),
        (([one] * 2 + [two]) * 4, "([MLP(hidden=8)] * 2 + [MLP(hidden=9)]) * 4"),
        ([one, one, two, one], "[MLP(hidden=8)] * 2 + [MLP(hidden=9)] + [MLP(hidden=8)]"),
    ):
        assert repr(Decoder(10, 8, layers)) == f"Decoder(vocab=10, dim=8, layers={text})"
    rope = RoPE(scaling="longrope", original=9, factors=(1.0, 1.0))
    assert repr(rope) == "RoPE(scaling='longrope', original=9, factors=(1.0, 1.0))"


def test_a_large_model_is_described_quickly() -> None:
    start = time.process_time()
    layer = Block(Attention(128, 8, rope=RoPE(5e5)), GatedMLP(53_248), RMSNorm(1e-5))
    graph = Decoder(128_256, 16_384, 126, layer).graph()
    assert time.process_time() - start < 5
    assert len(graph.params) == 126 * 9 + 4


# -- names and sharing


@module
class Pair:
    one: Any
    two: Any

    def __call__(self, x: Value) -> Value:
        return ops.add(self.one(x), self.two(x))


def test_scopes_are_field_names_and_every_place_has_its_own_parameters() -> None:
    shared = MLP(8)
    graph = trace(Pair(shared, Pair(shared, shared)), {"x": X})
    assert {n.rsplit(".", 2)[0] for n in graph.params} == {"one", "two.one", "two.two"}


def test_the_same_field_twice_shares_parameters() -> None:
    @module
    class Twice:
        inner: MLP

        def __call__(self, x: Value) -> Value:
            return self.inner(self.inner(x))

    graph = trace(Twice(MLP(8)), {"x": X})
    assert set(graph.params) == {"inner.up.weight", "inner.down.weight"}
    assert all(len(p.uses) == 2 for p in graph.params.values())


def test_explicit_names_and_scopes() -> None:
    @module
    class Named:
        norm: RMSNorm

        def __call__(self, x: Value) -> Value:
            x = named(self.norm, "first_norm")(x)
            with scope("deep"):
                x = linear(named(self.norm, "second_norm")(x), 4, "out", bias=True)
            return ops.mul(x, param("gain", (4,), fill(2.0)))

    graph = trace(Named(RMSNorm()), {"x": X})
    assert list(graph.params) == [
        *("first_norm.weight", "deep.second_norm.weight", "deep.out.weight", "deep.out.bias", "gain")
    ]
    assert graph.params["gain"].recipe == Full(2.0, (4,))
    assert next(iter(graph.nodes)).output.name == "first_norm"


def test_modules_in_lists_and_made_on_the_way() -> None:
    @module
    class Chain:
        parts: list[Any]

        def __call__(self, x: Value) -> Value:
            for part in self.parts:
                x = part(x)
            return RMSNorm()(RMSNorm()(x))

    graph = trace(Chain([MLP(4), MLP(8), RMSNorm()]), {"x": X})
    assert [n for n in graph.params if n.endswith("norm.weight") or "norm" in n] == [
        *("rms_norm.weight", "rms_norm_2.weight")
    ]
    assert graph.params["parts.1.up.weight"].shape == (8, 16)
    assert "parts.2.weight" in graph.params


def test_modules_may_be_derived() -> None:
    @module
    class Wide(MLP):
        scale: float = 1.0

    @module
    class Louder(Wide):
        def __call__(self, x: Value) -> Value:
            return ops.affine(super().__call__(x), by=self.scale)

    graph = trace(Pair(Wide(4), Louder(6, scale=2.0)), {"x": X})
    assert set(graph.params) == {f"{a}.{b}.weight" for a in ("one", "two") for b in ("up", "down")}
    with pytest.raises(TypeError, match="module Silent needs a __call__"):

        @module
        class Silent:
            n: int


def test_declared_initialization() -> None:
    one, two, three = (Decoder(10, 8, 1, Block(Attention(2), MLP(16))).graph(seed=s) for s in (0, 0, 1))
    assert one == two != three
    recipe = one.params["layers.0.ffn.up.weight"].recipe
    assert recipe == Normal((16, 8), 0.02, "layers.0.ffn.up.weight", 0)
    assert one.params["final_norm.weight"].recipe == Full(1.0, (8,))


# -- blocks against formulas


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("relu", lambda x: np.maximum(x, 0)),
        ("silu", lambda x: x / (1 + np.exp(-x))),
        ("swish(0.5)", lambda x: x / (1 + np.exp(-0.5 * x))),
        ("gelu", lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))),
        ("gelu_quick", lambda x: x / (1 + np.exp(-1.702 * x))),
        ("identity", lambda x: x),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
    ],
)
def test_feed_forward(activation: str, formula: Any, rng: np.random.Generator) -> None:
    x, y, p = run(MLP(24, activation, bias=True), rng)
    close(y, formula(x @ p["up.weight"].T + p["up.bias"]) @ p["down.weight"].T + p["down.bias"])
    x, y, p = run(GatedMLP(24, activation), rng)
    close(y, (formula(x @ p["gate.weight"].T) * (x @ p["up.weight"].T)) @ p["down.weight"].T)


def test_matched_gating_is_llama2() -> None:
    assert GatedMLP.matched(4 * 4096, multiple=256) == GatedMLP(11_008)


def reference_attention(x: Array, p: dict[str, Array], heads: int, kv: int, d: int, **options: Any) -> Array:
    """Head by head, from the formula."""
    q, k, v = (x @ p[f"{n}.weight"].T + p.get(f"{n}.bias", 0) for n in "qkv")
    seq = x.shape[1]
    at = np.arange(seq)
    seen = at[:, None] >= at[None] if options.get("causal", True) else np.ones((seq, seq), bool)
    if window := options.get("window"):
        seen &= np.abs(at[:, None] - at[None]) < window
    outs = []
    for h in range(heads):
        g = h // (heads // kv)
        qh, kh, vh = q[..., h * d : h * d + d], k[..., g * d : g * d + d], v[..., g * d : g * d + d]
        if options.get("qk_norm"):
            qh = qh / np.sqrt((qh**2).mean(-1, keepdims=True) + 1e-6) * p["q_norm.weight"]
            kh = kh / np.sqrt((kh**2).mean(-1, keepdims=True) + 1e-6) * p["k_norm.weight"]
        scores = qh @ kh.transpose(0, 2, 1) * options.get("scale", d**-0.5)
        if cap := options.get("softcap"):
            scores = cap * np.tanh(scores / cap)
        scores = np.where(seen, scores, -np.inf)
        if options.get("sinks"):
            sink = np.broadcast_to(p["sinks"][h], (*scores.shape[:2], 1))
            outs.append(softmax(np.concatenate([scores, sink], -1))[..., :-1] @ vh)
        else:
            outs.append(softmax(scores) @ vh)
    y = np.concatenate(outs, -1)
    if options.get("gate"):
        y = y / (1 + np.exp(-(x @ p["gate.weight"].T)))
    return np.asarray(y @ p["o.weight"].T + p.get("o.bias", 0))


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
)
def test_attention(options: dict[str, Any], rng: np.random.Generator) -> None:
    x, y, p = run(Attention(4, **options), rng)
    kv, d = options.get("kv_heads", 4), options.get("head_dim", 4)
    assert p["k.weight"].shape == (kv * d, 16)
    close(y, reference_attention(x, p, 4, kv, d, **options))


def test_qk_norm_over_the_full_width(rng: np.random.Generator) -> None:
    _, _, p = run(Attention(4, kv_heads=2, qk_norm=RMSNorm(), qk_norm_full=True), rng)
    assert (p["q_norm.weight"].shape, p["k_norm.weight"].shape) == ((16,), (8,))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_makes_scores_depend_on_distance(interleaved: bool, rng: np.random.Generator) -> None:
    """With positions shifted, attention is the same; with them reversed it is not."""
    graph = trace(Attention(2, rope=RoPE(100.0, fraction=0.5, interleaved=interleaved)), {"x": X})
    assert graph.params["rope.frequencies"].shape == (2,)
    params = {n: rng.standard_normal(p.shape) for n, p in graph.params.items() if "rope" not in n}
    x, at = rng.standard_normal((1, 6, 16)), np.arange(6)[None]
    plain, shifted, reverse = (
        interpret(graph, {"x": x, "position_ids": p}, params=params)["output"] for p in (at, at + 9, at[:, ::-1])
    )
    np.testing.assert_allclose(shifted, plain, rtol=0, atol=1e4 * TOLERANCE)
    assert np.abs(reverse - plain).max() > 1e-2


@module
class Scaled:
    """f(x) = x ⊙ w, easy to follow by hand."""

    def __call__(self, x: Value) -> Value:
        return ops.mul(x, param("w", (x.width,)))


# y = f(x) with norms n(name, ·), attention f and feed-forward g
ARRANGED: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "pre": lambda x, n, f, g: (y := x + f(n("attn_norm", x))) + g(n("ffn_norm", y)),
    "pre_ffn": lambda x, n, f, g: (y := x + f(x)) + g(n("ffn_norm", y)),
    "post": lambda x, n, f, g: n("ffn_norm", (y := n("attn_norm", x + f(x))) + g(y)),
    "sandwich": lambda x, n, f, g: (
        (y := x + n("attn_post_norm", f(n("attn_norm", x)))) + n("ffn_post_norm", g(n("ffn_norm", y)))
    ),
    "post_sublayer": lambda x, n, f, g: (y := x + n("attn_post_norm", f(x))) + n("ffn_post_norm", g(y)),
    "parallel": lambda x, n, f, g: x + f(n("norm", x)) + g(n("norm", x)),
    "parallel_norms": lambda x, n, f, g: x + f(n("attn_norm", x)) + g(n("ffn_norm", x)),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arrangements(arrangement: str, rng: np.random.Generator) -> None:
    x, y, p = run(Block(Scaled(), Scaled(), arrangement=arrangement), rng)
    expected = ARRANGED[arrangement](
        x,
        lambda name, v: rms(v, p[f"{name}.weight"]),
        lambda v: v * p["attn.w"],
        lambda v: v * p["ffn.w"],
    )
    close(y, expected)


def test_residual_scale(rng: np.random.Generator) -> None:
    x, y, p = run(Block(Scaled(), residual_scale=0.5), rng)
    close(y, x + 0.5 * rms(x, p["attn_norm.weight"]) * p["attn.w"])


def test_layer_norm_and_weightless_norms(rng: np.random.Generator) -> None:
    x, y, p = run(LayerNorm(1e-3), rng)
    centred = x - x.mean(-1, keepdims=True)
    close(
        y,
        centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * p["layer_norm.weight"] + p["layer_norm.bias"],
    )
    assert run(LayerNorm(weight=False, bias=False), rng)[2] == {}
    assert run(RMSNorm(weight=False), rng)[2] == {}


def test_absolute_positions(rng: np.random.Generator) -> None:
    x, y, p = run(LearnedPositions(9), rng)
    close(y, x + p["learned_positions.weight"][:6])
    graph = trace(Sinusoidal(9), {"x": X})
    (name,) = graph.params
    table = graph.params[name].recipe.evaluate(graph.reader)
    angle = 5 / 10_000 ** (4 / 16)
    np.testing.assert_allclose(table[5, 4:6], [math.sin(angle), math.cos(angle)], rtol=1e-6)


def test_inclusive_sinusoids_with_an_offset(rng: np.random.Generator) -> None:
    """Check the sinusoids of fairseq: rates from 1 to 1/10000, all sines first, the first token not at position 0."""
    x, y, _ = run(Sinusoidal(9, interleaved=False, offset=2, inclusive=True), rng)
    angles = np.outer(np.arange(2, 2 + x.shape[1]), 10_000 ** -np.linspace(0, 1, 8))
    close(y - x, np.broadcast_to(np.concatenate([np.sin(angles), np.cos(angles)], 1), x.shape))
    with pytest.raises(WeftError, match="inclusive frequencies need a width of at least 4, not 2"):
        trace(Sinusoidal(9, inclusive=True), {"x": TensorType(dtypes.f32, (1, 4, 2))})


# -- whole models


def test_decoder_options(rng: np.random.Generator) -> None:
    model = Decoder(
        *(11, 8, 1),
        Block(Attention(2)),
        positions=LearnedPositions(7),
        embed_scale=3.0,
        embed_norm=RMSNorm(),
        final_norm=False,
        head_bias=True,
        logit_scale=0.25,
        logit_softcap=5.0,
    )
    graph = model.graph(name="odd")
    verify(graph, recipes=True)
    assert (graph.name, graph.meta["context"], graph.meta["max_positions"]) == ("odd", 7, 7)
    assert list(graph.inputs) == ["input_ids", "position_ids"]
    assert "final_norm.weight" not in graph.params
    params = {n: rng.standard_normal(p.shape) for n, p in graph.params.items()}
    params["layers.0.attn.o.weight"] *= 0
    ids, at = np.array([[1, 5, 10]]), np.array([[0, 1, 2]])
    logits = interpret(graph, {"input_ids": ids, "position_ids": at}, params=params)["logits"]
    x = rms(params["embed.weight"][ids] * 3 + params["positions.weight"][at], params["embed_norm.weight"])
    raw = (x @ params["lm_head.weight"].T + params["lm_head.bias"]) * 0.25
    close(logits, 5 * np.tanh(raw / 5))


def test_the_last_norm_is_the_blocks_own() -> None:
    last = Decoder(10, 8, [Block(Attention(2), norm=LayerNorm(1e-3))]).graph()
    assert [n.op.name for n in last.nodes if n.output.name == "final_norm"] == ["layer_norm"]
    post = Decoder(10, 8, 1, Block(Attention(2), arrangement="post")).graph()
    assert "final_norm.weight" not in post.params
    assert "position_ids" not in post.inputs


def test_encoder_with_rope_numbers_its_own_positions() -> None:
    block = Block(Attention(2, rope=RoPE()), MLP(8))
    graph = Encoder(10, 8, 2, block, final_norm=RMSNorm()).graph()
    verify(graph, recipes=True)
    assert list(graph.inputs) == ["input_ids", "attention_mask"]
    assert list(graph.outputs) == ["last_hidden_state"]
    attention = [n for n in graph.nodes if n.op is ops.attention]
    assert all(n.operand("key_mask") is graph.inputs["attention_mask"] and not n.attrs["causal"] for n in attention)
    assert "iota" not in {n.op.name for n in Encoder(10, 8, 1, Block(Attention(2))).graph().nodes}


def test_cross_attention_reads_memory(rng: np.random.Generator) -> None:
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


def test_building_into_a_graph_of_ones_own() -> None:
    graph = Graph("mine")
    with building(graph, seed=5):
        x = graph.add_input("x", X)
        graph.add_output("y", MLP(8)(MLP(4)(x)))
    verify(graph, recipes=True)
    assert [p.name for p in graph.params.values()] == [
        *("mlp.up.weight", "mlp.down.weight", "mlp_2.up.weight", "mlp_2.down.weight")
    ]
