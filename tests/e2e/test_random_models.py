"""Random architectures, compiled for the CPU targets: however a text or a batch is cut into calls, as interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft.backends.onnx.export import build_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.ir import Graph, interpret, parse, print_graph
from weft.passes import Trace, default_pipeline, legalize, run_passes
from weft.passes.library.target.rope_length import RopeLength

from ..backends.onnx.cuda_placement import cuda_problems
from ..sampling import by_turns
from .random_models import LENGTH, VOCAB, Drawn, strong

Array = np.ndarray[Any, Any]
ROWS = 3
CPU = ("onnx", "ort-cpu")


def made(model: Any) -> Graph:
    graph = strong(model.graph())
    RopeLength(LENGTH).run(graph, Trace())
    return graph


def meaning(graph: Graph, ids: Array, source: Array | None = None) -> Array:
    """The main output for one row of token ids, noise of routers zero: [tokens, width]."""
    known = {"input_ids": ids, "position_ids": np.arange(ids.size), "attention_mask": np.ones_like(ids)}
    known |= {"token_type_ids": np.zeros_like(ids)}
    sizes = {"batch": 1, "seq": ids.size}
    if source is not None:
        known |= {"encoder_input_ids": source, "encoder_attention_mask": np.ones_like(source)}
        sizes["source"] = source.size
    fed = {n: known[n][None] if n in known else np.zeros(v.type.concrete(sizes)) for n, v in graph.inputs.items()}
    row: Array = next(iter(interpret(graph, fed).values()))[0]
    return row


def same(found: Array, wanted: Array) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def answer(decoder: Any, prompts: list[list[int]], texts: list[Array], wanted: list[Array], chunk: int) -> None:
    """Prompts of a batch in, then the rest of `texts` a token at a time; rows end by themselves."""
    at = np.array([1 if decoder.start else len(prompt) for prompt in prompts])
    with decoder.context(len(prompts), LENGTH) as context:
        found = context.prefill(prompts, chunk)
        same(found, np.stack([row[n - 1] for row, n in zip(wanted, at, strict=True)]))
        while (active := at < LENGTH).any():
            tokens = np.array([text[min(n, LENGTH - 1)] for text, n in zip(texts, at, strict=True)])
            found = context.step(tokens, active)
            same(found[active], np.stack([row[n] for row, n in zip(wanted, at, strict=True) if n < LENGTH]))
            at = at + active


@pytest.mark.parametrize(("seed", "target"), by_turns(range(8), CPU))
def test_random_decoders_agree_with_the_interpreter(seed: int, target: str, tmp_path: Path) -> None:
    graph, rng = made(Drawn(seed).decoder()), np.random.default_rng(seed)
    texts = [rng.integers(0, VOCAB, LENGTH) for _ in range(ROWS)]
    wanted = [meaning(graph, text) for text in texts]
    whole = seed // 2 % 2 == 1
    passes = "default, -last-token-logits" if whole else "default"
    weft.compile(graph, tmp_path / "out", target=target, passes=passes, max_length=LENGTH, prepack=target == "ort-cpu")
    model = weft.load(tmp_path / "out", threads=1)
    for chunk in (LENGTH, int(rng.integers(2, LENGTH)), 1):
        ends = [*range(chunk, LENGTH, chunk), LENGTH]
        every = model.decoder.every_position
        same(model.logits(texts[0], chunk), wanted[0] if every else wanted[0][np.array(ends) - 1])
    assert every >= whole
    lengths = rng.integers(1, LENGTH, ROWS)
    prompts = [text[:n].tolist() for text, n in zip(texts, lengths, strict=True)]
    answer(model.decoder, prompts, texts, wanted, chunk=int(rng.choice([3, 512])))


@pytest.mark.parametrize(("seed", "target"), by_turns(range(100, 103), CPU))
def test_random_encoders_agree_with_the_interpreter(seed: int, target: str, tmp_path: Path) -> None:
    graph, rng = made(Drawn(seed).encoder()), np.random.default_rng(seed)
    rows = [rng.integers(0, VOCAB, n) for n in (LENGTH, *rng.integers(1, LENGTH, ROWS - 1))]
    weft.compile(graph, tmp_path / "out", target=target, max_length=LENGTH)
    for ids, found in zip(rows, weft.load(tmp_path / "out", threads=1).hidden_states(rows), strict=True):
        same(found[: ids.size], meaning(graph, ids))


@pytest.mark.parametrize(("seed", "target"), by_turns(range(200, 203), CPU))
def test_random_encoder_decoders_agree_with_the_interpreter(seed: int, target: str, tmp_path: Path) -> None:
    graph, rng = made(Drawn(seed).encoder_decoder()), np.random.default_rng(seed)
    weft.compile(graph, tmp_path / "out", target=target, max_length=LENGTH)
    decoder = weft.load(tmp_path / "out", threads=1).decoder
    sources = [rng.integers(0, VOCAB, n) for n in rng.integers(1, LENGTH, ROWS)]
    texts = [np.array([*decoder.start, *rng.integers(0, VOCAB, LENGTH - 1)]) for _ in range(ROWS)]
    wanted = [meaning(graph, *pair) for pair in zip(texts, sources, strict=True)]
    answer(decoder, [source.tolist() for source in sources], texts, wanted, chunk=512)


@pytest.mark.parametrize("seed", range(301, 306))
def test_random_models_round_trip_rewrite_and_run_kernels(seed: int) -> None:
    """The text form reads back, passes keep what they declare, and on CUDA everything has a kernel."""
    drawn = Drawn(seed)
    graph = made(drawn.one((drawn.decoder, drawn.encoder, drawn.encoder_decoder))())
    assert parse(print_graph(graph)) == graph
    run_passes(graph, default_pipeline(graph, LENGTH), verify=True)
    if graph.meta["kind"] != "encoder-decoder":
        place = TARGETS["ort-cuda"]
        lowered = run_passes(graph, place.pipeline(graph, drawn.one(place.dtypes), max_length=LENGTH))
        legalize(lowered, lambda node: list_refusals(node, place))
        assert cuda_problems(build_model(lowered, place, LENGTH).model) == []
