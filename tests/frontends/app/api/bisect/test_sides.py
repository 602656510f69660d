"""Sides of a bisection: prefixes, compiled folders of all kinds, tokenizers, and what is refused."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import weft
from weft.frontends.app.api.bisect.bisection import bisect
from weft.frontends.app.api.bisect.sides import (
    LOG_PROBABILITIES,
    BisectionSide,
    open_side,
    split_prefix,
    trace_graph,
    trace_log_probabilities,
)
from weft.frontends.app.api.verify.internals import make_inputs
from weft.ir import WeftError, interpret

from .fake_llama import install

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def opened(side: Any, trust: bool = False) -> BisectionSide:
    with ExitStack() as stack:
        return open_side(side, stack, trust)


def test_prefixes_are_split_and_unknown_ones_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_prefix("transformers:a/b") == ("transformers", "a/b")
    assert split_prefix("torch:model.py:wide") == ("torch", "model.py:wide")
    assert split_prefix("model.py:wide") == ("", "model.py:wide")
    assert split_prefix(tmp_path) == ("", tmp_path)
    with pytest.raises(
        WeftError, match=r"^nemo:x: the prefix nemo: is unknown; known are transformers:FOLDER, .*gguf$"
    ):
        split_prefix("nemo:x")
    monkeypatch.chdir(tmp_path)
    Path("nemo:x").mkdir()
    assert split_prefix("nemo:x") == ("", "nemo:x")


def test_all_sides_of_one_model_agree(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    source = llamas[0]
    weft.compile(source, tmp_path / "ort")
    weft.compile(source, tmp_path / "torch", target="torch")
    half = weft.compile(source, tmp_path / "half", dtype="f16").folder
    others = {
        tmp_path / "ort": 1,
        tmp_path / "ort/model.onnx": 1,
        f"optimized:{tmp_path / 'ort'}": 1,
        tmp_path / "torch": 2,
        f"torch:{source}": 2,
        f"transformers:{source}": 2,
        transformers.LlamaForCausalLM.from_pretrained(source): 2,
    }
    for other, detail in others.items():
        assert opened(other, trust=True).detail == detail
        assert not bisect(source, other, ids=IDS, trust=True).differs, other
    found = bisect(source, half, ids=IDS)
    assert not found.differs and 1e-5 < found.errors["logits"] < found.tolerance < 0.02


def test_other_weights_differ(llamas: tuple[Path, Path]) -> None:
    found = bisect(llamas[0], f"transformers:{llamas[1]}", ids=IDS).difference
    assert found is not None and found.places[0].name == "embed"


def test_tokenizers_are_those_of_sources_and_folders(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    weft.compile(llamas[0], tmp_path / "out")
    tokens = opened(llamas[0]).encode("ab")
    assert tokens == [0, 1] == opened(tmp_path / "out").encode("ab") == opened(f"transformers:{llamas[0]}").encode("ab")
    assert opened(torch.nn.Linear(2, 2)).encode("ab") is None


def test_classes_of_transformers_choose_positions_themselves(tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 20}
    config = transformers.RobertaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    transformers.RobertaModel(config).save_pretrained(tmp_path / "model")
    assert not bisect(tmp_path / "model", f"transformers:{tmp_path / 'model'}", ids=[5, 6, 7]).differs


def test_encoder_decoders_of_transformers_read_both_inputs(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
    torch.manual_seed(0)
    net = transformers.T5ForConditionalGeneration(config)
    net.save_pretrained(tmp_path / "t5")
    side = opened(f"transformers:{tmp_path / 't5'}")
    assert side.has_encoder and side.vocab == 40
    assert not bisect(tmp_path / "t5", net, ids=IDS).differs


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ("optimized:nowhere", "neither an ONNX file nor a compiled folder"),
        ("transformers:nowhere", r"nowhere has no config\.json"),
        ("llama.cpp:nowhere.gguf", r"nowhere\.gguf"),
        ("nowhere.onnx", r"nowhere\.onnx"),
    ],
)
def test_missing_files_are_refused(side: str, words: str, llamas: tuple[Path, Path]) -> None:
    with pytest.raises(WeftError, match=words):
        bisect(llamas[0], side, ids=IDS)


def test_code_of_folders_runs_with_trust_only(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    weft.compile(llamas[0], tmp_path / "out", target="torch")
    with pytest.raises(WeftError, match="add --trust"):
        bisect(llamas[0], tmp_path / "out")


IDS = [3, 1, 4, 1, 5]


def test_trace_has_the_values_of_the_interpreter_and_runs_nodes_again(llamas: tuple[Path, Path]) -> None:
    graph = weft.load_source(llamas[0]).graph
    inputs = make_inputs(graph.inputs, IDS)
    steps: list[tuple[int, int]] = []
    trace = trace_graph(graph, inputs, lambda done, total: steps.append((done, total)))
    want = interpret(graph, inputs)["logits"]
    np.testing.assert_array_equal(trace.values[trace.outputs["logits"]], want)
    assert steps[-1] == (len(graph), len(graph)) == (len(trace.operations), len(graph))
    norm = trace.makers["layers.1.attn_norm"]
    operands = [trace.load(name) for name in norm.reads]
    np.testing.assert_array_equal(norm.run(operands, norm.attrs)[0], trace.values["layers.1.attn_norm"])
    assert np.abs(norm.run(operands, {**norm.attrs, "eps": 1.0})[0] - trace.values["layers.1.attn_norm"]).max() > 0.01


def test_labels_are_the_modules_of_the_checkpoint(llamas: tuple[Path, Path]) -> None:
    graph = weft.load_source(llamas[0]).graph
    labels = trace_graph(graph, make_inputs(graph.inputs, IDS)).labels
    assert labels["model.layers.2.mlp.down_proj"] == "layers.2.ffn.down"
    assert labels["model.embed_tokens"] == "embed"


def test_log_probabilities_are_in_the_order_of_the_vocabulary(
    llamas: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, requests = weft.load_source(llamas[0]).graph, install(monkeypatch)
    trace = trace_log_probabilities(Path("model.gguf"), graph, [5, 6])
    values = trace.values[LOG_PROBABILITIES]
    np.testing.assert_allclose(values[:-1], -math.log(29))
    assert values.shape == (29,) and values[-1] == -math.inf and not trace.rounded
    assert requests == [{"prompt": [5, 6], "temperature": 0, "max_tokens": 1, "logprobs": 29, "cache_prompt": False}]


def test_weights_in_blocks_round_activations(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert trace_log_probabilities(smollm2_gguf, weft.load_source(smollm2_gguf).graph, [5]).rounded


def test_a_missing_package_and_a_broken_file_are_named(
    llamas: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = weft.load_source(llamas[0]).graph
    install(monkeypatch)
    with pytest.raises(WeftError, match=r"llama\.cpp cannot run broken\.gguf: failed to load model"):
        trace_log_probabilities(Path("broken.gguf"), graph, [1])
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(WeftError, match="pip install xllamacpp"):
        trace_log_probabilities(Path("model.gguf"), graph, [1])
