"""Model folders of quantized and of large sources: dequantized numbers where weights change, a block at a time."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type
from safetensors.numpy import load_file

import weft
from weft.frontends import load_source
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.formats.weft.model_folder import write_model
from weft.ir import Graph, interpret

from ..backends.onnx.quantized_llama import products, write
from ..sampling import each
from .test_quantized_folders import in_fp8, in_mxfp4

FOLD = "fold-norm-scale{untie=true}, pack-qkv"
IDS = np.random.default_rng(0).integers(3, 90, (2, 7))


def meaning(graph: Graph) -> np.ndarray:
    return interpret(graph, {"input_ids": IDS, "position_ids": np.tile(np.arange(7), (2, 1))})["logits"]


# -- quantized sources


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0], ids=lambda k: k.name)
def test_scaled_gguf_blocks_are_dequantized(kind: Type, tmp_path: Path) -> None:
    """Scaling a norm into a block would take a scale per number: the numbers are scaled, and stored as f32."""
    source = load_source(write(tmp_path / "model.gguf", {"": kind}))
    model = rewrite(source, FOLD)
    want = meaning(source.graph)
    assert np.abs(meaning(model.graph) - want).max() <= 1e-5 * np.abs(want).max()  # the recipes round to f32
    write_model(model, tmp_path / "folder")
    assert {t.dtype for t in load_file(tmp_path / "folder/model.safetensors").values()} == {np.dtype(np.float32)}
    assert np.array_equal(meaning(load_source(tmp_path / "folder").graph), meaning(model.graph))


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0], ids=lambda k: k.name)
def test_changed_weights_are_widened_and_traced(kind: Type, tmp_path: Path) -> None:
    """With --keep-blocks, what passes have scaled is multiplied as f32; the rest by the blocks as stored."""
    source = write(tmp_path / "model.gguf", {"": kind})
    every = "default, -last-token-logits"
    plain = weft.compile(source, tmp_path / "plain", passes=every, keep_blocks="all")
    folded = weft.compile(source, tmp_path / "folded", passes=f"fold-norm-scale, {every}", keep_blocks="all")
    wide = weft.compile(source, tmp_path / "wide", passes=f"fold-norm-scale, {every}")
    kept, left = products(tmp_path / "plain"), products(tmp_path / "folded")
    assert kept == {"MatMulNBits": 2 * 5 + 1}  # q k v, o, gate, up, down; the head
    assert left == {"MatMulNBits": 2 * 2 + 1, "FusedMatMul": 2 * 3}  # o and down read no norm; the head is tied
    assert not any("does more than move whole rows" in line for line in (*plain.trace, *wide.trace))
    told = [line for line in folded.trace if "does more than move whole rows" in line]
    assert len(told) == 2 * 3
    ids = IDS[0].tolist()
    got, want = (weft.load(tmp_path / name, threads=1).logits(ids) for name in ("folded", "plain"))
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


def test_scaled_fp8_and_mxfp4_are_dequantized(tmp_path: Path) -> None:
    for folder in (in_fp8("qwen3-gqa", tmp_path)[0], in_mxfp4(tmp_path / "experts")):
        source = load_source(folder)
        model = rewrite(source, FOLD)
        want = meaning(source.graph)
        assert np.abs(meaning(model.graph) - want).max() <= 1e-5 * np.abs(want).max()
        write_model(model, tmp_path / "out")
        assert np.array_equal(meaning(load_source(tmp_path / "out").graph), meaning(model.graph))


# -- large sources


def hollow(folder: Path, dim: int = 768, layers: int = 8, ffn: int = 3072, vocab: int = 60_000) -> int:
    """A llama in bf16 whose weights are all zero and take no room on the disk; returns how many there are."""
    folder.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": 12,
        "intermediate_size": ffn,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, dim), "model.norm": (dim,)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{x}_proj": (dim, dim) for x in "qkvo"}
        shapes |= {f"{layer}.mlp.{x}_proj": (ffn, dim) for x in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (dim, ffn)}
        shapes |= {f"{layer}.{x}_layernorm": (dim,) for x in ("input", "post_attention")}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end // 2


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    each(
        3,
        [
            ("opt", "-p", f"{FOLD}, pack-gate-up"),
            ("opt", "-p", "mha-to-gqa{kv_heads=4}, fuse-norm-linear{untie=true}"),
            ("export", "-p", FOLD),
            ("export", "-p", FOLD, "--format", "gguf", "--dtype", "q8_0"),
            ("export", "--format", "safetensors", "--dtype", "f16"),
        ],
    ),
    ids=" ".join,
)
def test_rewriting_memory_does_not_grow_with_the_model(command: tuple[str, ...], tmp_path: Path) -> None:
    """A process of its own, all its imports included, stays far below the weights that it writes."""
    verb, *options = command
    count = hollow(tmp_path / "model")
    kind = options[options.index("--format") + 1] if "--format" in options else ""
    suffix = f".{kind}" if kind else ""
    arguments = [verb, str(tmp_path / "model"), *options, "-o", str(tmp_path / f"out{suffix}")]
    measure = (
        "import re, sys; from weft.frontends.app.cli import cli; "
        f"cli.main({arguments!r}, standalone_mode=False); "
        "print(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", measure], capture_output=True, text=True, check=True)
    peak = 1024 * int(re.findall(r"\d+", done.stdout)[-1])
    assert peak < 0.3 * 4 * count, f"{peak >> 20} MiB for weights of {4 * count >> 20} MiB in f32"
