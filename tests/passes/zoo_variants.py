"""Tiny models of odd sizes in the language: each kind of attention, feed-forward, positions and block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft import (
    MLA,
    MLP,
    MLSTM,
    RGLRU,
    SLSTM,
    ALiBi,
    Attention,
    Block,
    BlockSparse,
    CrossAttention,
    Decoder,
    Encoder,
    EncoderDecoder,
    GatedDeltaNet,
    GatedMLP,
    LayerNorm,
    LearnedPositions,
    LightningAttention,
    LightningIndex,
    LinearAttention,
    Mamba,
    Mamba2,
    MemoryBlock,
    MixtureOfDepths,
    MoE,
    NormedResidual,
    ParallelHybrid,
    RelativeAttention,
    Repeat,
    RMSNorm,
    RoPE,
    Router,
    RWKV6TimeMix,
    RWKV7TimeMix,
    RWKVChannelMix,
    RWKVTimeMix,
    ShortConv,
    Sinusoidal,
    State,
    T5Bias,
    linear,
    module,
    named,
    param,
    scan,
)
from weft.frontends.dsl.blocks import ARRANGEMENTS
from weft.ir import Value, ops
from weft.ir.schema.visible_keys import PATTERNS

VOCAB, DIM, HIDDEN, LENGTH = 37, 30, 23, 19
ROPE, FEED = RoPE(), GatedMLP(HIDDEN)
Model = Decoder | Encoder | EncoderDecoder


@module
class HandWritten:
    """A gated feed-forward of elementwise ops, as someone writes it who knows of no `glu`."""

    hidden: int

    def __call__(self, x: Value) -> Value:
        gated = ops.mul(ops.swish(linear(x, self.hidden, "w1")), linear(x, self.hidden, "w3"))
        return linear(gated, x.width, "w2")


@module
class Memory:
    """A recurrence of the user's own: an outer product a head, with a gate, and the sum of keys beside it."""

    heads: int

    def __call__(self, x: Value) -> Value:
        width = x.width // self.heads
        q, k, v = (ops.reshape(linear(x, x.width, n), shape=(*x.shape[:2], self.heads, width)) for n in "qkv")

        def step(states: tuple[Value, Value], q: Value, k: Value, v: Value, a: Value) -> tuple[Any, Value]:
            s, n = states
            s = ops.unsqueeze(a, axes=(2, 3)) * s + ops.unsqueeze(k, axes=(3,)) * ops.unsqueeze(v, axes=(2,))
            n = ops.unsqueeze(a, axes=(2,)) * n + k
            shared = 1 + abs(ops.sum(q * n, axes=(2,), keepdims=True))
            return (s, n), ops.squeeze(ops.unsqueeze(q, axes=(2,)) @ s, axes=(2,)) / shared

        gate = ops.sigmoid(linear(x, self.heads, "a"))
        y = scan(step, q, k, v, gate, state={"s": (self.heads, width, width), "n": (self.heads, width)})
        return linear(ops.reshape(y, shape=x.shape), x.width, "o")


@module
class Elman:
    """A recurrence of the user's own that is not affine, with a matrix, and a state that begins with −5."""

    def __call__(self, x: Value) -> Value:
        def step(states: tuple[Value, Value], x: Value) -> tuple[Any, Value]:
            h, most = states
            h = ops.tanh(x + linear(h, h.width, "recurrent"))
            return (h, ops.maximum(most, h)), h * most

        y = scan(step, linear(x, 11, "in"), state={"h": (11,), "most": State((11,), -5.0)})
        return linear(y, x.width, "o")


@module
class SquaredReLU:
    """max(0, x W)² W' (So 2021)."""

    hidden: int

    def __call__(self, x: Value) -> Value:
        return linear(ops.square(ops.relu(linear(x, self.hidden, "up"))), x.width, "down")


