"""Encoders of long texts against transformers, at lengths on both sides of every border, with masks of each kind.

One compiled model runs all of them: nothing in a graph depends on the length of a text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

import weft
from weft.frontends import load_source
from weft.ir import interpret

from .families import COMMON, VOCAB, Row, error
from .seq2seq import GLOBAL, T5, Seq2Seq
from .test_seq2seq import Halves

Runner = Callable[[np.ndarray, np.ndarray], np.ndarray]  # ids and mask [batch, seq] → [batch, seq, dim]
RUNNERS = ("interpreter", "onnx", "ort-cpu", "torch")
TOLERANCE = 1e-5
SPARSE = COMMON | {"block_size": 4, "num_random_blocks": 2, "max_position_embeddings": 128}
BIG_BIRD = {
    "big_bird": Row("BigBirdModel", SPARSE),
    "one random block": Row("BigBirdModel", SPARSE | {"num_random_blocks": 1, "rescale_embeddings": True}),
    "odd blocks": Row("BigBirdModel", SPARSE | {"block_size": 3, "num_random_blocks": 3}),
}


def runner(name: str, folder: Path) -> Runner:
    """Return a function that encodes on `name` with the model in `folder`."""
    if name == "interpreter":
        graph = load_source(folder / "hf").graph
        return lambda ids, mask: interpret(graph, arguments(graph.inputs, ids, mask))["last_hidden_state"]
    if name == "torch":
        model = load_source(folder / "hf")
        net = weft.torch(model)

        def encode(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
            feeds = arguments(model.graph.inputs, ids, mask)
            with torch.inference_mode():
                made = net(*(torch.from_numpy(feeds[name]) for name in model.graph.inputs))
            return np.asarray((made[0] if isinstance(made, tuple) else made).numpy())

        return encode
    weft.compile(folder / "hf", folder / name, target=name)
    session = ort.InferenceSession(folder / name / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = [i.name for i in session.get_inputs()]
    return lambda ids, mask: np.asarray(session.run(["last_hidden_state"], arguments(inputs, ids, mask))[0])


def arguments(names: Any, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """The inputs called `names`; all tokens are of type 0."""
    known = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {name: known[name] for name in names}


def texts(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Texts of `length` tokens, and their masks: whole, padded behind, padded in front, with holes."""
    rng = np.random.default_rng(length)
    ids, at = rng.integers(3, VOCAB, (4, length)), np.arange(length)
    holes = (rng.random(length) < 0.6) | (at == length // 2)
    mask = np.stack([at >= 0, at <= length // 2, at >= length // 3, holes]).astype(np.int64)
    return np.where(mask, ids, 0), mask


def encoded(model: Any, ids: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    """Encode in transformers."""
    model.set_attention_type("block_sparse")  # the first short text would make it full for good
    found: torch.Tensor = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).last_hidden_state
    return found


@pytest.mark.halved
@pytest.mark.parametrize("on", RUNNERS)
@pytest.mark.parametrize("name", BIG_BIRD)
def test_big_bird_equals_transformers(name: str, on: str, tmp_path: Path) -> None:
    row = BIG_BIRD[name]
    model = row.save(tmp_path / "hf")
    run, block = runner(on, tmp_path), row.config["block_size"]
    border = (5 + 2 * row.config["num_random_blocks"]) * block
    for length in (1, block, border - 1, border, border + 1, border + block, border + block + 1, 100):
        ids, mask = texts(length)
        with torch.inference_mode():
            want = encoded(model, ids, mask).numpy()
        seen = mask.astype(bool)
        found = error(run(ids, mask)[seen], want[seen])
        assert found <= TOLERANCE, f"{length} tokens: {found:.1e}"


def test_gradients_of_big_bird_equal_transformers(tmp_path: Path) -> None:
    model = BIG_BIRD["big_bird"].save(tmp_path / "hf", add_pooling_layer=False).double()
    source = load_source(tmp_path / "hf")
    net = weft.torch(source).double().train()
    ids, mask = texts(50)
    feeds = arguments(source.graph.inputs, ids, mask)
    towards = torch.from_numpy(np.random.default_rng(0).standard_normal((*ids.shape, 64)) * mask[..., None])
    (encoded(model, ids, mask) * towards).sum().backward()
    (net(*(torch.from_numpy(feeds[name]) for name in source.graph.inputs)) * towards).sum().backward()
    theirs = sorted(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    ours = sorted(float(p.grad.norm()) for p in net.parameters() if p.grad is not None)
    assert len(ours) == len(theirs) > 40
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


# -- LongT5: global tokens, sums of blocks that depend on the padding

LONGT5 = {
    "longt5": Seq2Seq("LongT5ForConditionalGeneration", T5 | GLOBAL),
    "wide blocks": Seq2Seq("LongT5ForConditionalGeneration", T5 | GLOBAL | {"local_radius": 1, "global_block_size": 8}),
}


def answering(name: str, folder: Path) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    """Return a function that computes logits on `name` with the model in `folder`."""
    if name in ("interpreter", "torch"):
        model = load_source(folder / "hf")
        if name == "interpreter":
            return lambda feeds: interpret(model.graph, feeds)["logits"]
        net = weft.torch(model)
        return lambda feeds: net(**{key: torch.from_numpy(array) for key, array in feeds.items()}).detach().numpy()
    weft.compile(folder / "hf", folder / name, target=name, passes="default,-last-token-logits")
    halves = Halves(folder / name)
    return lambda feeds: halves.logits(feeds, feeds["input_ids"].shape[1])


@pytest.mark.parametrize("on", RUNNERS)
@pytest.mark.parametrize("name", LONGT5)
def test_longt5_equals_transformers(name: str, on: str, tmp_path: Path) -> None:
    model: Any = LONGT5[name].save(tmp_path / "hf")
    run = answering(on, tmp_path)
    for length in (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 41):
        ids, mask = texts(length)
        answers = np.random.default_rng(length).integers(3, VOCAB, (len(ids), 5))
        with torch.inference_mode():
            given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": answers}
            want = model(**{key: torch.from_numpy(array) for key, array in given.items()}).logits.numpy()
        feeds = {"encoder_input_ids": ids, "encoder_attention_mask": mask, "input_ids": answers}
        feeds["position_ids"] = np.broadcast_to(np.arange(5), answers.shape).copy()
        found = error(run(feeds), want)
        assert found <= TOLERANCE, f"{length} tokens: {found:.1e}"
