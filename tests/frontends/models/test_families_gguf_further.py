"""GGUF files that say more, or less, than the converter of today writes: what weft takes for it, as llama.cpp does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.backends.runtime.core.generation import Generator
from weft.frontends import load_source
from weft.frontends.models.tables.rope_config import read_gguf_rope
from weft.ir import WeftError

from ..conftest import Save
from ..formats.gguf import gguf_models
from ..formats.gguf.gguf_models import MODELS, write_gguf

Written = Callable[..., tuple[Path, Path]]


@pytest.fixture
def written(save: Save, tmp_path: Path) -> Written:
    """written(arch, without=(...), extra={...}, **keys): the folder of the first model of an architecture and its file,
    without some keys and with others."""

    def make(
        arch: str, without: tuple[str, ...] = (), extra: dict[str, np.ndarray] | None = None, **keys: Any
    ) -> tuple[Path, Path]:
        model_type, config, metadata = MODELS[arch][0]
        _, folder = save(model_type, pad_token_id=0, **config)
        said = {key: value for key, value in {**metadata, **keys}.items() if key not in without}
        path = tmp_path / "model.gguf"
        write_gguf(path, folder, arch, extra or {}, False, said)
        return folder, path

    return make


def same(folder: Path, path: Path) -> bool:
    theirs, ours = (load_source(at).graph.nodes for at in (folder, path))
    return [(str(n), n.attrs) for n in ours] == [(str(n), n.attrs) for n in theirs]


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("dots1", ("expert_gating_func", "expert_weights_norm")),
        ("glm4moe", ("expert_gating_func", "expert_weights_scale", "expert_group_count", "expert_group_used_count")),
        ("minimax-m2", ("expert_gating_func",)),
        ("exaone4", ("attention.sliding_window_pattern",)),
        ("exaone-moe", ("attention.sliding_window_pattern", "expert_shared_feed_forward_length")),
    ],
)
def test_optional_gguf_keys_have_defaults(arch: str, keys: tuple[str, ...], written: Written) -> None:
    assert same(*written(arch, without=keys))


def test_gguf_layers_for_multi_token_prediction_are_ignored(written: Written) -> None:
    beyond = {f"blk.3.nextn.{n}.weight": np.zeros((2, 2), np.float32) for n in ("eh_proj", "enorm")}
    folder, path = written("glm4moe", extra=beyond, block_count=4, nextn_predict_layers=1)
    assert same(folder, path)
    model = load_source(path)
    assert (model.unread, sorted(model.ignored)) == ([], sorted(beyond))


def test_gguf_lists_may_include_layers_for_multi_token_prediction(written: Written) -> None:
    folder, path = written(
        "qwen35",
        block_count=4,
        nextn_predict_layers=1,
        **{"attention.recurrent_layers": [True, False, True, False]},
    )
    assert same(folder, path)


def test_unknown_gguf_gating_function_is_refused(written: Written) -> None:
    _, path = written("glm4moe", expert_gating_func=4)
    with pytest.raises(WeftError, match="expert_gating_func=4 is not supported; known are 1"):
        load_source(path)


def test_rope_sections_of_glm4_separate_its_pairs(written: Written) -> None:
    """The converter reorders the rows of models with M-RoPE, whose pairs are halves apart."""
    _, path = written("glm4", **{"rope.dimension_sections": [2, 1, 1, 0]})
    ropes = [node.attrs["interleaved"] for node in load_source(path).graph.nodes if node.op.name == "rope"]
    assert ropes == [False] * len(ropes)
    assert ropes


def test_full_attention_interval_of_gguf_files(written: Written) -> None:
    assert same(*written("qwen3next", without=("attention.recurrent_layers",), full_attention_interval=2))


def test_first_gguf_layout_of_qwen3_next(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the projections of a group together, as transformers does."""
    todays = gguf_models.rearranged

    def first(arch: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        packed = {name: x for name, x in tensors.items() if "in_proj_qkvz" in name}
        rest = todays(arch, {name: x for name, x in tensors.items() if name not in packed})
        return rest | {f"blk.{name.split('.')[2]}.ssm_in.weight": x for name, x in packed.items()}

    monkeypatch.setattr(gguf_models, "rearranged", first)
    folder, path = written("qwen3next")
    assert same(folder, path)
    theirs, ours = (load_source(at).graph for at in (folder, path))
    for name in (f"layers.0.attn.{x}.weight" for x in ("qkv", "gate")):
        np.testing.assert_array_equal(*(g.params[name].recipe.evaluate(g.reader) for g in (ours, theirs)))


def test_llama4_gguf_without_chunks_attends_globally(written: Written) -> None:
    _, path = written("llama4", **{"attention.sliding_window": 0})
    nodes = load_source(path).graph.nodes
    assert sum(node.op.name == "rope" for node in nodes) == 2 * 4
    assert {node.attrs["pattern"] for node in nodes if node.op.name == "attention"} == {"dense"}


def test_bidirectional_gguf_decoder_is_refused(written: Written) -> None:
    _, path = written("lfm2", **{"attention.causal": False})
    with pytest.raises(WeftError, match=r"attention\.causal=False is not supported for lfm2 models"):
        load_source(path)


def test_gemma4_layers_without_keys_share_earlier_ones(written: Written) -> None:
    _, path = written("gemma4", **{"attention.shared_kv_layers": 1})
    with pytest.raises(WeftError, match=r"blk\.2\.attn_k\.weight"):
        load_source(path)


def test_gemma4_refuses_other_frequency_divisors(written: Written) -> None:
    """A divisor of 1 turns a pair of numbers, one of 10³⁰ does not."""
    _, path = written("gemma4", extra={"rope_freqs.weight": np.array([1.0, 2.0] + [1e30] * 6, np.float32)})
    with pytest.raises(WeftError, match=r"rope_freqs\.weight must have values 1 and 1e30 only"):
        load_source(path)


def test_yarn_amplitude_may_be_stated() -> None:
    said = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "context_length": 64}
    assert read_gguf_rope(said).amplitude == pytest.approx(1 + 0.1 * np.log(4))
    assert read_gguf_rope({**said, "rope.scaling.yarn_attn_factor": 1.5}).amplitude == 1.5


