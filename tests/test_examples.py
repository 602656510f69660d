"""Every example can be inspected and compiled as it stands, and computes in ONNX Runtime what the interpreter says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import weft
from weft.backends.alignment.traces import compute_error
from weft.frontends.app.api.inspect.counting import inspect
from weft.frontends.app.api.verify.error_bounds import compute_tolerance
from weft.ir import interpret

from .sampling import ALL

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(p for p in ROOT.glob("examples/*.py") if p.stem != "train")  # it describes no model
SMALLER = {"local_global": {"vocab": 97, "dim": 64}}  # 430 MB of random weights otherwise
LENGTH = {"local_global": 600}  # beyond its window of 512
CHUNKS = {"hybrid": (512,)}  # its experts choose among the tokens of a call
every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


@every_example
def test_example_is_inspected(path: Path) -> None:
    found = inspect(weft.load_source(path))
    assert found.random and found.parameters > 0 and found.layers > 0
    assert not found.unread


@pytest.mark.halved
@pytest.mark.parametrize(
    ("path", "target"),
    [
        *((path, "ort-cpu") for path in EXAMPLES if path.stem != "tiny_translator"),
        (ROOT / "examples" / "hybrid.py", "onnx"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.stem,
)
def test_onnx_runtime_equals_the_interpreter(path: Path, target: str, tmp_path: Path, rng: np.random.Generator) -> None:
    made = weft.load_source(path).module
    module = dataclasses.replace(made, **SMALLER.get(path.stem, {}))
    length = LENGTH.get(path.stem, 40)
    ids = rng.integers(0, module.vocab, length)
    passes = "default" if isinstance(made, weft.Encoder) else "default, -last-token-logits"
    report = weft.compile(module, tmp_path / "out", target=target, passes=passes, max_length=length)
    runnable = weft.load(tmp_path / "out")
    feeds = {"input_ids": ids[None], "position_ids": np.arange(length)[None], "attention_mask": np.ones((1, length))}
    graph = report.model.graph
    layers = inspect(report.model).layers
    widest = max(min(p.shape) for p in graph.params.values() if len(p.shape) == 2)  # the longest sum of a product
    feeds["token_type_ids"] = np.zeros((1, length))
    want = interpret(graph, {name: feeds[name].astype(np.int64) for name in graph.inputs})
    if isinstance(made, weft.Encoder):
        pairs = [(runnable.hidden_states([ids])[0], want["last_hidden_state"][0])]
    else:  # whole, and in chunks through the caches
        pairs = [(runnable.logits(ids, chunk), want["logits"][0]) for chunk in CHUNKS.get(path.stem, (512, 32))]
    for got, right in pairs:
        assert got.shape == right.shape
        assert compute_error(got, right) < compute_tolerance("f32", layers, widest)


@pytest.mark.parametrize("chunk", [7, 1])
def test_hybrid_generates_the_tokens_of_the_interpreter(chunk: int, tmp_path: Path, rng: np.random.Generator) -> None:
    """In calls of `chunk` tokens, through caches and states: what the interpreter says of the same calls."""
    length = 30 if ALL else 12
    source = weft.load_source(ROOT / "examples" / "hybrid.py")
    weft.compile(source, tmp_path / "out", passes="default, -last-token-logits", max_length=30)
    runnable, ids = weft.load(tmp_path / "out"), rng.integers(0, 1000, length)
    graph = weft.run_passes(source.graph, "kv-cache")
    sizes = {"batch": 1, "capacity": 30}
    past = {n: np.zeros(v.type.concrete(sizes)) for n, v in graph.inputs.items() if n.startswith("past_")}
    found = []
    for start in range(0, length, chunk):
        call = np.arange(start, min(start + chunk, length))[None]
        mask = np.ones((1, call[0, -1] + 1), np.int64)
        outs = interpret(graph, {"input_ids": ids[call], "position_ids": call, "attention_mask": mask, **past})
        past = {n: outs[n.replace("past_key_values", "present").replace("past_", "present_")] for n in past}
        found.append(outs["logits"][0])
    right = np.concatenate(found)
    assert compute_error(runnable.logits(ids, chunk), right) < compute_tolerance("f32", 8, 256)
    (made,) = runnable.generate([int(i) for i in ids[:9]], max_tokens=5)
    assert len(made.tokens) == 5


@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
def test_translator_generates_the_tokens_of_the_interpreter(
    target: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    source = weft.load_source(ROOT / "examples" / "tiny_translator.py")
    weft.compile(source, tmp_path / "out", target=target)
    runnable, read = weft.load(tmp_path / "out"), rng.integers(0, 1000, (1, 30))
    (answer,) = runnable.generate([read[0].tolist()], max_tokens=8)
    text = [0]  # the token that starts an answer
    for _ in range(8):
        feeds = {"encoder_input_ids": read, "encoder_attention_mask": np.ones_like(read)}
        feeds |= {"input_ids": np.array([text]), "position_ids": np.arange(len(text))[None]}
        text.append(int(interpret(source.graph, feeds)["logits"][0, -1].argmax()))
    assert answer.tokens == text[1:]


def test_examples_page_names_every_example() -> None:
    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert not [path.name for path in EXAMPLES if path.name not in page]
