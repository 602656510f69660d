"""Kept quantized blocks: the same numbers as the widened weights, by kernels that read the blocks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type

import weft
from weft.ir import WeftError
from weft.ir.types.block_layouts import LAYOUTS

from ..quantized_llama import LAYERS, VOCAB, products, write

STORED = f"it is stored as f16, not as {', '.join(LAYOUTS)} or integers in groups"


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0], ids=lambda k: k.name)
def test_kept_blocks_give_the_logits_of_dequantized_weights(kind: Type, prepack: bool, tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": kind})
    weft.compile(source, tmp_path / "wide", passes="default,-last-token-logits")
    weft.compile(source, tmp_path / "kept", passes="default,-last-token-logits", keep_blocks="all", prepack=prepack)
    assert products(tmp_path / "wide").keys() == {"FusedMatMul"}
    linears = 5 * LAYERS + 1  # packed q, k, v; o; gate; up; down; the tied head
    assert products(tmp_path / "kept") == Counter(
        {"MatMulNBits": linears} | ({"FusedMatMul": linears} if kind == Type.Q4_1 else {})
    )
    wide, kept = weft.load(tmp_path / "wide"), weft.load(tmp_path / "kept")
    for length in (1, 2, 31):
        ids = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
        want = wide.logits(ids)
        np.testing.assert_allclose(kept.logits(ids), want, rtol=0, atol=3e-5 * np.abs(want).max())


def test_blocks_without_kernel_are_dequantized_with_a_reason(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_0, "attn_v": Type.Q8_0, "ffn_down": Type.F16})
    report = weft.compile(source, tmp_path / "kept", keep_blocks="all")
    told = "\n".join(report.trace)
    assert "MatMulNBits refused: its rows are stored in different ways (q4_0, q8_0)" in told
    assert f"MatMulNBits refused: {STORED}" in told
    assert products(tmp_path / "kept") == Counter({"MatMulNBits": 3 * LAYERS + 1, "FusedMatMul": 2 * LAYERS})


def test_keep_blocks_refuses_a_source_without_blocks(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.F16})
    with pytest.raises(WeftError, match=f"--keep-blocks all has no effect.*: no weights keep their blocks: {STORED}"):
        weft.compile(source, tmp_path / "out", keep_blocks="all")
    drawn = weft.Decoder(50, 16, 1, weft.Block(weft.Attention(2), weft.MLP(8), weft.RMSNorm()), context=8)
    with pytest.raises(WeftError, match=r"--keep-blocks head has no effect.*: it is not read from a file"):
        weft.compile(drawn, tmp_path / "random", keep_blocks="head")


def test_other_targets_keep_no_blocks(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_0})
    with pytest.raises(
        WeftError, match="--keep-blocks is an option of the targets ort-cpu and torch only, not of onnx"
    ):
        weft.compile(source, tmp_path / "out", target="onnx", keep_blocks="all")


def test_keep_blocks_head_keeps_only_the_output_head(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_1, "token_embd": Type.Q8_0})
    weft.compile(source, tmp_path / "kept", keep_blocks="head")
    assert products(tmp_path / "kept") == Counter({"MatMulNBits": 1, "FusedMatMul": 5 * LAYERS})
    ids = list(range(20))
    weft.compile(source, tmp_path / "wide")
    want = weft.load(tmp_path / "wide").logits(ids)
    np.testing.assert_allclose(weft.load(tmp_path / "kept").logits(ids), want, rtol=0, atol=3e-5 * np.abs(want).max())


def test_unknown_choices_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_0})
    with pytest.raises(WeftError, match="--keep-blocks 'some' is unknown: choose head or all"):
        weft.compile(source, tmp_path / "out", keep_blocks="some")
