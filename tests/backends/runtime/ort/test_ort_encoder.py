"""Encoders in the runtime: texts become vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import pipeline

import weft
from weft.backends.runtime.ort.ort_encoder import EncoderModel
from weft.ir.errors import WeftError

from ....e2e.head_models import save as save_head
from ....e2e.head_models import tokenizer
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


SENTENCES = ["the cat sat on the mat .", "a dog ran", "who was it , the very good dog ? it was not the cat !"]
PROBLEMS = ["single_label_classification", "multi_label_classification", "regression"]
NAMES = {0: "bad", 1: "good", 2: "unsure"}


def compiled(folder: Path, target: str = "ort-cpu") -> EncoderModel:
    weft.compile(folder, folder / "out", target=target)
    model = weft.load(folder / "out", trust=True)
    assert isinstance(model, EncoderModel)
    return model


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("target", ["ort-cpu", "torch"])
def test_labels_of_texts_equal_the_pipeline(problem: str, target: str, tmp_path: Path) -> None:
    model = save_head(tmp_path, "BertForSequenceClassification", id2label=NAMES, problem_type=problem)
    theirs = pipeline("text-classification", model=model, tokenizer=tokenizer(), top_k=None)
    got = compiled(tmp_path, target).classify(SENTENCES)
    for ours, want in zip(got, theirs(SENTENCES), strict=True):
        assert list(ours) == [line["label"] for line in want]
        assert list(ours.values()) == pytest.approx([line["score"] for line in want], abs=1e-5)


def test_pairs_have_the_token_types_of_the_tokenizer(tmp_path: Path) -> None:
    model = save_head(tmp_path, "BertForSequenceClassification", num_labels=2)
    pairs = [(SENTENCES[0], SENTENCES[1]), (SENTENCES[1], SENTENCES[2])]
    ours = compiled(tmp_path).classify(pairs)
    for pair, got in zip(pairs, ours, strict=True):
        with torch.inference_mode():
            want = model(**tokenizer()(*pair, return_tensors="pt")).logits.softmax(-1)[0]
        assert [got["LABEL_0"], got["LABEL_1"]] == pytest.approx(want.tolist(), abs=1e-5)


def test_tags_equal_the_pipeline(tmp_path: Path) -> None:
    model = save_head(tmp_path, "BertForTokenClassification", id2label={0: "O", 1: "NAME", 2: "PLACE"})
    theirs = pipeline("token-classification", model=model, tokenizer=tokenizer())
    ours = compiled(tmp_path)
    for text in SENTENCES:
        got = [(s.label, s.start, s.end) for s in ours.tag(text)]
        assert got == [(t["entity"], t["start"], t["end"]) for t in theirs(text)]
        scores = [s.score for s in ours.tag(text)]
        assert scores == pytest.approx([float(t["score"]) for t in theirs(text)], abs=1e-5)


def test_tokens_for_masks_equal_the_pipeline(tmp_path: Path) -> None:
    model = save_head(tmp_path, "BertForMaskedLM")
    text = "the [MASK] sat on the [MASK] ."
    theirs = pipeline("fill-mask", model=model, tokenizer=tokenizer(), top_k=3)(text)
    got = compiled(tmp_path).fill(text, top=3)
    assert [list(best) for best in got] == [[line["token_str"] for line in mask] for mask in theirs]
    scores = [list(best.values()) for best in got]
    assert np.allclose(scores, [[line["score"] for line in mask] for mask in theirs], atol=1e-5)


def test_extractive_answer_is_the_likeliest_span(tmp_path: Path) -> None:
    model = save_head(tmp_path, "BertForQuestionAnswering")
    question, context = "who ran ?", SENTENCES[2]
    encoded = tokenizer()(question, context, return_tensors="pt", return_offsets_mapping=True)
    offsets, inside = encoded.pop("offset_mapping")[0], np.array(encoded.sequence_ids(0)) == 1
    with torch.inference_mode():
        made = model(**encoded)
    first, last = (x[0].masked_fill(torch.tensor(~inside), -torch.inf).softmax(0) for x in made.to_tuple())
    best = max((float(first[i] * last[j]), i, j) for i in range(len(first)) for j in range(i, min(i + 4, len(last))))
    (got,) = compiled(tmp_path).answer(question, context, longest=4)
    assert (got.start, got.end) == (int(offsets[best[1]][0]), int(offsets[best[2]][1]))
    assert got.text == context[got.start : got.end] and got.score == pytest.approx(best[0], abs=1e-5)


def test_choices_equal_transformers(tmp_path: Path) -> None:
    model = save_head(tmp_path, "BertForMultipleChoice")
    encoded = tokenizer()([SENTENCES[0]] * 3, SENTENCES, padding=True, return_tensors="pt")
    with torch.inference_mode():
        want = model(**{k: v[None] for k, v in encoded.items()}).logits.softmax(-1)[0]
    assert compiled(tmp_path).choose(SENTENCES[0], SENTENCES) == pytest.approx(want.tolist(), abs=1e-5)


def test_padding_of_a_batch_changes_nothing(tmp_path: Path) -> None:
    save_head(tmp_path, "BertForSequenceClassification", num_labels=3)
    model = compiled(tmp_path)
    for together, alone in zip(model.classify(SENTENCES), model.classify(SENTENCES, batch=1), strict=True):
        assert together == pytest.approx(alone, abs=1e-6)


def test_methods_of_another_head_are_refused(tmp_path: Path) -> None:
    save_head(tmp_path / "base", "BertModel")
    with pytest.raises(weft.WeftError, match="without a head"):
        compiled(tmp_path / "base").classify("a cat")
    save_head(tmp_path / "three", "BertForSequenceClassification", num_labels=3)
    model = compiled(tmp_path / "three")
    with pytest.raises(weft.WeftError, match="has 3 labels, but ranking needs a model with one"):
        model.rank("a", ["b"])
    with pytest.raises(weft.WeftError, match="text-classification, so it cannot do fill-mask"):
        model.fill("a [MASK]")
    with pytest.raises(weft.WeftError, match="longer than the maximum"):
        model.classify("a " * 40)
    assert model.classify("a " * 40, truncate=True)
    facts = json.loads((tmp_path / "three" / "out" / "weft.json").read_text())
    assert (facts["task"], facts["labels"]) == ("text-classification", ["LABEL_0", "LABEL_1", "LABEL_2"])
