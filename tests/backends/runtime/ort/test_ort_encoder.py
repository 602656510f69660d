"""Encoders in the runtime: texts become vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from weft.backends.runtime.ort.ort_encoder import EncoderModel
from weft.ir.errors import WeftError

from ...handmade import DIM, VOCAB, Values, encoder, graph, opened, save

WORDS = ["[CLS]", "[SEP]", "[PAD]", "the", "cat", "sat", "on", "mat"]
TEXTS = ["the cat sat", "mat", "the cat on mat", "sat"]
IDS = [[0, 3, 4, 5, 1], [0, 7, 1], [0, 3, 4, 6, 7, 1], [0, 5, 1]]


@pytest.fixture
def tables(rng: np.random.Generator) -> tuple[Values, Values]:
    words, kinds = (rng.standard_normal((n, DIM)).astype(np.float32) for n in (VOCAB, 2))
    return words, kinds


def write_tokenizer(folder: Path) -> None:
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="mat"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)])
    fast.enable_padding(length=128)
    fast.enable_truncation(5)
    fast.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("types", [True, False], ids=["types", "no-types"])
@pytest.mark.parametrize("batch", [1, 3, 32])
def test_vectors_are_pooled_and_normalized(
    tmp_path: Path, tables: tuple[Values, Values], types: bool, batch: int
) -> None:
    model = opened(save(tmp_path, encoder(tables, types=types), kind="encoder"))
    assert isinstance(model, EncoderModel)
    write_tokenizer(tmp_path)
    hidden = [tables[0][ids] + (tables[1][0] if types else 0) for ids in IDS]
    hidden = [h + h.mean(0) for h in hidden]
    close: Any = {"rtol": 0, "atol": 2**-20}
    mean = np.stack([h.mean(0) for h in hidden])
    np.testing.assert_allclose(model.encode(TEXTS, batch=batch), mean, **close)
    unit = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(model.encode(TEXTS, batch=batch, normalize=True), unit, **close)
    np.testing.assert_allclose(model.encode(TEXTS, batch=batch, pooling="cls"), [h[0] for h in hidden], **close)
    np.testing.assert_allclose(model.encode(TEXTS, batch=batch, pooling="max"), [h.max(0) for h in hidden], **close)
    np.testing.assert_array_equal(model.encode(IDS, batch=batch), model.encode(TEXTS, batch=batch))
    for found, wanted in zip(model.encode(TEXTS, batch=batch, pooling="none"), hidden, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, **close)
    np.testing.assert_allclose(model.encode("mat"), mean[1:2], **close)
    assert len(model.encode([])) == 0


def test_encoder_uses_its_trained_settings_by_default(tmp_path: Path, tables: tuple[Values, Values]) -> None:
    plain = opened(save(tmp_path, encoder(tables), kind="encoder"))
    model = opened(save(tmp_path, encoder(tables), kind="encoder", pooling="cls", normalize=True))
    np.testing.assert_array_equal(model.encode(IDS), plain.encode(IDS, pooling="cls", normalize=True))
    mean, token_vectors = {"pooling": "mean", "normalize": False}, {"pooling": "none"}
    np.testing.assert_array_equal(model.encode(IDS, **mean), plain.encode(IDS))
    np.testing.assert_array_equal(model.encode(IDS[0], **token_vectors), plain.encode(IDS[0], **token_vectors))
    with pytest.raises(WeftError, match="normalize is 'yes', but it must be of type bool"):
        opened(save(tmp_path, encoder(tables), kind="encoder", normalize="yes"))


def test_long_texts_are_refused_or_cut(tmp_path: Path, tables: tuple[Values, Values]) -> None:
    model = opened(save(tmp_path, encoder(tables), kind="encoder"))
    write_tokenizer(tmp_path)
    long = "the cat sat on the mat"
    with pytest.raises(WeftError, match="a text of 8 tokens is longer than the maximum of 6"):
        model.encode(["sat", long])
    found = model.encode(["sat", long], truncate=True)
    np.testing.assert_array_equal(found[1], model.encode("the cat sat on")[0])  # [SEP] stays
    with pytest.raises(WeftError, match="8 tokens"):
        model.encode(long)


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        (["a"], {"pooling": "sum"}, "pooling is 'sum', but it must be one of mean, cls, max, last, weighted, none"),
        (["a"], {"batch": 0}, "batch is 0"),
        (["a"], {"pooling": "none", "truncate_dim": 2}, "truncate_dim cannot cut vectors of single"),
        (["a"], {"prompt": "b", "prompt_name": "query"}, "only one: leave out either"),
        ([3.0], {}, r"a text is 3\.0"),
        ([3, VOCAB], {}, "token 12 of a text is outside the vocabulary of 12"),
        ([3, -1], {}, "token -1 of a text"),
    ],
)
def test_bad_encodings(tmp_path: Path, tables: Any, texts: Any, options: dict[str, Any], words: str) -> None:
    model = opened(save(tmp_path, encoder(tables), kind="encoder"))
    write_tokenizer(tmp_path)
    with pytest.raises(WeftError, match=words):
        model.encode(texts, **options)


def test_bad_encoders(tmp_path: Path, tables: tuple[Values, Values]) -> None:
    with pytest.raises(WeftError, match="no output last_hidden_state"):
        opened(save(tmp_path, encoder(tables, output="embedding"), kind="encoder"))
    with pytest.raises(WeftError, match="its inputs are logits_in, so it is not an encoder"):
        opened(save(tmp_path, graph([], {"logits_in": (1, [1])}, {"logits_in": [1]}), kind="encoder"))
    small = (tables[0][:5], tables[1])
    model = opened(save(tmp_path, encoder(small), kind="encoder", vocab=7))
    write_tokenizer(tmp_path)
    with pytest.raises(WeftError, match="token 7 of a text is outside the vocabulary of 7"):
        model.encode("mat")
    with pytest.raises(WeftError, match=r"ONNX Runtime failed: .*out of data bounds"):
        model.encode("sat")
