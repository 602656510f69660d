"""The table test: tiny random models of every family against transformers, on ONNX Runtime and in PyTorch.

Sequences of 24 tokens cross windows of 8 and original contexts of 16; decoders run as one full pass, in chunks, and
token by token. docs/supported.md shows the errors of errors.json, which
``WEFT_FAMILIES=write pytest -n 0 tests/e2e/test_seq2seq.py tests/e2e/test_families.py`` writes. `make test` runs the
first, third … row of every family, each on one target by turns; ``WEFT_TESTS=all`` and writing run all.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import weft
from weft.backends.runtime.core.generation import Generator
from weft.frontends import load_source
from weft.frontends.models.families import FAMILIES

from .. import sampling
from ..sampling import by_turns
from ..supported import Errors, read_errors, read_genai
from .families import LENGTH, ROWS, VOCAB, Row, encoder_case, error, reference
from .images import TOWERS
from .seq2seq import SEQ2SEQ
from .sounds import SOUNDS, SPEECH
from .unknowns import check_left_out

TARGETS, ALL_TARGETS, TOLERANCE = ("onnx", "ort-cpu"), ("onnx", "ort-cpu", "torch"), 1e-4
WRITING = os.environ.get("WEFT_FAMILIES") == "write"
ALL = WRITING or sampling.ALL
CHUNKS = {"full": LENGTH, "chunked": 5, "decode": 1}
KNOWN: dict[str, Row] = ROWS | SEQ2SEQ | TOWERS | SOUNDS | SPEECH
DECODERS = [name for name, row in ROWS.items() if row.is_decoder]
ENCODERS = [name for name, row in ROWS.items() if row.is_encoder]
# Models of ort-cpu that return the logits of the last token only, because a node after it has its shape as a constant.
CLOSED = {"gemma3n", "gemma4", "gemma4-experts", "apertus", "phimoe", "gemma3n-active", "gemma4-wide", "phimoe-scaled"}
BATCHED = ["mistral-gqa", "gpt2-tied", "gemma2", "bloom", "glm_moe_dsa"]


def sampled(names: Iterable[str], targets: Sequence[str] = ALL_TARGETS) -> list[tuple[str, str]]:
    """The rows that are run, and the targets they run on."""
    chosen, families = list[str](), Counter[str]()
    for name in names:
        family = KNOWN[name].family
        chosen += [name] if ALL or families[family] % 2 == 0 else []
        families[family] += 1
    turns = list(enumerate(chosen))
    return [(name, t) for i, name in turns for j, t in enumerate(targets) if ALL or i % len(targets) == j]


def note(errors: Errors, family: str, target: str, way: str, found: float) -> None:
    """`found` joins the table, and is small."""
    ways = errors.setdefault(family, {}).setdefault(target, {})
    ways[way] = max(found, ways.get(way, 0.0))
    assert found <= TOLERANCE, f"{family} on {target}, {way}: {found:.1e}"


@pytest.mark.halved
@pytest.mark.parametrize(("name", "target"), sampled(DECODERS))
def test_decoder_equals_transformers(
    name: str, target: str, errors: Errors, genai: dict[str, bool], tmp_path: Path
) -> None:
    row = ROWS[name]
    model = row.save(tmp_path / "hf")
    ids = np.random.default_rng(1).integers(3, VOCAB, (1, LENGTH))
    want = reference(model, ids)[0]
    has_last = target == "onnx" or (target == "ort-cpu" and name in CLOSED)
    passes = "default,-last-token-logits" if has_last else "default"
    options = {"passes": passes, "max_length": LENGTH}
    report = weft.compile(tmp_path / "hf", tmp_path / "out", target=target, **options)
    assert report.model.unread == []
    assert any("RoPE" in note for note in report.notes) == ("dynamic" in name or "longrope" in name)
    ours = weft.load(tmp_path / "out", trust=True)
    assert ours.decoder.every_position
    if target == "ort-cpu":
        genai[row.family] = (tmp_path / "out" / "genai_config.json").is_file()
        assert genai[row.family] == (row.family in read_genai()) or WRITING
    for way, chunk in CHUNKS.items():
        note(errors, row.family, target, way, error(ours.logits(ids[0].tolist(), chunk=chunk), want))
    check_left_out(tmp_path / "hf", report.model)


def encoded(source: Path, target: str, arguments: dict[str, np.ndarray], out: Path) -> dict[str, np.ndarray]:
    """Outputs of the encoder in `source` on `target`, by their names."""
    if target == "torch":
        model = load_source(source)
        assert (model.unread, set(arguments)) == ([], set(model.graph.inputs))
        with torch.inference_mode():
            made = weft.torch(model)(*(torch.from_numpy(arguments[name]) for name in model.graph.inputs))
        outputs = made if isinstance(made, tuple) else (made,)
        return dict(zip(model.graph.outputs, (value.numpy() for value in outputs), strict=True))
    assert weft.compile(source, out, target=target).model.unread == []
    session = ort.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    assert set(arguments) == {i.name for i in session.get_inputs()}
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, arguments), strict=True))


@pytest.mark.halved
@pytest.mark.parametrize(("name", "target"), sampled(ENCODERS))
def test_encoder_equals_transformers(name: str, target: str, errors: Errors, tmp_path: Path) -> None:
    row = ROWS[name]
    for options in row.poolers:
        model = row.save(tmp_path / "hf", **options)
        arguments, want, valid = encoder_case(row, model)
        got = encoded(tmp_path / "hf", target, arguments, tmp_path / "out")
        assert set(got) == set(want)
        assert ("pooler_output" in got) == options.get("add_pooling_layer", "pooler_output" in want)
        for part, values in want.items():
            rows = valid if part == "last_hidden_state" else slice(None)
            note(errors, row.family, target, "full", error(got[part][rows], values[rows]))
        check_left_out(tmp_path / "hf")
        shutil.rmtree(tmp_path / "hf")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_verified(family: str, errors: Errors) -> None:
    """The committed table has every family, on every target, in every way it can be run."""
    rows = [row for row in KNOWN.values() if row.family == family]
    assert rows, f"tests/e2e/families has no row of family {family}"
    ways = {"full"} if rows[0].is_encoder else set(CHUNKS)
    found = ({**read_errors(), **errors} if WRITING else read_errors()).get(family, {})
    assert {target: set(by_way) for target, by_way in found.items()} == dict.fromkeys(ALL_TARGETS, ways)
    assert all(e <= TOLERANCE for by_way in found.values() for e in by_way.values())


@pytest.mark.parametrize(("name", "target"), by_turns(BATCHED, TARGETS))
def test_greedy_batches_equal_transformers(name: str, target: str, tmp_path: Path) -> None:
    model = ROWS[name].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target)
    loaded = weft.load(tmp_path / "out")
    ours = Generator(loaded.decoder)
    rng = np.random.default_rng(3)
    rows = [rng.integers(3, VOCAB, n).tolist() for n in (3, 11, 7)]
    want = []
    for row in rows:
        ids = torch.tensor([row])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        want.append(out[0, len(row) :].tolist())
    for chunk in (64, 4):  # padded together; row by row
        assert [r.tokens for r in ours.generate(rows, max_tokens=12, chunk=chunk)] == want


@pytest.mark.parametrize("name", ["llama-gqa-tied", "mistral-gqa", "qwen3-gqa", "gpt2-untied", "gemma3", "bloom"])
def test_onnx_target_uses_standard_operators(name: str, tmp_path: Path) -> None:
    """Checked in full, default domain only, equal in ONNX Runtime and in onnx's reference evaluator."""
    ROWS[name].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", target="onnx")
    path = tmp_path / "out" / "model.onnx"
    onnx.checker.check_model(path, full_check=True)
    proto = onnx.load(path)
    assert {n.domain for n in proto.graph.node} == {""}
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", 23)]
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(5)
    seq, past = 6, 9
    shapes = {"batch_size": 2, "sequence_length": seq, "past_sequence_length": past}
    shapes["past_sequence_length + sequence_length"] = past + seq
    feeds: dict[str, np.ndarray] = {}
    for i in session.get_inputs():
        shape = [shapes.get(s, s) for s in i.shape]
        feeds[i.name] = rng.standard_normal(shape).astype(np.float32) if "float" in i.type else np.ones(shape, np.int64)
    feeds["input_ids"] = rng.integers(3, VOCAB, (2, seq))
    feeds["position_ids"] = np.broadcast_to(np.arange(past, past + seq), (2, seq)).copy()
    theirs = ReferenceEvaluator(proto).run(None, feeds)
    for output, want, got in zip(session.get_outputs(), theirs, session.run(None, feeds), strict=True):
        assert np.abs(got - want).max() <= 1e-4 * max(1.0, np.abs(want).max()), output.name
