"""Every example can be inspected and compiled as it stands, and computes in ONNX Runtime what the interpreter says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import weft
from weft.frontends.inspection import inspect
from weft.frontends.verification import relative_error, tolerated
from weft.ir import interpret

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
SMALLER = {"local_global": {"vocab": 97, "dim": 64}}  # 430 MB of random weights otherwise
LENGTH = {"local_global": 600}  # beyond its window of 512
every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


@every_example
def test_inspects(path: Path) -> None:
    found = inspect(weft.load_source(path))
    assert found.random and found.parameters > 0 and found.layers > 0
    assert not found.unread


@every_example
def test_onnx_runtime_equals_the_interpreter(path: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    made = weft.load_source(path).module
    module = dataclasses.replace(made, **SMALLER.get(path.stem, {}))
    length = LENGTH.get(path.stem, 40)
    ids = rng.integers(0, module.vocab, length)
    passes = "default" if isinstance(made, weft.Encoder) else "default, -last-token-logits"
    report = weft.compile(module, tmp_path / "out", passes=passes, max_length=length)
    runnable = weft.load(tmp_path / "out")
    feeds = {"input_ids": ids[None], "position_ids": np.arange(length)[None], "attention_mask": np.ones((1, length))}
    graph = report.model.graph
    layers = inspect(report.model).layers
    widest = max(min(p.shape) for p in graph.params.values() if len(p.shape) == 2)  # the longest sum of a product
    feeds["token_type_ids"] = np.zeros((1, length))
    want = interpret(graph, {name: feeds[name].astype(np.int64) for name in graph.inputs})
    if isinstance(made, weft.Encoder):
        pairs = [(runnable.hidden([ids])[0], want["last_hidden_state"][0])]
    else:  # whole, and in chunks through the caches
        pairs = [(runnable.logits(ids, chunk), want["logits"][0]) for chunk in (512, 32)]
    for got, right in pairs:
        assert got.shape == right.shape
        assert relative_error(got, right) < tolerated("f32", layers, widest)


def test_the_page_names_every_example() -> None:
    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert not [path.name for path in EXAMPLES if path.name not in page]
