"""The table test of encoder-decoders: tiny random models against transformers, on every target.

Sources of unequal lengths are padded; answers of 24 tokens run as one pass, in chunks, and token by token. With a
capacity of experts the reference runs in the same calls, since the tokens of a call compete for it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import weft
from weft.frontends.families.verified import Errors

from .families import LENGTH, error
from .seq2seq import SEQ2SEQ, answered, pairs
from .test_families import CHUNKS, TARGETS, note

CAPACITY = 32  # of the caches


class Halves:
    """The two models of a compiled folder in plain ONNX Runtime."""

    def __init__(self, folder: Path) -> None:
        self.encoder, self.decoder = (
            ort.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
            for name in ("encoder", "model")
        )

    def logits(self, inputs: dict[str, np.ndarray], chunk: int) -> np.ndarray:
        """Logits [batch, seq, vocab] of the answers, `chunk` tokens at a time."""
        ids = inputs["input_ids"]
        crossed = _run(self.encoder, inputs)
        state = {i.name: np.zeros((len(ids), i.shape[1], CAPACITY, i.shape[3]), np.float32)
                 for i in self.decoder.get_inputs() if i.name.startswith("past")}  # fmt: skip
        found = []
        for start in range(0, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            end = start + part.shape[1]
            call = {
                "input_ids": part,
                "attention_mask": np.ones((len(ids), end), np.int64),
                "position_ids": np.broadcast_to(np.arange(start, end), part.shape),
            }
            made = _run(self.decoder, {**inputs, **crossed, **state, **call})
            state = {name.replace("present", "past_key_values"): v for name, v in made.items() if name != "logits"}
            found.append(made["logits"])
        return np.concatenate(found, 1)


def _run(session: ort.InferenceSession, known: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(None, {i.name: known[i.name] for i in session.get_inputs()}), strict=True))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_answers_equal_transformers(name: str, target: str, errors: Errors, tmp_path: Path) -> None:
    row = SEQ2SEQ[name]
    model = row.save(tmp_path / "hf")
    inputs = pairs(row)
    report = weft.compile(tmp_path / "hf", tmp_path / "out", target=target, passes="default,-last-token-logits")
    assert report.model.unread == []
    halves = Halves(tmp_path / "out")
    for way, chunk in CHUNKS.items():
        want = answered(model, inputs, chunk)
        batches = [inputs] if chunk in (1, LENGTH) else [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(3)]
        got = np.concatenate([halves.logits(batch, chunk) for batch in batches])
        note(errors, row.family, target, way, error(got, want))