@module
class Adapted:
    """A feed-forward whose up has a low-rank adapter (LoRA)."""

    hidden: int

    def __call__(self, x: Value) -> Value:
        low = linear(linear(x, 2, "a"), self.hidden, "b")
        adapted = ops.add(linear(x, self.hidden, "up"), ops.affine(low, by=2.0))
        return linear(ops.gelu(adapted), x.width, "down")


@module
class SideBySide:
    """The sum of two feed-forwards."""

    first: GatedMLP
    second: GatedMLP

    def __call__(self, x: Value) -> Value:
        return ops.add(self.first(x), self.second(x))


@module
class HandWrittenRouter:
    """Experts behind a router of plain ops: the softmax of the k largest logits."""

    experts: int
    hidden: int
    k: int

    def __call__(self, x: Value) -> Value:
        best, indices = ops.top_k.emit(linear(x, self.experts, "router"), k=self.k)
        weights = ops.unsqueeze(ops.softmax(best), axes=(3,))
        combine = ops.sum(ops.mul(weights, ops.one_hot(indices, depth=self.experts)), axes=(2,))
        shape = self.experts, self.hidden, x.width
        return ops.moe(x, combine, param("up", shape), param("down", (shape[0], shape[2], shape[1])), active=self.k)


@module
class TwiceNormed:
    """A feed-forward behind two RMSNorms in a row, of which neither can go: eps is not zero."""

    hidden: int

    def __call__(self, x: Value) -> Value:
        return FEED(named(RMSNorm(1e-2), "again")(x))


@module
class NormedWithin:
    """A feed-forward whose hidden numbers are normed without an ε, so that the norm before it makes no difference."""

    hidden: int

    def __call__(self, x: Value) -> Value:
        y = linear(ops.rms_norm(x, name="idle"), self.hidden, "up")
        return linear(ops.rms_norm(y, eps=0.0, name="norm"), x.width, "down")


def decoder(mixer: Any, ffn: Any = FEED, layers: int = 2, **block: Any) -> Decoder:
    return Decoder(VOCAB, DIM, layers, Block(mixer, ffn, **block), context=LENGTH)


def attends(heads: int = 6, kv_heads: int | None = 2, **settings: Any) -> Decoder:
    """With heads of 4 numbers, and rope unless `settings` say otherwise."""
    return decoder(Attention(heads, kv_heads, 4, **{"rope": ROPE, **settings}))


def feeds(ffn: Any, **settings: Any) -> Decoder:
    return decoder(Attention(6, 2, 4, ROPE), ffn, **settings)


def encoder(mixer: Any, **settings: Any) -> Encoder:
    block = {"norm": LayerNorm(), "arrangement": "post"} | settings
    return Encoder(VOCAB, DIM, 2, Block(mixer, MLP(HIDDEN), **block), context=LENGTH)


INDEX = LightningIndex(2, 6, top_k=3, rope=RoPE(dim=4, interleaved=True))


def choosing() -> list[Block]:
    """Blocks of latent attention of which the first chooses keys, for the others too."""
    ways: list[dict[str, Any]] = [{"index": INDEX, "keep_index": "index"}, {"share_index": "index"}]
    return [Block(MLA(3, 9, 5, 4, 7, ROPE, q_rank=11, **way), FEED) for way in ways]


def shared(readers: int, **settings: Any) -> list[Block]:
    """A layer that keeps its keys and values, and `readers` that attend to them."""
    ways = [{"keep_kv": "memory"}, *[{"share_kv": "memory"}] * readers]
    return [Block(Attention(6, 2, 4, **way, **settings), FEED) for way in ways]


BIASED = {"qkv_bias": True, "out_bias": True}
OLD = Block(Attention(3, **BIASED), MLP(HIDDEN, "gelu_tanh", True), LayerNorm())
LOCAL, WIDE = (Block(Attention(6, 2, 4, ROPE, window=w), FEED) for w in (3, None))
CROSSED = Block(Attention(3, **BIASED), FEED, RMSNorm(), cross=CrossAttention(3, **BIASED))

