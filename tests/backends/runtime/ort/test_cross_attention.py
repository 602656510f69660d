"""Encoder-decoders in the runtime: a source in, an answer out, as transformers gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

import weft
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort.ort_decoder import OrtDecoder
from weft.backends.runtime.ort.session import Session, import_onnxruntime
from weft.ir.errors import WeftError

from ...onnx.theirs import randomized, searched
from ..pretended import Device

VOCAB = 61
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "pad_token_id": 0}
HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 40}
BART = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in HALF.items()}
BART |= {"d_model": 32, "max_position_embeddings": 48, "pad_token_id": 1, "bos_token_id": 0}
TOKENS = {"vocab_size": VOCAB, "eos_token_id": 2, "decoder_start_token_id": 0}
MODELS: dict[str, Any] = {
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5, **TOKENS)),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**BART, **TOKENS)),
}
SOURCES = [[5, 9, 33, 4, 60, 7, 11], [3], [40, 41, 42, 43]]


@pytest.fixture(scope="module", params=sorted(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return a model of transformers and the folder compiled from it."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs: Any = randomized(MODELS[request.param](), seed=3)
    if request.param == "bart":  # as in its checkpoints for summaries and translations
        theirs.generation_config.forced_bos_token_id = 12
        theirs.generation_config.forced_eos_token_id = 2
    theirs.save_pretrained(folder / "hf")
    weft.compile(folder / "hf", folder / "out", max_length=40)
    return theirs, weft.load(folder / "out", threads=1)


@pytest.mark.parametrize("stop", [[2], [2, 7, 20, 33]], ids=["stop", "stops"])
@pytest.mark.parametrize("limit", [1, 14])
def test_answers_equal_transformers(pair: tuple[Any, Any], stop: list[int], limit: int) -> None:
    theirs, ours = pair
    model = Generator(ours.decoder, stop_ids=frozenset(stop), forced=ours.forced)
    results = model.generate(SOURCES, max_tokens=limit)
    wanted = [searched(theirs, source, stop, limit, beams=1, returned=1)[0][0] for source in SOURCES]
    assert [result.tokens for result in results] == wanted
    assert [result.prompt for result in results] == SOURCES
    assert [model.generate(source, max_tokens=limit)[0].tokens for source in SOURCES] == wanted


@pytest.mark.parametrize("how", [{}, {"length_penalty": 2.0, "early_stopping": True, "beams": 3}])
def test_beams_equal_transformers(pair: tuple[Any, Any], how: dict[str, Any]) -> None:
    theirs, ours = pair
    results = ours.generate(SOURCES, max_tokens=11, **{"beams": 4, "returned": 2, **how})
    wanted = [text for source in SOURCES for text in searched(theirs, source, [2], 11, **how)]
    assert [result.tokens for result in results] == [tokens for tokens, _ in wanted]
    np.testing.assert_allclose([result.score for result in results], [score for _, score in wanted], rtol=1e-4)


def test_encoder_runs_once_per_batch(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair
    runs: list[int] = []
    encoder = type(ours.decoder.sources)
    read = encoder.encode_sources
    monkeypatch.setattr(
        encoder, "encode_sources", lambda self, *given: runs.append(len(given[0])) or read(self, *given)
    )
    ours.generate(SOURCES, max_tokens=6, beams=4)
    ours.generate(SOURCES, max_tokens=6)
    assert runs == [3, 3]


def test_every_turn_of_a_conversation_reads_its_source(pair: tuple[Any, Any]) -> None:
    _, ours = pair
    talk = ours.conversation()
    (answer,) = talk.generate(SOURCES[0], max_tokens=5)
    for source in (SOURCES[2], [0, *answer.tokens, 5]):
        assert talk.generate(source, max_tokens=5) == ours.generate(source, max_tokens=5)


def test_simulated_cuda_device_gives_the_same_tokens(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair
    wanted = [ours.generate(SOURCES, max_tokens=8, beams=beams) for beams in (1, 3)]
    known = ours.decoder
    decoding, encoding = (Device(import_onnxruntime(), half.session.ort) for half in (known, known.sources))
    decoding.pretend(monkeypatch)
    session = Session(decoding, "cuda", graphs=True)
    decoder = OrtDecoder(session, known.sources.facts, Session(encoding, "cuda"))
    model = Generator(decoder, stop_ids=ours.stop_ids, forced=ours.forced)
    assert [model.generate(SOURCES, max_tokens=8, beams=beams) for beams in (1, 3)] == wanted
    assert decoding.released  # a step is captured anew for every batch of sources
    assert not encoding.graph_ids  # sources differ in length, so that their runs are not captured


def test_seeds_repeat_draws(pair: tuple[Any, Any]) -> None:
    _, ours = pair
    options: Any = {"max_tokens": 12, "temperature": 1.5, "repetition_penalty": 1.3, "seed": 4}
    first, second = ([r.tokens for r in ours.generate(SOURCES, **options)] for _ in range(2))
    assert first == second != [r.tokens for r in ours.generate(SOURCES, **{**options, "seed": 5})]


def test_sources_and_answers_have_limits_of_their_own(pair: tuple[Any, Any]) -> None:
    _, ours = pair
    longest = ours.decoder.max_prompt
    unstopped = Generator(ours.decoder)
    (result,) = unstopped.generate([5] * longest, max_tokens=None)
    assert len(result.tokens) == 40 and result.finish == "length"
    with pytest.raises(WeftError, match=f"a prompt of {longest + 1} tokens is longer than the maximum of {longest}"):
        ours.generate([5] * (longest + 1))
    with pytest.raises(WeftError, match="an encoder-decoder gives no logits of token ids alone"):
        ours.logits([1, 2])


def changed(folder: Path, **facts: Any) -> None:
    manifest = json.loads((folder / "weft.json").read_text()) | facts
    (folder / "weft.json").write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"decoder_start_token_id": None}, "the key 'decoder_start_token_id' is missing"),
        ({"max_source_length": 0}, "max_source_length is 0"),
        ({"forced_bos_token_id": "x"}, "forced_bos_token_id is 'x'"),
        ({"forced_bos_token_id": 10**6}, "forced_bos_token_id is 1000000, but the model has"),
        ({"begin_tokens": [{"any_of": [10**6]}]}, "begin_tokens is .*, but the model has"),
        ({"kind": "decoder"}, "the graph has the input encoder_attention_mask"),
    ],
)
def test_bad_manifests(pair: tuple[Any, Any], tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    for file in pair[1].folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    changed(tmp_path, **facts)
    with pytest.raises(WeftError, match=words):
        weft.load(tmp_path)


def test_encoder_file_with_other_inputs_is_refused(pair: tuple[Any, Any], tmp_path: Path) -> None:
    for file in pair[1].folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "encoder.onnx").write_bytes((tmp_path / "model.onnx").read_bytes())
    with pytest.raises(
        WeftError, match=r"encoder.onnx: its inputs are .*so it is not the encoder of an encoder-decoder"
    ):
        weft.load(tmp_path)
    poor = onnx.load(pair[1].folder / "encoder.onnx", load_external_data=False)
    del poor.graph.output[1:]
    onnx.save(poor, tmp_path / "encoder.onnx")
    with pytest.raises(WeftError, match="the graph has the input cross"):
        weft.load(tmp_path)
    (tmp_path / "encoder.onnx").unlink()
    with pytest.raises(WeftError, match=r"encoder.onnx: no such file"):
        weft.load(tmp_path)
