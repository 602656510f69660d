"""Short convolutions, lightning attention, and blocks that combine attention with state spaces."""

from __future__ import annotations

import numpy as np
import pytest

from weft.frontends import dsl
from weft.ir import Value, WeftError, ops

from .formulas.attention import attention
from .formulas.elementary import Array, Weights, in_scope, linear, rms_norm
from .formulas.feed_forward import feed_forward
from .formulas.recurrences import lightning_attention, mamba2, short_conv
from .harness import RUNNERS, Row, check, close, randomize, run, trace_checked


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("width", "bias"), [(2, False), (3, True), (9, False)])
def test_short_convolution(width: int, bias: bool, runner: str) -> None:
    module = dsl.ShortConv(width, bias)
    check(Row(module, short_conv(module)), runner)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("size", [None, 6])
def test_lightning_attention(size: int | None, runner: str) -> None:
    module = dsl.LightningAttention(4, size, decay=0.7)
    check(Row(module, lightning_attention(module)), runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_parallel_hybrid_adds_attention_and_state_space(runner: str) -> None:
    attn, ssm = dsl.Attention(2), dsl.Mamba2(12, 4, state=5)

    def formula(x: Array, w: Weights) -> Array:
        return attention(attn)(x, in_scope(w, "attention.")) + mamba2(ssm)(x, in_scope(w, "ssm."))

    check(Row(dsl.ParallelHybrid(attn, ssm), formula), runner)


def test_parallel_hybrid_rejects_different_widths() -> None:
    @dsl.module
    class Half:
        def __call__(self, x: Value) -> Value:
            return ops.slice(x, axis=2, start=0, stop=x.width // 2)

    with pytest.raises(WeftError, match=r"ParallelHybrid.*ssm returns .* and attention"):
        trace_checked(dsl.ParallelHybrid(dsl.Attention(2, rope=dsl.RoPE()), Half()))


@pytest.mark.parametrize("runner", RUNNERS)
def test_normed_residual(runner: str) -> None:
    attn, ffn, scales = dsl.MLP(5, "relu"), dsl.MLP(7, "relu"), {"attn": (0.5, 2.0), "ffn": (3.0, 1.0)}

    def formula(x: Array, w: Weights) -> Array:
        for name, f in (("attn", attn), ("ffn", ffn)):
            alpha, beta = scales[name]
            x = rms_norm(x, w[f"{name}_norm.weight"], 1e-2)
            x = alpha * x + beta * feed_forward(f, f"{name}.")(x, w)
        return x

    check(Row(dsl.NormedResidual(attn, ffn, dsl.RMSNorm(1e-2), scales["attn"], scales["ffn"]), formula), runner)


@dsl.module
class MLPBlock:
    def __call__(self, x: Value) -> Value:
        return ops.add(x, dsl.MLP(5, "relu")(x))


@pytest.mark.parametrize("runner", RUNNERS)
def test_memory_block_reads_the_embeddings(runner: str) -> None:
    """The second layer's transformer block reads the output of the first and the embeddings of the model (Zamba2)."""
    mamba, attn, ffn = dsl.MLP(9, "relu"), dsl.Attention(2, out_dim=16), dsl.MLP(7, "relu")
    graph = dsl.Decoder(11, 16, [MLPBlock(), dsl.MemoryBlock(mamba, attn, ffn, dsl.RMSNorm(1e-2))]).graph()
    rng = np.random.default_rng(0)
    w, ids = randomize(graph, rng), rng.integers(0, 11, (2, 6))

    def logits(e: Array) -> Array:
        own = in_scope(w, "layers.1.")
        x = e + feed_forward(dsl.MLP(5, "relu"), "layers.0.mlp.")(e, w)
        y = rms_norm(np.concatenate([x, e], 1), own["attn_norm.weight"], 1e-2)
        y = rms_norm(attention(attn)(y, in_scope(own, "attn.")), own["ffn_norm.weight"], 1e-2)
        y = linear(feed_forward(ffn, "ffn.")(y, own), own, "link")
        x = x + feed_forward(mamba, "mamba.")(rms_norm(x + y, own["norm.weight"], 1e-2), own)
        return linear(rms_norm(x, w["final_norm.weight"], 1e-2), w, "lm_head")

    found = run(graph, {"input_ids": ids}, runner)["logits"]
    close(found, np.stack([logits(w["embed.weight"][row]) for row in ids]), runner == "interpreter")


def test_memory_block_rejects_use_outside_a_decoder() -> None:
    with pytest.raises(WeftError, match="the block must be in a Decoder"):
        trace_checked(dsl.MemoryBlock(dsl.MLP(9), dsl.Attention(2, out_dim=16), dsl.MLP(7)))