VARIANTS: dict[str, Model] = {
    # heads
    "multi-head": attends(3, None),
    "multi-query": attends(6, 1),
    "grouped": attends(),
    "biases": replace(decoder(Attention(6, 2, 4, ROPE, **BIASED), GatedMLP(HIDDEN, bias=True)), head_bias=True),
    "clipped": attends(clip=0.7),
    "gate": attends(gate=True, **BIASED),
    "norms of q and k": attends(qk_norm=RMSNorm()),
    "norms of q and k, full": attends(qk_norm=RMSNorm(), qk_norm_full=True),
    "norms of q and k, each": attends(qk_norm=LayerNorm(), qk_norm_each=True),
    "norms of q and k, no weights": attends(qk_norm=RMSNorm(weight=False), scale=0.3),
    "norms of q and k, no positions": attends(qk_norm=RMSNorm(), rope=None, **BIASED),
    "soft cap": attends(softcap=2.0, **BIASED),
    "sinks": attends(sinks=True, window=4, **BIASED),
    "sinks, no positions": attends(sinks=True, rope=None, **BIASED),
    "scale": attends(scale=0.7, **BIASED),
    "latent": decoder(MLA(3, 9, 5, 4, 7, RoPE(interleaved=True))),
    "latent, expanded": decoder(MLA(3, 9, 5, 4, 7, ROPE, absorbed=False)),
    "latent queries": decoder(MLA(3, 9, 5, 4, 7, ROPE, q_rank=11)),
    "latent, keys chosen": decoder(MLA(3, 9, 5, 4, 7, ROPE, index=INDEX)),
    "latent, choice shared": Decoder(VOCAB, DIM, choosing(), context=LENGTH),
    # positions
    "no positions": attends(rope=None),
    "no positions, biases": attends(rope=None, **BIASED),
    "learned": replace(attends(3, None, rope=None, **BIASED), positions=LearnedPositions(LENGTH)),
    "sinusoidal": replace(attends(rope=None), positions=Sinusoidal(LENGTH)),
    "ALiBi": attends(rope=None, bias=ALiBi()),
    "ALiBi, biases": attends(rope=None, bias=ALiBi(), window=4, **BIASED),
    "T5 bias, shared": replace(attends(rope=None), position_bias=T5Bias(8, 20, heads=6)),
    "T5 bias, per layer": attends(rope=None, bias=T5Bias(8, 20)),
    "rope, interleaved": attends(rope=RoPE(interleaved=True), **BIASED),
    "rope, partial": decoder(Attention(3, 1, 7, RoPE(dim=4), **BIASED)),
    "rope, partial and interleaved": decoder(Attention(3, 1, 6, RoPE(dim=4, interleaved=True))),
    "rope, yarn": attends(rope=RoPE(scaling="yarn", factor=4, original=8, amplitude=1.1)),
    "rope, llama3": attends(rope=RoPE(scaling="llama3", factor=4, original=8)),
    "rope in every other layer": Decoder(VOCAB, DIM, [LOCAL, Block(Attention(6, 2, 4), FEED)] * 2, context=LENGTH),
    "window": attends(window=3),
    "local and global": Decoder(VOCAB, DIM, [LOCAL, LOCAL, WIDE], context=LENGTH),
    **{name: attends(pattern=name, stride=3) for name in PATTERNS[1:]},
    "dilated window": attends(window=4, pattern="dilated", stride=2),
    "shared keys": Decoder(VOCAB, DIM, shared(2, rope=ROPE), context=LENGTH),
    "shared keys, by turns": Decoder(
        VOCAB, DIM, shared(1, qk_norm=RMSNorm(), bias=ALiBi(), sinks=True, **BIASED) * 2, context=LENGTH
    ),
    "shared keys in a window": Decoder(VOCAB, DIM, shared(1, rope=ROPE, window=3), context=LENGTH),
    "relative": decoder(RelativeAttention(3, 2, bias=True)),
    # blocks
    **{name.replace("_", " "): feeds(FEED, arrangement=name) for name in ARRANGEMENTS[1:]},
    "parallel, layer norm": feeds(MLP(HIDDEN, bias=True), arrangement="parallel", norm=LayerNorm()),
    "layer norm": decoder(Attention(6, 2, 4, ROPE, **BIASED), GatedMLP(HIDDEN, bias=True), norm=LayerNorm()),
    "layer norm without bias": feeds(FEED, norm=LayerNorm(bias=False)),
    "norms without weights": feeds(FEED, norm=RMSNorm(weight=False)),
    "two norms in a row": feeds(TwiceNormed(HIDDEN)),
    "norm within": feeds(NormedWithin(HIDDEN)),
    "residual scale": feeds(FEED, residual_scale=0.4),
    "attention alone": feeds(None),
    "repeated": Decoder(VOCAB, DIM, 2, Repeat(LOCAL, 2), context=LENGTH),
    # both ends
    "tied": replace(attends(), tie_embeddings=True),
    "tied, scaled": replace(attends(), tie_embeddings=True, embed_scale=5.0, logit_scale=0.3, logit_softcap=9.0),
    "scaled": replace(attends(), embed_scale=5.0, logit_scale=0.3),
    "no final norm": replace(attends(), final_norm=False),
    "embedding norm": replace(attends(rope=None, bias=ALiBi()), embed_norm=LayerNorm()),
    "dropout": Decoder(VOCAB, DIM, 2, Block(Attention(6, 2, 4, ROPE), FEED, dropout=0.5), context=LENGTH),
    "depths by rank": Decoder(VOCAB, DIM, [WIDE, MixtureOfDepths(WIDE, 2, aux_loss=0.1)], context=LENGTH),
    "depths by sign": Decoder(VOCAB, DIM, [WIDE, MixtureOfDepths(WIDE)], context=LENGTH),
    "gpt2": Decoder(VOCAB, DIM, 2, OLD, tie_embeddings=True, positions=LearnedPositions(LENGTH)),
    # feed-forwards
    "hand-written gate": feeds(HandWritten(HIDDEN)),
    "low-rank adapter": feeds(Adapted(HIDDEN)),
    "squared ReLU": feeds(SquaredReLU(HIDDEN)),
    "ReLU, biases": feeds(MLP(HIDDEN, "relu", bias=True)),
    "bilinear": feeds(GatedMLP(HIDDEN, "identity")),
    "clamped gate": feeds(GatedMLP(HIDDEN, limit=1.5)),
    "experts": feeds(MoE(4, 7, 2)),
    "experts, biases": feeds(MoE(4, 7, 2, "swish(1.702)", bias=True, limit=7.0, shift=1.0, router=Router(bias=True))),
    "experts on a latent": feeds(MoE(4, 7, 2, "relu2", gated=False, shared=MLP(5), latent=11)),
    "experts, shared": feeds(MoE(4, 7, 2, shared=GatedMLP(5), router=Router(renormalize=False, scale=1.5))),
    "experts, shared and gated": feeds(MoE(4, 7, 2, shared=GatedMLP(5), shared_gate=True)),
    "experts, two shared": feeds(MoE(4, 7, 2, shared=SideBySide(GatedMLP(5), GatedMLP(3)))),
    "experts, hand-written router": feeds(HandWrittenRouter(4, 7, 2)),
    "experts in groups": feeds(
        MoE(8, 7, 3, router=Router(scoring="sigmoid", correction=True, groups=4, top_groups=2, scale=2.5))
    ),
    "experts in a hierarchy": feeds(MoE(8, 7, 2, router=Router(choice="hierarchical", groups=4, top_groups=2))),
    "experts that choose": feeds(MoE(4, 7, 2, router=Router(choice="expert"))),
    "experts of limited capacity": feeds(
        MoE(4, 7, 1, "relu", gated=False, router=Router(renormalize=False, capacity=2))
    ),
    "experts with noise and a loss": feeds(MoE(4, 7, 2, router=Router(noisy=True, aux_loss=0.01))),
    # recurrences
    "linear attention": decoder(LinearAttention(3, bias=True)),
    "linear attention, rope": decoder(LinearAttention(3, ROPE)),
    "Mamba": decoder(Mamba(21, 5), None),
    "Mamba, norms": decoder(Mamba(21, 5, bias=True, norms=RMSNorm())),
    "Mamba-2": decoder(Mamba2(21, 3, 5), None),
    "Mamba-2 in groups": decoder(Mamba2(24, 4, 5, groups=2, norm_groups=2)),
    "Mamba-2, norm first": decoder(Mamba2(24, 4, 5, norm_groups=2, norm_first=True, least_step=0.5)),
    "short convolution": decoder(ShortConv(3, bias=True)),
    "attention beside Mamba-2": decoder(ParallelHybrid(Attention(3, rope=ROPE), Mamba2(21, 3, 5, norm=None))),
    "scan": Decoder(VOCAB, DIM, [Block(Memory(3), FEED), Block(Elman(), FEED)], context=LENGTH),
    "delta rule": decoder(GatedDeltaNet(4, 3, 5, groups=2, negative=True)),
    "delta rule, a gate per key": decoder(GatedDeltaNet(3, 5, gate="sigmoid", per_key=True, rank=7)),
    "lightning attention": Decoder(VOCAB, DIM, 2, NormedResidual(LightningAttention(3), FEED, attn_scales=(0.5, 2.0))),
    "RG-LRU": decoder(RGLRU(3, 21)),
    "mLSTM": decoder(MLSTM(3, 12, 21)),
    "memory block": Decoder(
        VOCAB,
        DIM,
        [MemoryBlock(Mamba2(21, 3, 5), Attention(3, rope=ROPE, out_dim=DIM), FEED), MemoryBlock(Mamba(21, 5))],
    ),
    "RWKV-6": decoder(RWKV6TimeMix(3, 4, 5)),
    "RWKV-7": Decoder(
        *(VOCAB, DIM, [Block(RWKV7TimeMix(3, 4, 5, 6, 3, **{by: "v"}), FEED) for by in ("keep_values", "mix_values")])
    ),
    "sLSTM": decoder(SLSTM(3, conv=3)),
    "RWKV": Decoder(VOCAB, DIM, 2, Block(RWKVTimeMix(21), RWKVChannelMix(HIDDEN), LayerNorm()), context=LENGTH),
    "hybrid": Decoder(VOCAB, DIM, [Block(Mamba(21, 5), FEED), WIDE, Block(Mamba2(21, 3, 5))], context=LENGTH),
    # encoders
    "encoder": encoder(Attention(3, **BIASED)),
    "encoder, pre-norm": replace(encoder(Attention(3, rope=ROPE), arrangement="pre"), final_norm=LayerNorm()),
    "encoder, ALiBi": encoder(Attention(3, bias=ALiBi()), norm=RMSNorm(), arrangement="pre"),
    "encoder, T5 bias": encoder(Attention(3, bias=T5Bias(8, 20))),
    "encoder, blocks": encoder(Attention(6, 2, 4, ROPE, mask=BlockSparse(3, first_weight=2, dense=4), **BIASED)),
    "encoder, narrow embedding": replace(encoder(Attention(3)), embed_dim=11, token_types=2, pooler=True),
    "encoder-decoder": EncoderDecoder(
        Encoder(VOCAB, DIM, 1, Block(Attention(3), FEED, RMSNorm()), Sinusoidal(LENGTH), final_norm=RMSNorm()),
        Decoder(VOCAB, DIM, 2, CROSSED, tie_embeddings=True, positions=LearnedPositions(LENGTH)),
    ),
}
