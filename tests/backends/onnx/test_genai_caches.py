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

from ...e2e.families import ROWS

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


def in_a_batch(folder: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """The greedy continuations of `prompts`, padded on the right, by onnxruntime-genai."""
    model, longest = og.Model(str(folder)), max(map(len, prompts))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=longest + tokens, do_sample=False, batch_size=len(prompts))
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([prompt + [0] * (longest - len(prompt)) for prompt in prompts], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(i).tolist()[longest:] for i in range(len(prompts))]


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


UNEQUAL = [PROMPT.tolist(), PROMPT[5:].tolist(), PROMPT[:3].tolist(), PROMPT[:1].tolist()]


@pytest.mark.parametrize("passes", ["default", FULL])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layers", [*LAYERS, "gemma3"])
def test_unequal_prompts_run_or_it_is_said_that_they_do_not(
    layers: str, target: str, passes: str, tmp_path: Path
) -> None:
    model: Any = Decoder(vocab=64, dim=64, layers=LAYERS[layers]) if layers in LAYERS else gemma3(tmp_path / "hf")
    out = tmp_path / "out"
    report = weft.compile(model, out, target=target, max_length=64, seed=4, passes=passes)
    said = [note for note in report.notes if "needs prompts of equal length" in note]
    assert bool(said) == (target == "ort-cpu" and passes == "default")
    if said:
        with pytest.raises(RuntimeError, match=r"seqlens_k\[1\] = \d+ is too small"):
            in_a_batch(out, UNEQUAL, 12)
        assert in_a_batch(out, [PROMPT.tolist()] * 2, 12)[0] == in_a_batch(out, [PROMPT.tolist()], 12)[0]
        return
    answers = weft.load(out).generate(UNEQUAL, max_tokens=12)
    assert in_a_batch(out, UNEQUAL, 12) == [list(answer.tokens) for answer in answers]


def gemma3(folder: Path) -> Path:
    """A tiny Gemma 3 with local and global layers."""
    ROWS["gemma3"].save(folder)
    return folder


def test_the_shortest_text_is_said_where_only_some_layers_roll(tmp_path: Path) -> None:
    for layers, wanted in (("mixed", True), ("local", False)):
        model = Decoder(vocab=64, dim=64, layers=LAYERS[layers])
        report = weft.compile(model, tmp_path / layers, max_length=64, seed=4)
        said = [note for note in report.notes if "a max_length of at least 8" in note]
        assert bool(said) == wanted
        if wanted:
            with pytest.raises(RuntimeError, match="invalid dimensions"):
                genai(tmp_path / layers, PROMPT[:3], 4)
        else:
            assert len(genai(tmp_path / layers, PROMPT[:3], 4)) == 4


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
