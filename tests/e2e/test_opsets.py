"""Every family at every opset of target onnx, with both forms of caches, equals transformers in ONNX Runtime.

`make test` runs one row of a tenth of the families, by turns at one opset; ``WEFT_TESTS=all`` runs all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import weft

from ..sampling import ALL
from .families import LENGTH, ROWS, VOCAB, error, reference
from .seq2seq import SEQ2SEQ, answered, pairs
from .test_families import DECODERS, ENCODERS, encoder_case
from .test_seq2seq import Halves

WAYS = [(opset, cache) for opset in (17, 20, 21, 23, 24) for cache in ("concat", "buffer")]
TOLERANCE = 1e-4
WITHOUT_CACHES = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")  # states of constant size only


def by_turns(names: list[str], ways: list[Any], every: int) -> list[tuple[str, Any]]:
    """Names with the ways that are run: all of both, or each `every`-th name with one way."""
    if ALL:
        return [(name, way) for name in names for way in ways]
    return [(name, ways[i % len(ways)]) for i, name in enumerate(names[::every])]


def check_opset(folder: Path, opset: int) -> None:
    for file in folder.glob("*.onnx"):
        model = onnx.load(file, load_external_data=False)
        assert model.opset_import[0].version <= opset and {n.domain for n in model.graph.node} == {""}


@pytest.mark.halved
@pytest.mark.parametrize(("name", "way"), by_turns(DECODERS, WAYS, 9))
def test_decoders_equal_transformers(name: str, way: tuple[int, str], tmp_path: Path) -> None:
    opset, cache = way
    model = ROWS[name].save(tmp_path / "hf")
    ids = np.random.default_rng(1).integers(3, VOCAB, (1, LENGTH))
    want = reference(model, ids)[0]
    grows = cache == "concat" or ROWS[name].family in WITHOUT_CACHES
    options: dict[str, Any] = {"opset": opset} | ({} if grows else {"cache": cache})
    passes = "default,-last-token-logits"
    weft.compile(tmp_path / "hf", tmp_path / "out", target="onnx", passes=passes, max_length=LENGTH, **options)
    check_opset(tmp_path / "out", opset)
    ours = weft.load(tmp_path / "out")
    for chunk in (LENGTH, 5, 1):
        assert error(ours.logits(ids[0].tolist(), chunk=chunk), want) <= TOLERANCE


@pytest.mark.parametrize(("name", "opset"), by_turns(ENCODERS, [17, 20, 21, 23], 6))
def test_encoders_equal_transformers(name: str, opset: int, tmp_path: Path) -> None:
    import onnxruntime as ort

    row = ROWS[name]
    model = row.save(tmp_path / "hf", **row.poolers[0])
    arguments, want, valid = encoder_case(row, model)
    weft.compile(tmp_path / "hf", tmp_path / "out", target="onnx", opset=opset)
    check_opset(tmp_path / "out", opset)
    session = ort.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    got = dict(zip([o.name for o in session.get_outputs()], session.run(None, arguments), strict=True))
    for part, values in want.items():
        rows = valid if part == "last_hidden_state" else slice(None)
        assert error(got[part][rows], values[rows]) <= TOLERANCE


@pytest.mark.parametrize(("name", "way"), by_turns([*SEQ2SEQ], WAYS, 5))
def test_encoder_decoders_equal_transformers(name: str, way: tuple[int, str], tmp_path: Path) -> None:
    opset, cache = way
    row = SEQ2SEQ[name]
    model, inputs = row.save(tmp_path / "hf"), pairs(row)
    options: dict[str, Any] = {"opset": opset} | ({"cache": cache} if cache == "buffer" else {})
    passes = "default,-last-token-logits"
    weft.compile(tmp_path / "hf", tmp_path / "out", target="onnx", passes=passes, **options)
    check_opset(tmp_path / "out", opset)
    halves = Halves(tmp_path / "out")
    for chunk in (LENGTH, 1):
        assert error(halves.logits(inputs, chunk), answered(model, inputs, chunk)) <= TOLERANCE
