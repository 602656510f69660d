"""Folders for ONNX Runtime: models, configuration of onnxruntime-genai, and facts for the manifest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
import pytest

import weft
from weft import MLA, Attention, Block, Decoder, GatedMLP, LightningIndex, RMSNorm, RoPE
from weft.backends import target as backends
from weft.backends.onnx import export
from weft.backends.onnx.onnx_folder import build_config, find_genai_refusal
from weft.ir import Graph, TensorType, ops
from weft.ir.types import dtypes
from weft.ir.types.sizes import sym
from weft.passes import run_passes

from ...e2e.families import ROWS
from .small_decoder import decoder


def test_tied_embedding_is_stored_once(tmp_path: Path) -> None:
    for target in ("ort-cpu", "onnx"):
        tied = weft.compile(decoder(tie=True), tmp_path / f"tied-{target}", target=target)
        untied = weft.compile(decoder(tie=False), tmp_path / f"untied-{target}", target=target)
        assert untied.weight_bytes - tied.weight_bytes == 96 * 64 * 4
        stored = (tmp_path / f"tied-{target}" / "model.onnx.data").stat().st_size
        assert tied.weight_bytes <= stored + 16 * export.INLINE_BYTES


def test_manifest_and_genai_config_describe_the_model(tmp_path: Path) -> None:
    weft.compile(decoder(), tmp_path / "out", target="ort-cuda", dtype="bf16", max_length=32)
    manifest = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert (manifest["kind"], manifest["target"], manifest["dtype"]) == ("decoder", "ort-cuda", "bf16")
    assert (manifest["vocab"], manifest["max_length"], manifest["logits"]) == (96, 32, "last")
    wide = {"kv_heads": 2, "head_dim": 16, "window": None, "rolling": False, "capacity": None, "latent": False}
    assert manifest["cache"] == [{"layer": i, **wide} for i in range(2)]
    assert "kv-cache" in manifest["pipeline"]
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert config["model"]["type"] == "decoder"
    assert config["search"]["past_present_share_buffer"] is True
    assert config["model"]["decoder"]["session_options"]["provider_options"] == [{"cuda": {"enable_cuda_graph": "1"}}]


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
    """Return the greedy continuation by onnxruntime-genai."""
    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + tokens, do_sample=False, **options)
    generator = og.Generator(model, params)
    generator.append_tokens(prompt.astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(t) for t in generator.get_sequence(0)[len(prompt) :]]


def in_a_batch(folder: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return the greedy continuations of `prompts`, right-padded, by onnxruntime-genai."""
    model, longest = og.Model(str(folder)), max(map(len, prompts))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=longest + tokens, do_sample=False, batch_size=len(prompts))
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([prompt + [0] * (longest - len(prompt)) for prompt in prompts], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(i).tolist()[longest:] for i in range(len(prompts))]


def continued(folder: Path) -> list[int]:
    """Return the greedy continuation by weft's runtime."""
    (answer,) = weft.load(folder).generate([PROMPT.tolist()], max_tokens=20)
    return list(answer.tokens)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layers", LAYERS)
