"""Kept quantized blocks: the same numbers as the widened weights, by kernels that read the blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import quantize

import weft
from weft.ir import WeftError
from weft.ir.types.block_layouts import LAYOUTS

STORED = f"it is stored as f16, not as {', '.join(LAYOUTS)} or integers in groups"
DIM, FFN, VOCAB, HEADS, KV_HEADS, LAYERS = 64, 96, 160, 4, 2, 2


def write(
    path: Path,
    kinds: Mapping[str, Type],
    blocks: Mapping[str, np.ndarray] = MappingProxyType({}),
    *,
    dim: int = DIM,
    ffn: int = FFN,
    vocab: int = VOCAB,
    std: float = 0.3,
    store: Callable[[np.ndarray, Type], np.ndarray] = quantize,
) -> Path:
    """A tiny llama whose tensors are stored as `kinds` says, by the last part of their name ("" for the others); some
    have other `blocks` than what `store` makes of numbers."""
    rng = np.random.default_rng(3)
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(vocab)
    writer.add_embedding_length(dim)
    writer.add_feed_forward_length(ffn)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    kv = dim // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, dim), "output_norm": (dim,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{n}": (dim,) for n in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.attn_q": (dim, dim), f"blk.{i}.attn_k": (kv, dim), f"blk.{i}.attn_v": (kv, dim)}
        shapes |= {f"blk.{i}.attn_output": (dim, dim), f"blk.{i}.ffn_gate": (ffn, dim)}
        shapes |= {f"blk.{i}.ffn_up": (ffn, dim), f"blk.{i}.ffn_down": (dim, ffn)}
    for name, shape in shapes.items():
        w = rng.standard_normal(shape).astype(np.float32) * np.float32(std if len(shape) == 2 else 1)
        kind = kinds.get(name.rsplit(".", 1)[-1], kinds[""]) if len(shape) == 2 else Type.F32
        stored = blocks.get(f"{name}.weight", w if kind == Type.F32 else store(w, kind))
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def products(folder: Path) -> Counter[str]:
    nodes = onnx.load(folder / "model.onnx", load_external_data=False).graph.node
    return Counter(n.op_type for n in nodes if "MatMul" in n.op_type)


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0], ids=lambda k: k.name)
def test_kept_blocks_compute_what_widened_weights_do(kind: Type, prepack: bool, tmp_path: Path) -> None:
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


def test_what_no_kernel_takes_is_widened_and_told(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_0, "attn_v": Type.Q8_0, "ffn_down": Type.F16})
    report = weft.compile(source, tmp_path / "kept", keep_blocks="all")
    told = "\n".join(report.trace)
    assert "MatMulNBits refused: its rows are stored in different ways (q4_0, q8_0)" in told
    assert f"MatMulNBits refused: {STORED}" in told
    assert products(tmp_path / "kept") == Counter({"MatMulNBits": 3 * LAYERS + 1, "FusedMatMul": 2 * LAYERS})


def test_a_source_without_blocks_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.F16})
    with pytest.raises(WeftError, match=f"--keep-blocks all has no effect.*: no weights keep their blocks: {STORED}"):
        weft.compile(source, tmp_path / "out", keep_blocks="all")
    drawn = weft.Decoder(50, 16, 1, weft.Block(weft.Attention(2), weft.MLP(8), weft.RMSNorm()), context=8)
    with pytest.raises(WeftError, match=r"--keep-blocks head has no effect.*: it is not read from a file"):
        weft.compile(drawn, tmp_path / "random", keep_blocks="head")


def test_other_targets_keep_no_blocks(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_0})
    with pytest.raises(WeftError, match="--keep-blocks supports the targets ort-cpu and torch only, not onnx"):
        weft.compile(source, tmp_path / "out", target="onnx", keep_blocks="all")


def test_the_head_alone_keeps_its_blocks(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_1, "token_embd": Type.Q8_0})
    weft.compile(source, tmp_path / "kept", keep_blocks="head")
    assert products(tmp_path / "kept") == Counter({"MatMulNBits": 1, "FusedMatMul": 5 * LAYERS})
    ids = list(range(20))
    weft.compile(source, tmp_path / "wide")
    want = weft.load(tmp_path / "wide").logits(ids)
    np.testing.assert_allclose(weft.load(tmp_path / "kept").logits(ids), want, rtol=0, atol=3e-5 * np.abs(want).max())


def test_unknown_choices_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": Type.Q4_0})
    with pytest.raises(WeftError, match="--keep-blocks 'some' is not known; it takes head or all"):
        weft.compile(source, tmp_path / "out", keep_blocks="some")
