"""Invalid settings are rejected where they are written, with one sentence that has the module and the values."""

from __future__ import annotations

from typing import Any

import pytest

from weft.frontends import dsl
from weft.ir import Value, WeftError, ops
from weft.ir.types import sizes

from .harness import X

ROPE = dsl.RoPE()
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dsl.Attention(8, kv_heads=3), "Attention: kv_heads=3 does not divide heads=8"),
        (lambda: dsl.Attention(8, kv_heads=0), "Attention: kv_heads=0 must be a whole number of at least 1"),
        (lambda: dsl.Attention(0), "Attention: heads=0 must be"),
        (lambda: dsl.Attention(8.0), "Attention: heads=8.0 must be a whole number"),
        (lambda: dsl.Attention(8, head_dim=0), "Attention: head_dim=0 must be"),
        (lambda: dsl.GatedMLP(1 << 63), "GatedMLP: hidden=9223372036854775808 must be a number below 2\\^63"),
        (lambda: dsl.Attention(8, window=0), "Attention: window=0 must be a whole number of at least 1"),
        (lambda: dsl.Attention(8, mask=dsl.Mask(pattern='zigzag')), "Mask: pattern='zigzag' is unknown; known are"),
        (lambda: dsl.Attention(8, mask=dsl.Mask(pattern='dilated', stride=0)), "Mask: stride=0 must be"),
        (lambda: dsl.Attention(8, mask=dsl.Mask(pattern='fixed', stride=2, summary=3)),
         "Mask: summary=3 exceeds stride=2"),
        (lambda: dsl.Attention(8, softcap=0.0), "Attention: softcap=0.0 must be a positive number"),
        (lambda: dsl.Attention(8, softcap=INF), "Attention: softcap=inf must be a positive number"),
        (lambda: dsl.Attention(8, scale=NAN), "Attention: scale=nan must be a finite number"),
        (lambda: dsl.Attention(8, rope=5), "Attention: rope=5 must be RoPE"),
        (lambda: dsl.Attention(8, qk_norm=3), "Attention: qk_norm=3 is not a module"),
        (lambda: dsl.Attention(8, bias=3), "Attention: bias=3 is not a module"),
        (lambda: dsl.Attention(8, bias=dsl.ALiBi), "Attention: bias=<class .*ALiBi'> is not a module: call it"),
        (lambda: dsl.Attention(8, qk_norm=dsl.QKNorm(dsl.RMSNorm(),
         "all")), "QKNorm: over='all' is unknown; known are head"),
        (lambda: dsl.Attention(8, gate=dsl.Gate("relu")),
         "Gate: activation='relu' is unknown; known are sigmoid, softplus"),
        (lambda: dsl.MoE(4, 8, 2, router=3), "MoE: router=3 must be Router"),
        (lambda: dsl.Attention(8, head_dim=6, rope=dsl.RoPE(fraction=0.5)),
         "RoPE: dim=3 must be even and at most head_dim=6"),
        (lambda: dsl.BlockSparse(0), "BlockSparse: block=0 must be a whole number of at least 1"),
        (lambda: dsl.BlockSparse(4, sides=-1), "BlockSparse: sides=-1 must be a whole number of at least 0"),
        (lambda: dsl.BlockSparse(4, first=0, first_weight=2), "BlockSparse: first_weight=2 is for first blocks"),
        (lambda: dsl.Attention(8, value_conv=4), "Attention: value_conv=4 must be odd"),
        (lambda: dsl.Attention(8, kv_heads=2, value_conv=3), "Attention: value_conv needs kv_heads=8"),
        (lambda: dsl.Attention(8, mask=4), "Attention: mask=4 must be Mask or BlockSparse"),
        (lambda: dsl.Attention(8, mask=dsl.BlockSparse(4), window=3),
         "Attention: mask=BlockSparse does not support window"),
        (lambda: dsl.Attention(8, mask=dsl.BlockSparse(4), sinks=True),
         "Attention: mask=BlockSparse does not support sinks"),
        (lambda: dsl.RoPE(dim=5), "RoPE: dim=5 must be even"),
        (lambda: dsl.RoPE(dim=0), "RoPE: dim=0 must be a whole number of at least 2"),
        (lambda: dsl.RoPE(-1.0), "RoPE: theta=-1.0 must be a positive number"),
        (lambda: dsl.RoPE(fraction=1.5), "RoPE: fraction=1.5 must be above 0 and at most 1"),
        (lambda: dsl.RoPE(scaling="magic"), "RoPE: scaling='magic' is unknown; known are none"),
        (lambda: dsl.RoPE(scaling="yarn", factor=4), "RoPE: scaling='yarn' needs original"),
        (lambda: dsl.RoPE(scaling="dynamic", factor=2), "RoPE: scaling='dynamic' needs original"),
        (lambda: dsl.RoPE(scaling="dynamic", original=-1), "RoPE: original=-1 must be a whole number of at least 0"),
        (lambda: dsl.RoPE(dim=2, scaling="ntk"), "RoPE: scaling='ntk' needs dim above 2"),
        (lambda: dsl.RoPE(scaling="longrope", factors=(1.0,)), "RoPE: scaling='longrope' needs original"),
        (lambda: dsl.RoPE(scaling="longrope", original=9), "RoPE: scaling='longrope' needs factors"),
        (lambda: dsl.RoPE(dim=4, scaling="longrope", original=9, factors=(1.0,)), "RoPE: factors must have length 2"),
        (lambda: dsl.RoPE(dim=2, scaling="longrope", original=9, factors=(1.0,), long_factors=(1.0, 2.0)),
         "RoPE: long_factors must have length 1 for dim=2"),
        (lambda: dsl.MLP(8, "swoosh"), "MLP: unknown activation 'swoosh'; known are identity"),
        (lambda: dsl.MLP(0), "MLP: hidden=0 must be"),
        (lambda: dsl.GatedMLP(8, "swish(x)"), r"GatedMLP: unknown activation 'swish\(x\)'"),
        (lambda: dsl.MLA(4, 0, 6, 4, 5, ROPE), "MLA: rank=0 must be a whole number of at least 1"),
        (lambda: dsl.MLA(4, 8, 6, 3, 5, ROPE), "RoPE: dim=3 must be even and at most head_dim=3"),
        (lambda: dsl.MLA(4, 8, 6, 4, 5, ROPE, q_rank=-1), "MLA: q_rank=-1 must be"),
        (lambda: dsl.MLA(4, 8, 6, 4, 5, 3), "MLA: rope=3 must be RoPE"),
        (lambda: dsl.GatedDeltaNet(4, 8, groups=3), "GatedDeltaNet: groups=3 does not divide heads=4"),
        (lambda: dsl.GatedDeltaNet(4, 8, conv=1), "GatedDeltaNet: conv=1 must be a whole number of at least 2"),
        (lambda: dsl.GatedDeltaNet(4, 8, gate="x"), "GatedDeltaNet: unknown activation 'x'"),
        (lambda: dsl.MLA(4, 8, 6, 4, 5, ROPE, index=3), "MLA: index=3 must be LightningIndex"),
        (lambda: dsl.MLA(4, 8, 6, 4, 5, ROPE, keep_index="a"), "MLA: keep_index needs index="),
        (
            lambda: dsl.MLA(4, 8, 6, 4, 5, ROPE, index=dsl.LightningIndex(2, 4, 3), share_index="a"),
            "MLA: index and share_index exclude each other",
        ),
        (lambda: dsl.LightningIndex(2, 4, 0), "LightningIndex: top_k=0 must be a whole number of at least 1"),
        (lambda: dsl.LightningIndex(2, 4, 3, dsl.RoPE(dim=6)), "RoPE: dim=6 must be even and at most head_dim=4"),
        (lambda: dsl.MLA(4, 8, 6, 4, 5, ROPE, scale=INF), "MLA: scale=inf must be a finite number"),
        (lambda: dsl.LinearAttention(4, rope=5), "LinearAttention: rope=5 must be RoPE"),
        (lambda: dsl.RelativeAttention(4, 0), "RelativeAttention: clip=0 must be"),
        (lambda: dsl.LinearAttention(4, dsl.RoPE(amplitude=1.2)),
         "LinearAttention: amplitude=1.2 of rope must be 1"),
        (lambda: dsl.ALiBi(max_bias=0), "ALiBi: max_bias=0 must be a positive number"),
        (lambda: dsl.T5Bias(2), "T5Bias: buckets=2 must be a whole number of at least 4"),
        (lambda: dsl.T5Bias(32, 16), "T5Bias: max_distance=16 must exceed half of buckets=32"),
        (lambda: dsl.MoE(4, 8, 5), "MoE: k=5 exceeds the 4 experts to choose from"),
        (lambda: dsl.MoE(4, 8, 0), "MoE: k=0 must be"),
        (lambda: dsl.MoE(8, 8, 5, router=dsl.Router(groups=4, top_groups=2)),
         "MoE: k=5 exceeds the 4 experts to choose from in top_groups=2 of groups=4"),
        (lambda: dsl.MoE(8, 8, 2, router=dsl.Router(groups=3)), "MoE: groups=3 does not divide experts=8"),
        (lambda: dsl.MoE(8, 8, 2, router=dsl.Router(groups=4, top_groups=5)), "Router: top_groups=5 exceeds groups=4"),
        (lambda: dsl.MoE(4, 8, 1, router=dsl.Router(groups=4)),
         "MoE: group_score='top2' needs 2 experts per group, not 1"),
        (lambda: dsl.MoE(4, 8, 1, router=dsl.Router(capacity=1.25), weigh_input=True),
         "MoE: weigh_input needs k=1, choice='token' and no capacity"),
        (lambda: dsl.MoE(4, 8, 1, router=dsl.Router(zero_experts=1), weigh_input=True),
         "MoE: weigh_input needs k=1, choice='token' and no capacity"),
        (lambda: dsl.MoE(6, 8, 4, router=dsl.Router(choice='hierarchical', groups=2)),
         "MoE: k=4 exceeds the 3 experts to choose from"),
        (lambda: dsl.MoE(4, 8, 2, router=dsl.Router(choice='router')),
         "Router: choice='router' is unknown; known are token, expert, hierarchical"),
        (lambda: dsl.MoE(4, 8, 2, router=dsl.Router(scoring='relu')),
         "Router: scoring='relu' is unknown; known are softmax, sigmoid"),
        (lambda: dsl.MoE(4, 8, 2, router=dsl.Router(choice='expert', scoring='sigmoid')),
         "Router: scoring needs choice='token', not 'expert'"),
        (lambda: dsl.MoE(4, 8, 2, router=dsl.Router(choice='expert', groups=2)),
         "Router: groups=2 must be 1 for choice='expert'"),
        (lambda: dsl.MoE(4, 8, 2, router=dsl.Router(batched=True)),
         "Router: batched needs choice='expert' or capacity="),
        (lambda: dsl.MoE(4, 8, 2, router=dsl.Router(capacity=0)), "Router: capacity=0 must be a positive number"),
        (lambda: dsl.MoE(4, 8, 2, gated=False, limit=7.0), "MoE: limit and shift need gated=True"),
        (lambda: dsl.MoE(4, 8, 2, shared_gate=True), "MoE: shared_gate needs shared="),
        (lambda: dsl.MoE(4, 8, 2, router=dsl.Router(aux_loss=-0.1)), "Router: aux_loss=-0.1 must not be negative"),
        (lambda: dsl.Mamba(0), "Mamba: inner=0 must be"),
        (lambda: dsl.Mamba(8, state=0), "Mamba: state=0 must be"),
        (lambda: dsl.Mamba(8, conv=1), "Mamba: conv=1 must be a whole number of at least 2"),
        (lambda: dsl.Mamba(8, dt_rank=0), "Mamba: dt_rank=0 must be"),
        (lambda: dsl.Mamba2(8, 3), "Mamba2: heads=3 does not divide inner=8"),
        (lambda: dsl.Mamba2(8, 4, groups=3), "Mamba2: groups=3 does not divide heads=4"),
        (lambda: dsl.Mamba2(8, 4, norm_groups=3), "Mamba2: norm_groups=3 does not divide inner=8"),
        (lambda: dsl.Mamba2(8, 4, norm=3), "Mamba2: norm=3 is not a module"),
        (lambda: dsl.Mamba2(8, 4, least_step=0.0), "Mamba2: least_step=0.0 must be a positive number"),
        (lambda: dsl.MoE(4, 8, 2, latent=0), "MoE: latent=0 must be"),
        (lambda: dsl.LightningAttention(4, decay=0.0), "LightningAttention: decay=0.0 must be a positive number"),
        (lambda: dsl.NormedResidual(dsl.MLP(8), dsl.MLP(8), ffn_scales=(1.0,)),
         "NormedResidual: ffn_scales=.* must be two"),
        (lambda: dsl.MLSTM(3, 8), "MLSTM: heads=3 does not divide qk_dim=8"),
        (lambda: dsl.MLSTM(2, cap=0.0), "MLSTM: cap=0.0 must be a positive number"),
        (lambda: dsl.MemoryBlock(dsl.Mamba(8), dsl.MLP(8)), "MemoryBlock: attn and ffn need each other"),
        (lambda: dsl.Attention(8, out_dim=0), "Attention: out_dim=0 must be"),
        (lambda: dsl.RGLRU(3, 8), "RGLRU: heads=3 does not divide width=8"),
        (lambda: dsl.RWKVTimeMix(0), "RWKVTimeMix: width=0 must be"),
        (lambda: dsl.RWKVChannelMix(0), "RWKVChannelMix: hidden=0 must be"),
        (lambda: dsl.ShortConv(1), "ShortConv: conv=1 must be a whole number of at least 2"),
        (lambda: dsl.ParallelHybrid(3, dsl.Mamba(8)), "ParallelHybrid: attention=3 is not a module"),
        (lambda: dsl.RMSNorm(0.0), "RMSNorm: eps=0.0 must be a positive number"),
        (lambda: dsl.LayerNorm(-1e-5), "LayerNorm: eps=-1e-05 must be"),
        (lambda: dsl.LearnedPositions(0), "LearnedPositions: length=0 must be"),
        (lambda: dsl.Sinusoidal(-3), "Sinusoidal: length=-3 must be"),
        (lambda: dsl.Block(dsl.MLP(8), arrangement="odd"), "Block: arrangement='odd' is unknown; known are pre"),
        (lambda: dsl.Block(None), "Block: attn, cross and ffn are all None"),
        (lambda: dsl.Block(3), "Block: attn=3 is not a module"),
        (lambda: dsl.Block(dsl.Attention), "Block: attn=<class .*Attention'> is not a module: call it"),
        (lambda: dsl.Decoder(10, 8, [dsl.MLP(8), None]), r"Decoder: layers\[1\]=None is not a module"),
        (lambda: dsl.Decoder(10, 8, 2, dsl.MLP), "Decoder: block=<class .* is not a module: call it"),
        (lambda: dsl.Repeat(dsl.MLP(8), 0), "Repeat: times=0 must be"),
        (lambda: dsl.Decoder(10, 8, 2), "Decoder: layers=2 needs block="),
        (lambda: dsl.Decoder(10, 8, 0, dsl.MLP(8)), "Decoder: layers=0 must be"),
        (lambda: dsl.Decoder(10, 8, []), "Decoder: layers is empty"),
        (lambda: dsl.Decoder(0, 8, 1, dsl.MLP(8)), "Decoder: vocab=0 must be"),
        (lambda: dsl.Decoder(10, 8, [dsl.MLP(8)], dsl.MLP(8)),
         "Decoder: layers is a list, so block must be left out"),
        (lambda: dsl.Decoder(10, 8, 1, dsl.MLP(8), position_bias=dsl.T5Bias()),
         "Decoder: position_bias needs heads="),
        (lambda: dsl.Decoder(10, 8, 1, dsl.MLP(8), position_bias=dsl.ALiBi()),
         r"Decoder: position_bias=ALiBi\(\) must be T5Bias: give other biases to Attention\(bias=...\)"),
        (lambda: dsl.Decoder(10, 8, 2.0, dsl.MLP(8)),
         "Decoder: layers=2.0 must be a whole number or a list of modules"),
        (lambda: dsl.Decoder(10, 8, 1, dsl.MLP(8), positions=3),
         "Decoder: positions=3 must be LearnedPositions or Sinusoidal"),
        (lambda: dsl.Decoder(10, 8, 1, dsl.MLP(8), positions=dsl.LearnedPositions(16), context=64),
         "Decoder: context=64 exceeds length=16 of positions"),
        (lambda: dsl.Encoder(10, 8, 1, dsl.MLP(8), positions=dsl.Sinusoidal(16), context=17),
         "Encoder: context=17 exceeds length=16 of positions"),
        (lambda: dsl.Decoder(10, 8, 1, dsl.MLP(8), final_norm=3), "Decoder: final_norm=3 is not a module"),
        (lambda: dsl.Encoder(10, 8, 1, dsl.MLP(8), final_norm=True), "Encoder: final_norm=True is not a module"),
        (lambda: dsl.Decoder(10, 8, 1, dsl.MLP(8), embed_norm=3), "Decoder: embed_norm=3 is not a module"),
        (lambda: dsl.Decoder(10, 8, 1, dsl.MLP(8), logit_softcap=0),
         "Decoder: logit_softcap=0 must be a positive number"),
        (lambda: dsl.Decoder(10, 8, 1, dsl.MLP(8), logit_scale=NAN),
         "Decoder: logit_scale=nan must be a finite number"),
        (lambda: dsl.Encoder(10, 8, 1, dsl.MLP(8), embed_scale=INF),
         "Encoder: embed_scale=inf must be a finite number"),
        (lambda: dsl.Block(dsl.MLP(8), residual_scale=NAN), "Block: residual_scale=nan must be a finite number"),
        (lambda: dsl.Encoder(10, 8, 1, dsl.MLP(8), embed_dim=0), "Encoder: embed_dim=0 must be"),
        (lambda: dsl.Encoder(9, 4, 1, dsl.Block(dsl.FourierMixing()), relative=3), ".*relative="),
        (lambda: dsl.MLP(8)(None), "no graph is being built: call modules in"),
    ],
)  # fmt: skip
def test_module_rejects_settings(make: Any, message: str) -> None:
    with pytest.raises(WeftError, match=f"^{message}"):
        make()