def test_chatglm_packed_qkv_is_read(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    todays = gguf_models.rearranged

    def packed(arch: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = todays(arch, tensors)
        for i, part in ((i, part) for i in range(3) for part in ("weight", "bias")):
            parts = [found.pop(f"model.layers.{i}.self_attn.{x}_proj.{part}") for x in "qkv"]
            found[f"blk.{i}.attn_qkv.{part}"] = np.concatenate(parts)
        return found

    monkeypatch.setattr(gguf_models, "rearranged", packed)
    folder, path = written("chatglm")
    assert same(folder, path)
    theirs, ours = (load_source(at).graph for at in (folder, path))
    for name in (f"layers.1.attn.{x}.{part}" for x in "qkv" for part in ("weight", "bias")):
        np.testing.assert_array_equal(*(g.params[name].recipe.evaluate(g.reader) for g in (ours, theirs)))


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
def test_packed_gate_and_up_of_experts_are_read(arch: str, written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    todays = gguf_models.rearranged

    def fused(arch: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = todays(arch, tensors)
        for i, kind in ((i, kind) for i in range(3) for kind in ("weight", "bias")):
            names = [f"model.layers.{i}.mlp.experts.{part}_proj.{kind}" for part in ("gate", "up")]
            if names[0] in found:
                found[f"blk.{i}.ffn_gate_up_exps.{kind}"] = np.concatenate([found.pop(name) for name in names], 1)
        return found

    monkeypatch.setattr(gguf_models, "rearranged", fused)
    folder, path = written(arch)
    theirs, ours = (load_source(at) for at in (folder, path))
    assert ours.unread == []
    for name in (name for name in ours.graph.params if ".experts." in name):
        pair = (m.graph.params[name].recipe.evaluate(m.graph.reader) for m in (ours, theirs))
        np.testing.assert_array_equal(*pair)


def test_t5_gguf_generates_the_tokens_of_its_folder(save: Save, tmp_path: Path) -> None:
    model_type, config, metadata = MODELS["t5"][1]
    _, folder = save(model_type, "AutoModelForSeq2SeqLM", pad_token_id=0, **config)
    write_gguf(path := tmp_path / "model.gguf", folder, "t5", {}, False, metadata)
    answers = []
    for source, out in ((folder, tmp_path / "a"), (path, tmp_path / "b")):
        weft.compile(source, out)
        answers.append(weft.load(out).generate([[7, 8, 9, 10, 5]], max_tokens=9)[0].tokens)
    assert answers[0] == answers[1] and len(answers[0]) > 0


def test_encoder_pooling_follows_its_gguf_file(written: Written) -> None:
    for number, pooling in ((2, "cls"), (4, None)):  # 4: of rerankers, whose head is not read
        model = load_source(written("bert", pooling_type=number)[1])
        assert model.graph.meta.get("pooling") == pooling
        assert [part.name for part in model.left_out] == ([] if pooling else ["bert.pooling_type"])


def test_defaults_of_sampling_are_recorded(written: Written, tmp_path: Path) -> None:
    said = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.mirostat": 2}
    model = load_source(written("llama", **said)[1])
    assert model.graph.meta["sampling"] == {"temperature": 0.6, "top_k": 20}
    assert [part.name for part in model.left_out] == ["general.sampling.mirostat"]
    assert weft.compile(model, tmp_path / "out").model is model
    loaded = weft.load(tmp_path / "out")
    assert isinstance(loaded, Generator) and dict(loaded.defaults) == {"temperature": 0.6, "top_k": 20}
    with pytest.raises(WeftError, match=r"temperature is -1\.0, but it must be at least 0"):
        load_source(written("llama", **{"general.sampling.temp": -1.0})[1])
