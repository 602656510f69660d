"""weft inspect --parallel: bytes of devices and of collectives by hand, and the splits that it refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from click.testing import CliRunner

from weft import MLP, Attention, Block, Decoder, GatedMLP, LearnedPositions, Mamba, MoE, RMSNorm, RoPE
from weft.backends.torch.transformers.scale.estimate import ParallelCosts, compute_bubble
from weft.frontends import load_source
from weft.frontends.app.api.inspect.parallel import estimate_parallel
from weft.frontends.app.cli import cli
from weft.ir.errors import WeftError

DIM, HEADS, KV, HEAD, FFN, VOCAB, LAYERS = 32, 8, 4, 4, 48, 60, 5
PLAIN = Block(Attention(HEADS, KV, head_dim=HEAD, rope=RoPE()), GatedMLP(FFN), RMSNorm())
LOCAL = Block(Attention(HEADS, KV, head_dim=HEAD, rope=RoPE(), window=3), GatedMLP(FFN), RMSNorm())
SPARSE = Block(Attention(HEADS, KV, head_dim=HEAD, rope=RoPE()), MoE(8, 16, 2), RMSNorm())


def costs(split: str, *blocks: Block, tokens: int = 10, **more: Any) -> ParallelCosts:
    model = Decoder(VOCAB, DIM, [*blocks] or [PLAIN] * LAYERS, **more)
    return estimate_parallel(load_source(model), split, tokens, "f16")


def test_linear_layers_are_split_across_devices() -> None:
    """Weights without norms are divided by 4; a token is summed behind the embedding and twice in each layer."""
    found = costs("tp=4")
    layer = DIM * (HEADS + 2 * KV) * HEAD + HEADS * HEAD * DIM + 3 * DIM * FFN
    (stage,) = found.stages
    assert stage.weights == 2 * ((LAYERS * layer + 2 * VOCAB * DIM) // 4 + (2 * LAYERS + 1) * DIM)
    assert stage.cache_per_token == 2 * LAYERS * 2 * (KV // 4) * HEAD
    assert stage.cache == 10 * stage.cache_per_token
    reduced = [c for c in found.collectives if c.kind == "all-reduce"]
    assert [c.size for c in reduced] == [2 * DIM] * (2 * LAYERS + 1)
    assert {c.sent_bytes for c in reduced} == {2 * 2 * DIM * 3 / 4}
    assert [(c.kind, c.size, c.sent_bytes) for c in found.collectives if c not in reduced] == [
        ("all-gather", 2 * VOCAB, 2 * VOCAB * 3 / 4)
    ]


def test_layers_are_stages() -> None:
    """Of five layers three, then two (from transformers 5.24 on); a tied table is on the first stage and the last."""
    alone, found = costs("tp=1", tie_embeddings=True), costs("pp=2", tie_embeddings=True)
    first, last = found.stages
    assert (first.layers, last.layers) == ((0, 3), (3, 5))
    assert first.weights + last.weights == alone.stages[0].weights + 2 * VOCAB * DIM
    assert first.cache + last.cache == alone.stages[0].cache
    assert first.flops + last.flops == alone.stages[0].flops
    assert [(c.kind, c.size) for c in found.collectives] == [("send", 2 * DIM), ("broadcast", 2 * VOCAB)]
    assert found.bubble == 1 / 2
    assert costs("pp=2,microbatches=8").bubble > 1 / 9  # that of equal stages


def test_cache_of_a_window_is_bounded() -> None:
    assert costs("tp=2", LOCAL, PLAIN).stages[0].cache == 2 * 2 * (KV // 2) * HEAD * (3 + 10)


def test_experts_are_distributed_whole() -> None:
    """Devices with the same tokens sum what their experts make; others send each token to two experts and back."""
    whole, shared, apart = (costs(split, SPARSE) for split in ("tp=1", "tp=2,ep=2", "ep=2"))
    experts = 2 * 8 * 3 * DIM * 16
    assert whole.stages[0].weights - apart.stages[0].weights == experts // 2
    assert [c.size for c in shared.collectives if c.group == "ep"] == [2 * DIM]
    assert [(c.kind, c.size) for c in apart.collectives] == [("all-to-all", 2 * 2 * DIM)] * 2
    assert (shared.split.devices, apart.split.devices) == (2, 2)
    gathered = [(c.kind, c.size) for c in costs("tp=2,ep=4", SPARSE).collectives if c.path.endswith("experts")]
    assert gathered == [("all-to-all", 2 * DIM), ("all-to-all", 2 * DIM), ("all-gather", 2 * DIM)]


@pytest.mark.parametrize(
    ("work", "microbatches", "share"), [([5, 5], 1, 1 / 2), ([3, 3, 3, 3], 4, 3 / 7), ([1, 3], 2, 1 - 8 / 14)]
)
def test_pipeline_bubbles(work: list[int], microbatches: int, share: float) -> None:
    assert abs(compute_bubble(work, microbatches) - share) < 1e-12


@pytest.mark.parametrize(
    ("split", "block", "message"),
    [
        ("tp=3", PLAIN, "tp=3 cannot share the 4 key/value heads of layers.*.attn in decoder evenly; tp must divide 4"),
        ("ep=2", PLAIN, "ep=2 divides experts, but decoder has none: leave ep out"),
        ("ep=3", SPARSE, "ep=3 cannot share the 8 experts of layers.*.ffn.experts in decoder evenly; ep must divide 8"),
        ("tp=4,ep=2", SPARSE, "ep=2 is not a multiple of tp=4: choose ep=4 or a multiple of it"),
        ("pp=3", PLAIN, "pp=3 is more than the 2 layers of decoder: each stage needs one"),
        ("tp=2", Block(Mamba(32, state=4)), "tp=2 cannot divide any part of decoder: it has no attention"),
        ("tp=5", Block(Attention(5, head_dim=4, rope=RoPE()), MLP(24)), "cannot share the 24 hidden units of layers"),
        ("dp=2", PLAIN, "--parallel 'dp' is unknown: choose among tp, ep, pp, microbatches"),
        ("tp=two", PLAIN, "--parallel 'tp=two': tp takes a whole number from 1"),
        ("tp=2,tp=2", PLAIN, "--parallel gives tp twice"),
    ],
)
def test_indivisible_splits_are_refused(split: str, block: Block, message: str) -> None:
    with pytest.raises(WeftError, match=re.escape(message)) as raised:
        costs(split, block, block)
    assert "\n" not in str(raised.value)


def test_positions_beside_the_embedding_are_one_stage() -> None:
    with pytest.raises(WeftError, match="decoder has one pipeline stage, because positions computes"):
        costs("pp=2", *[Block(Attention(4), MLP(24))] * 2, positions=LearnedPositions(20))


def test_tables_and_json() -> None:
    told = CliRunner().invoke(cli, ["inspect", "mixtral-8x7b", "--parallel", "tp=8,ep=8,pp=2", "--dtype", "bf16"])
    lines = [" ".join(line.split()) for line in told.stdout.splitlines()]
    assert any(line.startswith("parallel: tp=8, ep=8, pp=2: 16 devices, 512 tokens in bf16; each") for line in lines)
    assert "send 2 pp × 1 8.0 KiB 8.0 KiB 8.0 KiB hidden states" in lines
    told = CliRunner().invoke(cli, ["inspect", "mixtral-8x7b", "--parallel", "tp=8,ep=8,pp=2", "--json"])
    document = json.loads(told.stdout)["parallel"]
    assert document["split"] == {"tp": 8, "ep": 8, "pp": 2, "microbatches": 1, "devices": 16}
    assert {c["kind"] for c in document["collectives"]} == {"all-reduce", "all-gather", "send", "broadcast"}
    refused = CliRunner().invoke(cli, ["inspect", "t5-base", "--parallel", "tp=2"])
    assert refused.exit_code == 2 and "--parallel needs a decoder or encoder" in refused.output
