"""GGUF checkpoints as models: llama.cpp's names and row order against the same weights in a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.frontends import load_source
from weft.frontends.models.families import index_tables
from weft.ir import WeftError, verify
from weft.passes import Trace
from weft.passes.library.target.rope_length import RopeLength

from ....sampling import each
from .gguf_models import ENCODERS, LONG, MODELS, SHORT, write_gguf

EPS = float(np.finfo(np.float32).eps)

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(folder, arch, **metadata): the weights of a tiny Hugging Face folder as a GGUF file."""

    def make(
        folder: Path, arch: str, extra: dict[str, np.ndarray] | None = None, tokenizer: bool = True, **metadata: Any
    ) -> Path:
        path = tmp_path / "model.gguf"
        write_gguf(path, folder, arch, extra or {}, tokenizer, metadata)
        return path

    return make


def test_every_architecture_has_a_model() -> None:
    assert set(MODELS) == set(index_tables())


@pytest.mark.halved
@pytest.mark.parametrize(
    ("arch", "index"), each(2, [(arch, i) for arch, models in MODELS.items() for i in range(len(models))])
)
def test_gguf_equals_its_folder(arch: str, index: int, save: Any, write: Write) -> None:
    model_type, config, metadata = MODELS[arch][index]
    kinds = {
        "t5": "AutoModelForSeq2SeqLM",
        "mistral4": "Mistral4ForCausalLM",
        **dict.fromkeys(ENCODERS, "AutoModelForMaskedLM"),
    }
    options = {"kind": kinds[arch]} if arch in kinds else {}
    _, folder = save(model_type, pad_token_id=0, **options, **config)
    if arch in ENCODERS:  # a GGUF file has no head
        text = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**text, "architectures": None}))
    longrope = {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
    extra = (
        {name: np.array(x, np.float32) for name, x in longrope.items()}
        if "rope.scaling.attn_factor" in metadata
        else {}
    )
    ours, theirs = load_source(write(folder, arch, extra, **metadata)), load_source(folder)
    verify(ours.graph, recipes=True)
    assert (ours.unread, ours.ignored) == ([], [])
    assert ours.graph.meta["eos_token_ids"] == [5]
    assert ours.graph.meta["context"] == theirs.graph.meta["context"]
    bodies = [[str(n) for n in m.graph.nodes] for m in (ours, theirs)]
    assert bodies[0] == bodies[1]
    assert [n.attrs for n in ours.graph.nodes] == [n.attrs for n in theirs.graph.nodes]
    assert set(ours.graph.params) == set(theirs.graph.params)
    assert ours.left_out == []
    for length in (1, 24):  # below and above the original context of LongRoPE
        for model in (ours, theirs):
            RopeLength(length).run(model.graph, Trace())
        for name in ours.graph.params:
            pair = [m.graph.params[name].recipe.evaluate(m.graph.reader) for m in (ours, theirs)]
            if name.endswith("a_log"):  # a GGUF file holds what it is the logarithm of
                pair = [np.exp(log) for log in pair]
            np.testing.assert_allclose(*pair, rtol=4 * EPS if name.endswith("a_log") else 2 * EPS, err_msg=name)
    others = {f"{arch}.attention.magic", "general.magic", "tokenizer.ggml.magic", "magic.scale"}
    magic = {"magic.weight": np.ones(2, np.float32)}
    path = write(folder, arch, extra | magic, **metadata, **dict.fromkeys(others, 3))
    assert {(part.kind, part.name) for part in load_source(path).left_out} == {
        ("tensors", "magic"),
        *(("key", key) for key in others),
    }


def test_frequency_factors_are_llama3_scaling(save: Any, write: Write) -> None:
    """llama.cpp stores Llama 3's scaling as divisors of the frequencies."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    _, folder = save("llama", num_key_value_heads=2, rope_parameters=rope)
    theirs = load_source(folder).graph
    wanted = theirs.params["rope.frequencies"].recipe.evaluate(theirs.reader)
    factors = (500.0 ** -(np.arange(0, 8, 2) / 8) / wanted).astype(np.float32)
    path = write(folder, "llama", {"rope_freqs.weight": factors}, **{"rope.freq_base": 500.0})
    found = load_source(path)
    assert (found.unread, found.ignored) == ([], [])
    verify(found.graph, recipes=True)
    ours = found.graph.params["rope.frequencies"].recipe.evaluate(found.graph.reader)
    np.testing.assert_allclose(ours, wanted, rtol=4 * float(np.finfo(np.float32).eps))


@pytest.mark.parametrize(
    ("arch", "metadata", "message"),
    [
        ("rwkv6", {}, "architecture 'rwkv6' is not supported; weft imports .*, bert, bitnet, bloom, .* from GGUF"),
        ("qwen2", {"expert_count": 8}, "expert_count=8 is not supported for qwen2 models"),
        ("llama", {"rope.scaling.type": "odd", "rope.scaling.factor": 2.0}, "rope.scaling.type='odd' is not supported"),
        ("llama", {"block_count": 4}, "has no tensor 'blk.3.attn_norm.weight', which parameter layers.3.attn_norm"),
        ("llama", {"feed_forward_length": 47}, r"ffn_gate.weight \[48, 32\] does not fit .* \[47, 32\] of the config"),
        (
            "llama",
            {"attention.head_count_kv": 4},
            r"blk.0.attn_k.weight \[16, 32\] does not fit layers.0.attn.k.weight",
        ),
    ],
)
def test_invalid_files_are_refused(arch: str, metadata: dict[str, Any], message: str, save: Any, write: Write) -> None:
    path = write(save("llama", num_key_value_heads=2)[1], arch, **metadata)
    with pytest.raises(WeftError, match=message) as caught:
        load_source(path)
    assert str(path) in str(caught.value)


def test_a_file_without_a_tokenizer_compiles_without_one(save: Any, write: Write, tmp_path: Path) -> None:
    path = write(save("llama", num_key_value_heads=2)[1], "llama", tokenizer=False)
    model = load_source(path)
    assert model.tokenizer is None
    weft.compile(model, tmp_path / "out")
    found = weft.load(tmp_path / "out").generate([3, 1, 4], max_tokens=2)
    assert len(found[0].tokens) == 2


def test_smollm2(smollm2_gguf: Path, tmp_path: Path) -> None:
    found = load_source(smollm2_gguf)
    assert (found.left_out, found.unread, found.ignored, found.random_init) == ([], [], [], False)
    verify(found.graph, recipes=True)
    assert found.module.tie_embeddings
    assert found.graph.meta["context"] == 8192
    assert found.tokenizer is not None
    found.tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