def test_genai_gives_the_tokens_of_full_caches(layers: str, target: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layers", [*LAYERS, "gemma3"])
def test_genai_runs_unequal_and_short_prompts(layers: str, target: str, tmp_path: Path) -> None:
    """Shorter than the window, too."""
    model: Any = Decoder(vocab=64, dim=64, layers=LAYERS[layers]) if layers in LAYERS else gemma3(tmp_path / "hf")
    out = tmp_path / "out"
    weft.compile(model, out, target=target, max_length=64, seed=4 if layers in LAYERS else None)
    answers = weft.load(out).generate(UNEQUAL, max_tokens=12)
    assert in_a_batch(out, UNEQUAL, 12) == [list(answer.tokens) for answer in answers]
    (short,) = weft.load(out).generate([PROMPT[:2].tolist()], max_tokens=3)
    assert genai(out, PROMPT[:2], 3) == list(short.tokens)


def gemma3(folder: Path) -> Path:
    """Write a tiny Gemma 3 with local and global layers."""
    ROWS["gemma3"].save(folder)
    return folder


def test_only_local_layers_shrink(tmp_path: Path) -> None:
    folder = compiled(LAYERS["mixed"], tmp_path / "out", "ort-cpu")
    manifest = json.loads((folder / "weft.json").read_text())
    assert [(c["window"], c["rolling"], c["capacity"]) for c in manifest["cache"]] == [
        (8, True, 8),
        (None, False, None),
        (8, True, 8),
    ]
    decoder = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
    assert decoder["filename"] == "genai.onnx"
    # The weights are stored once.
    full = compiled(LAYERS["mixed"], tmp_path / "full", "ort-cpu", FULL)
    assert not (full / "genai.onnx").exists()
    assert (folder / "model.onnx.data").stat().st_size == (full / "model.onnx.data").stat().st_size


def test_windows_of_two_sizes(tmp_path: Path) -> None:
    two = Decoder(vocab=64, dim=64, layers=[LOCAL, block(window=4), WIDE])
    weft.compile(two, tmp_path, max_length=64, seed=4)
    assert genai(tmp_path, PROMPT, 20) == continued(tmp_path)


def test_models_that_genai_cannot_run_are_reported(tmp_path: Path) -> None:
    latent = MLA(heads=4, rank=16, head_dim=8, rope_dim=8, v_head_dim=8, rope=RoPE(10_000))
    reasons = {
        "it has no latent caches": latent,
        "it has no caches for the keys of a lightning index": replace(latent, index=LightningIndex(2, 8, 5)),
    }
    for i, (reason, mixer) in enumerate(reasons.items()):
        model = Decoder(vocab=64, dim=64, layers=[Block(mixer, GatedMLP(48), norm=RMSNorm(1e-6))])
        report = weft.compile(model, tmp_path / str(i), max_length=64)
        assert f"onnxruntime-genai cannot run this model: {reason}" in report.notes


@pytest.mark.parametrize("tokens", [[], [7], [7, 8]])
@pytest.mark.parametrize("target", ["ort-cpu", "ort-cuda"])
def test_config_describes_the_caches_of_a_decoder(tokens: list[int], target: str) -> None:
    graph = run_passes(Decoder(vocab=64, dim=64, layers=[WIDE, WIDE], context=32).graph(), "kv-cache")
    graph.meta["eos_token_ids"] = tokens
    config = build_config(graph, backends.TARGETS[target], 32, capture=False, filename="other.onnx")
    model, decoder = config["model"], config["model"]["decoder"]
    assert (model["vocab_size"], model["context_length"], model["pad_token_id"]) == (64, 32, tokens[0] if tokens else 0)
    assert model.get("eos_token_id") == {0: None, 1: 7, 2: [7, 8]}[len(tokens)] and "bos_token_id" not in model
    assert (decoder["num_attention_heads"], decoder["num_key_value_heads"], decoder["head_size"]) == (4, 2, 16)
    assert (decoder["num_hidden_layers"], decoder["hidden_size"], decoder["filename"]) == (2, 64, "other.onnx")
    providers = [{"cuda": {"enable_cuda_graph": "0"}}] if target == "ort-cuda" else []
    assert decoder["session_options"]["provider_options"] == providers


@pytest.mark.parametrize(("width", "reason"), [(8, None), (6, "it requires keys and values of equal width")])
def test_unequal_widths_of_keys_and_values_are_refused(width: int, reason: str | None) -> None:
    graph = Graph("widths")
    graph.meta["kind"] = "decoder"
    shapes = {"q": 16, "k": 16, "v": 2 * width}
    q, k, v = (graph.add_input(n, TensorType(dtypes.f32, (sym("batch"), sym("seq"), w))) for n, w in shapes.items())
    graph.add_output("y", ops.attention(q, k, v, heads=2, kv_heads=2, causal=True))
    assert find_genai_refusal(run_passes(graph, "kv-cache")) == reason
