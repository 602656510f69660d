"""Models of recurrences written with `scan`, on every target: whole texts, chunks, single tokens, batches, padding."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from weft import Block, Decoder, GatedMLP, RMSNorm, load
from weft import compile as compile_model
from weft.ir import Graph, interpret
from weft.passes import run_passes

from ..recurrences import RECURRENCES, Mixer
from ..sampling import by_turns
from .random_models import strong

LENGTH, PADDING, NEW = 13, 3, 5
TARGETS = ("onnx", "ort-cpu", "torch", "transformers")
RTOL = 1e-5


def model(kind: str) -> Graph:
    """A decoder with two layers of a recurrence, its weights all random and of effect."""
    block = Block(Mixer(kind), GatedMLP(24), norm=RMSNorm(1e-6))
    return strong(Decoder(vocab=31, dim=12, layers=[block] * 2).graph())


def logits(graph: Graph, ids: np.ndarray) -> np.ndarray:
    feeds = {"input_ids": ids, "position_ids": np.arange(ids.shape[1])[None].repeat(len(ids), 0)}
    return interpret(graph, {name: feeds[name] for name in graph.inputs})["logits"]


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=RTOL * np.abs(wanted).max())


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).integers(1, 31, shape)


@pytest.mark.parametrize("kind", RECURRENCES)
def test_scan_models_in_pieces_agree_with_one_pass(kind: str) -> None:
    """In float64: kv-cache itself checks every way to cut a text."""
    run_passes(model(kind), "kv-cache, last-token-logits", verify=True)


@pytest.mark.parametrize(("kind", "target"), by_turns(RECURRENCES, TARGETS[:3]))
def test_scan_models_agree_on_every_target(kind: str, target: str, tmp_path: Path) -> None:
    graph, ids = model(kind), tokens(LENGTH)
    wanted = logits(graph, ids[None])[0]
    compile_model(graph, tmp_path / "out", target=target)
    generator = load(tmp_path / "out", trust=True)
    close(generator.logits(ids.tolist(), chunk=1), wanted)
    for chunk in (LENGTH, 5):
        found = generator.logits(ids.tolist(), chunk=chunk)
        ends = [min(at + chunk, LENGTH) - 1 for at in range(0, LENGTH, chunk)]
        close(found, wanted if len(found) == LENGTH else wanted[ends])
    prompts = [ids[:4].tolist(), ids.tolist(), ids[:7].tolist()]  # a batch of texts of several lengths
    together = [r.tokens for r in generator.generate(prompts, max_tokens=NEW, temperature=0)]
    for prompt, answer in zip(prompts, together, strict=True):
        text = list(prompt)
        for _ in range(NEW):
            text.append(int(logits(graph, np.array([text]))[0, -1].argmax()))
        assert answer == text[len(prompt) :]


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("kind", RECURRENCES)
def test_scan_models_run_in_transformers(kind: str, tmp_path: Path) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    graph, ids = model(kind), tokens(2, LENGTH)
    wanted = logits(graph, ids)
    compile_model(graph, tmp_path / "out", target="transformers")
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    given = torch.from_numpy(ids)
    with torch.no_grad():
        close(net(given).logits.numpy(), wanted)
        for cuts in ((5, 8), (1,) * LENGTH, (7, 1, 5)):
            past, found = None, []
            for part in given.split(cuts, 1):
                made = net(part, past_key_values=past, use_cache=True)
                past = made.past_key_values
                found.append(made.logits.numpy())
            close(np.concatenate(found, 1), wanted)
        padded = torch.cat((torch.zeros(2, PADDING, dtype=torch.long), given), 1)
        padded[1], mask = torch.cat((given[1], padded[1, :PADDING])), torch.ones_like(padded)
        mask[0, :PADDING], mask[1, LENGTH:] = 0, 0  # the first row is padded on the left, the second on the right
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        made = net(padded, attention_mask=mask, position_ids=positions).logits.numpy()
        close(made[0, PADDING:], wanted[0])
        close(made[1, :LENGTH], wanted[1])