@dsl.module
class Narrow:
    def __call__(self, x: Value) -> Value:
        return dsl.linear(x, 7, "out")


@dsl.module
class Bad:
    def __call__(self, x: Value) -> Value:
        return ops.linear(x, dsl.param("w", (3, 3)))


@dsl.module
class Clash:
    def __call__(self, x: Value) -> Value:
        return ops.add(dsl.param("w", (2,)), dsl.param("w", (3,)))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (dsl.Block(dsl.Attention(3)), r"layers.0.attn \(Attention\): heads=3 does not divide the width 8"),
        (
            dsl.Block(dsl.Attention(2, rope=dsl.RoPE(dim=6))),
            r"layers.0.attn \(Attention\): RoPE: dim=6 must be even and at most",
        ),
        (
            dsl.Block(dsl.Attention(2, rope=dsl.RoPE(scaling="longrope", original=9, factors=(1.0,)))),
            r"layers.0.attn \(Attention\): RoPE: factors must have length 2",
        ),
        (dsl.Block(dsl.LinearAttention(3)), r"layers.0.attn \(LinearAttention\): heads=3 does not divide the width 8"),
        (
            dsl.Block(dsl.RelativeAttention(3, 2)),
            r"layers.0.attn \(RelativeAttention\): heads=3 does not divide the width 8",
        ),
        (
            dsl.Block(None, Narrow()),
            r"layers.0 \(Block\): ffn returns f32\[batch, seq, 7\], but the block needs f32.*, 8\]",
        ),
        (dsl.Block(Narrow(), arrangement="parallel"), r"layers.0 \(Block\): attn returns f32\[batch, seq, 7\]"),
        (
            Narrow(),
            r"Decoder: layers.0 maps f32\[batch, seq, 8\] to f32\[batch, seq, 7\], but a layer must keep the type",
        ),
        (dsl.Block(dsl.Attention(2, value_conv=3)), r"layers.0.attn \(Attention\): value_conv reads later tokens"),
        (
            dsl.Block(dsl.Attention(2, mask=dsl.BlockSparse(4))),
            r"layers.0.attn.mask \(BlockSparse\): block-sparse attention reads later tokens",
        ),
        (
            dsl.Block(dsl.Attention(2, bias=dsl.T5Bias(heads=3))),
            r"layers.0.attn \(Attention\): attention: bias .* must broadcast",
        ),
    ],
)
def test_model_rejects_a_layer_with_its_scope(layer: Any, message: str) -> None:
    with pytest.raises(WeftError, match=f"^{message}"):
        dsl.Decoder(10, 8, [layer]).graph()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Bad(), r"Bad: linear: x .* does not have the input width"),
        (Clash(), r"Clash: parameter w \[2\] already exists: use another name for \[3\]"),
    ],
)
def test_ops_and_parameters_reject_shapes(model: Any, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        dsl.trace(model, {"x": X})


def test_modules_reject_symbolic_widths() -> None:
    with pytest.raises(WeftError, match="has no fixed width"):
        dsl.trace(dsl.MLP(8), {"x": X.with_shape(4, sizes.sym("d"))})


COMPARING = [
    {"rope": ROPE},
    {"bias": dsl.ALiBi()},
    {"window": 4},
    {"mask": dsl.Mask(pattern="strided", stride=2)},
    {"mask": dsl.BlockSparse(4)},
    {"value_conv": 3},
]


@pytest.mark.parametrize("settings", COMPARING, ids=str)
def test_cross_attention_rejects_relative_positions(settings: dict[str, Any]) -> None:
    reads, writes = dsl.Block(dsl.Attention(2)), dsl.Block(dsl.Attention(2), cross=dsl.CrossAttention(2, **settings))
    with pytest.raises(
        WeftError,
        match=r"decoder.layers.0.cross \(CrossAttention\): cross-attention does not support bias, rope, window, mask",
    ):
        dsl.EncoderDecoder(dsl.Encoder(10, 8, 1, reads), dsl.Decoder(10, 8, 1, writes)).graph()


def test_block_sparse_attention_rejects_a_position_bias() -> None:
    block = dsl.Block(dsl.Attention(2, mask=dsl.BlockSparse(4)))
    with pytest.raises(
        WeftError, match=r"layers.0.attn \(Attention\): block-sparse attention does not support a position bias"
    ):
        dsl.Encoder(10, 8, 1, block, position_bias=dsl.T5Bias(heads=2)).graph()


def test_global_tokens_need_an_encoder_with_their_table() -> None:
    attn, globals_ = (
        dsl.TransientGlobalAttention(2),
        dsl.TransientGlobals(2, window=4, block=2, buckets=4, max_distance=9),
    )
    with pytest.raises(WeftError, match=r"layers.0.attn \(TransientGlobalAttention\): .* relative=TransientGlobals"):
        dsl.Encoder(10, 8, 1, dsl.Block(attn)).graph()
    with pytest.raises(WeftError, match=r"layers.0.attn \(TransientGlobalAttention\): .* relative=TransientGlobals"):
        dsl.Decoder(10, 8, 1, dsl.Block(attn)).graph()
    with pytest.raises(WeftError, match="TransientGlobals sums over complete sequences"):
        dsl.trace(globals_, {"x": X})
    with pytest.raises(WeftError, match="TransientGlobals: max_distance=2 must exceed half of buckets=4"):
        dsl.TransientGlobals(2, 4, 2, buckets=4, max_distance=2)
    dsl.Encoder(10, 8, 1, dsl.Block(attn), relative=globals_).graph()


def test_shared_embedding_rejects_two_widths() -> None:
    reads, writes = dsl.Block(dsl.Attention(2)), dsl.Block(dsl.Attention(2), cross=dsl.CrossAttention(2))
    model = dsl.EncoderDecoder(dsl.Encoder(10, 8, 1, reads, embed_dim=4), dsl.Decoder(10, 8, 1, writes))
    with pytest.raises(
        WeftError, match=r"encoder \(Encoder\): embed_dim=4 must be 8, the width of the shared embedding"
    ):
        model.graph()


def test_sinusoidal_positions_reject_an_odd_width() -> None:
    with pytest.raises(WeftError, match=r"positions .*need an even width, not 7"):
        dsl.Decoder(10, 7, 1, dsl.MLP(8), positions=dsl.Sinusoidal(9)).graph()


@dsl.module
class Free:
    count: int

    def __call__(self, x: Value) -> Value:
        return x


def test_fields_of_users_modules_are_their_own() -> None:
    assert Free(0).count == 0 and Free(-1).count == -1
