"""onnxruntime-genai runs the same folders, its caches of windows rolling as weft's own do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
import pytest

import weft
from weft import MLA, Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

TARGETS = ("onnx", "ort-cpu")
FULL = "default, -rolling-buffer"


def block(**options: Any) -> Block:
    return Block(Attention(heads=4, kv_heads=2, rope=RoPE(10_000), **options), GatedMLP(48), norm=RMSNorm(1e-6))


LOCAL, WIDE = block(window=8), block()
LAYERS = {"mixed": [LOCAL, WIDE, LOCAL], "local": [LOCAL, LOCAL]}
PROMPT = np.random.default_rng(0).integers(0, 60, 21)


def compiled(layers: list[Block], folder: Path, target: str, passes: str = "default") -> Path:
    weft.compile(Decoder(vocab=64, dim=64, layers=layers), folder, target=target, max_length=64, seed=4, passes=passes)
    return folder


def genai(folder: Path, prompt: np.ndarray, tokens: int, **options: Any) -> list[int]:
    """The greedy continuation by onnxruntime-genai."""
    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + tokens, do_sample=False, **options)
    generator = og.Generator(model, params)
    generator.append_tokens(prompt.astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(t) for t in generator.get_sequence(0)[len(prompt) :]]


def continued(folder: Path) -> list[int]:
    """The same by weft's runtime."""
    (answer,) = weft.load(folder).generate([PROMPT.tolist()], max_tokens=20)
    return list(answer.tokens)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layers", LAYERS)
def test_tokens_are_those_of_full_caches(layers: str, target: str, tmp_path: Path) -> None:
    full = compiled(LAYERS[layers], tmp_path / "full", target, FULL)
    rolling = compiled(LAYERS[layers], tmp_path / "rolling", target)
    wanted = continued(full)
    assert len(set(wanted)) > 5
    assert continued(rolling) == wanted
    assert genai(full, PROMPT, 20) == wanted
    assert genai(rolling, PROMPT, 20) == wanted
    assert genai(rolling, PROMPT, 20, chunk_size=2) == wanted
    assert genai(rolling, PROMPT[:3], 12) == genai(full, PROMPT[:3], 12)


def test_only_local_layers_shrink(tmp_path: Path) -> None:
    folder = compiled(LAYERS["mixed"], tmp_path / "out", "ort-cpu")
    manifest = json.loads((folder / "weft.json").read_text())
    assert [(c["window"], c["rolling"], c["capacity"]) for c in manifest["cache"]] == [
        (8, True, 8),
        (None, False, None),
        (8, True, 8),
    ]
    section = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]["sliding_window"]
    assert section["window_size"] + section["cache_slack"] == 8
    assert section["layers"] == [0, 2]


def test_what_it_cannot_run_is_said(tmp_path: Path) -> None:
    two = Decoder(vocab=64, dim=64, layers=[LOCAL, block(window=4), WIDE])
    report = weft.compile(two, tmp_path / "two", max_length=64)
    assert "onnxruntime-genai cannot run this model: its rolling caches are of one size, not of 4 and 8" in report.notes
    assert not (tmp_path / "two" / "genai_config.json").exists()
    latent = MLA(heads=4, rank=16, head_dim=8, rope_dim=8, v_head_dim=8, rope=RoPE(10_000))
    model = Decoder(vocab=64, dim=64, layers=[Block(latent, GatedMLP(48), norm=RMSNorm(1e-6))])
    report = weft.compile(model, tmp_path / "latent", max_length=64)
    assert "onnxruntime-genai cannot run this model: it has no latent caches" in report.notes
