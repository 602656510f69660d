"""SmolLM2 from its GGUF to English, held against Hugging Face transformers on the same dequantized weights.

`make test` takes shorter texts than ``WEFT_TESTS=all``.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import weft
from weft.backends.runtime.core.generation import Generator

from ..sampling import ALL, others_long

CHUNK = 512 if ALL else 128
PROMPTS = (1, CHUNK), (7, CHUNK), (64, 50), (CHUNK + 1, CHUNK)  # tokens and chunk: the last two cross it
NEW = 64 if ALL else 24  # tokens that are generated
TEXT = 200 if ALL else 32  # tokens that are scored


@pytest.fixture(scope="module")
def folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "last"
    weft.compile(smollm2_gguf, out, max_length=1024)
    return out


@pytest.fixture(scope="module")
def everything(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the logits of all positions."""
    out = tmp_path_factory.mktemp("smollm2") / "all"
    weft.compile(smollm2_gguf, out, passes="default,-last-token-logits", max_length=1024)
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> Generator:
    loaded = weft.load(folder)
    assert isinstance(loaded, Generator)
    return loaded


def hf_logits(hf_model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    return _logits(hf_model, tuple(ids))


@functools.lru_cache(maxsize=8)  # each test asks for the same prompts
def _logits(hf_model: torch.nn.Module, ids: tuple[int, ...]) -> np.ndarray:
    with torch.inference_mode():
        return hf_model(torch.tensor([ids])).logits[0].float().numpy()


def hf_greedy(hf_model: torch.nn.Module, ids: list[int], found: list[int]) -> list[int]:
    """The likeliest token of transformers after `ids` and after each of `found` but the last.

    They equal `found` exactly where transformers continues `ids` with it; one pass tells, in place of a step per token.
    """
    return hf_logits(hf_model, ids + found)[len(ids) - 1 : -1].argmax(-1).tolist()


def test_logits_of_all_positions_equal_transformers(hf_model: torch.nn.Module, everything: Path) -> None:
    loaded = weft.load(everything)
    text = np.random.default_rng(7).integers(20, 49_000, CHUNK + 1).tolist()
    wanted = hf_logits(hf_model, text)  # of every beginning of it: no token sees a later one
    for length, chunk in PROMPTS:
        got, want = loaded.logits(text[:length], chunk=chunk), wanted[:length]
        assert got.shape == want.shape
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max(), length


@pytest.mark.long
def test_kept_blocks_give_the_same_tokens(
    hf_model: torch.nn.Module, smollm2_gguf: Path, root: Path, tmp_path: Path
) -> None:
    """Its Q4_1 layers and Q8_0 embedding, multiplied as they are stored."""
    weft.compile(
        smollm2_gguf, tmp_path / "kept", passes="default,-last-token-logits", max_length=640, keep_blocks="all"
    )
    assert sum(f.stat().st_size for f in (tmp_path / "kept").iterdir()) < 0.45 * 538e6
    kept = weft.load(tmp_path / "kept")
    text = kept.tokenizer.encode((root / "LICENSE").read_text(encoding="utf-8"))
    wanted = hf_logits(hf_model, text[: CHUNK + 1])
    for n in (1, 7, 64, CHUNK + 1):
        assert np.abs(kept.logits(text[:n], chunk=CHUNK) - wanted[:n]).max() <= 1e-4 * np.abs(wanted[:n]).max(), n
    ids = kept.tokenizer.encode("The three laws of motion, explained to a child: ")
    unstopped = Generator(kept.decoder, folder=kept.folder)
    found = unstopped.generate(ids, max_tokens=NEW)[0].tokens
    assert found == hf_greedy(hf_model, ids, found)
    assert len(found) == NEW


@pytest.mark.parametrize("chunk", others_long([7, 512, 33]))
def test_greedy_tokens_equal_transformers_whatever_the_chunk(
    hf_model: torch.nn.Module, model: Generator, chunk: int
) -> None:
    ids = model.tokenizer.encode("The three laws of motion, explained to a child: " * 8)
    unstopped = Generator(model.decoder, folder=model.folder)  # no stop tokens: all are compared
    found = unstopped.generate(ids, max_tokens=NEW, chunk=chunk)[0].tokens
    assert found == hf_greedy(hf_model, ids, found)
    assert len(found) == NEW


@pytest.mark.long
def test_padded_batch_equals_separate_prompts(model: Generator) -> None:
    texts = ["Hello", "The capital of France is", "List the first ten prime numbers, then explain why 1 is not one."]
    together = model.generate(texts, max_tokens=NEW // 2)
    long = [t * 10 for t in texts]  # 10 to 160 tokens: beyond one chunk, so rows are prefilled one by one
    together += model.generate(long, max_tokens=8, chunk=32)
    alone = [model.generate(t, max_tokens=NEW // 2)[0] for t in texts] + [
        model.generate(t, max_tokens=8)[0] for t in long
    ]
    assert [r.tokens for r in together] == [r.tokens for r in alone]


@pytest.mark.long
def test_genai_generates_the_same_tokens(hf_model: torch.nn.Module, model: Generator, folder: Path) -> None:
    import onnxruntime_genai as og

    text = "Rain falls because"
    theirs = og.Model(str(folder))
    tokenizer = og.Tokenizer(theirs)
    ids = tokenizer.encode(text).tolist()
    assert ids == model.tokenizer.encode(text)
    params = og.GeneratorParams(theirs)
    params.set_search_options(max_length=len(ids) + NEW, min_length=len(ids) + NEW)
    generator = og.Generator(theirs, params)
    generator.append_tokens(ids)
    found: list[int] = []
    while not generator.is_done() and len(found) < NEW:
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    assert found == hf_greedy(hf_model, ids, found)
    assert len(found) == NEW


def test_chat_about_paris_is_answered(model: Generator) -> None:
    prompt = model.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    stream = model.stream(prompt, max_tokens=60)
    text = "".join(stream)
    assert "Paris" in text
    assert text == stream.result.text
    assert stream.result.finish == "stop"


def test_a_decoder_layer_is_at_most_ten_nodes_without_shape_plumbing(folder: Path) -> None:
    nodes = onnx.load(folder / "model.onnx", load_external_data=False).graph.node
    inner = [n for n in nodes if ".layers.15." in f".{n.name}."]
    assert 0 < len(inner) <= 10, [n.op_type for n in inner]
    assert not {n.op_type for n in inner} & {"Shape", "Gather", "Reshape", "Unsqueeze", "Concat", "Range"}
    shapes = [n for n in nodes if n.op_type == "Shape"]
    assert len(shapes) <= 2  # the total length and that of the call, once for the whole model


@pytest.mark.long
def test_likelihood_equals_transformers(
    hf_model: torch.nn.Module, model: Generator, everything: Path, smollm2_gguf: Path, root: Path, tmp_path: Path
) -> None:
    """Of the source, and of what was compiled from it."""
    text = tmp_path / "text.md"
    text.write_text((root / "docs" / "ir.md").read_text())
    found = weft.evaluate([everything], against=smollm2_gguf, text=text, tokens=TEXT, device="cpu")
    ids = torch.tensor([model.tokenizer.encode(text.read_text())[: TEXT + 1]])
    with torch.inference_mode():
        loss = hf_model(ids, labels=ids).loss.item()
    original, same = found.scores
    assert abs(original.nll - loss) < 1e-4 and found.tokens == TEXT
    assert (same.nll, same.kl, same.agreement) == (original.nll, 0, 1)
    assert original.parameters == sum(p.numel() for p in hf_model.parameters())
    assert original.cache_bytes == 30 * 3 * 64 * 2 * 4
