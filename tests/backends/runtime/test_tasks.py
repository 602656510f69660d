"""Answers of models with a head against transformers' pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import pipeline

import weft
from weft.backends.runtime.ort.ort_encoder import EncoderModel

from ...e2e.head_models import save, tokenizer

TEXTS = ["the cat sat on the mat .", "a dog ran", "who was it , the very good dog ? it was not the cat !"]
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
    model = save(tmp_path, "BertForSequenceClassification", id2label=NAMES, problem_type=problem)
    theirs = pipeline("text-classification", model=model, tokenizer=tokenizer(), top_k=None)
    got = compiled(tmp_path, target).classify(TEXTS)
    for ours, want in zip(got, theirs(TEXTS), strict=True):
        assert list(ours) == [line["label"] for line in want]
        assert list(ours.values()) == pytest.approx([line["score"] for line in want], abs=1e-5)


def test_pairs_have_the_token_types_of_the_tokenizer(tmp_path: Path) -> None:
    model = save(tmp_path, "BertForSequenceClassification", num_labels=2)
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[2])]
    ours = compiled(tmp_path).classify(pairs)
    for pair, got in zip(pairs, ours, strict=True):
        with torch.inference_mode():
            want = model(**tokenizer()(*pair, return_tensors="pt")).logits.softmax(-1)[0]
        assert [got["LABEL_0"], got["LABEL_1"]] == pytest.approx(want.tolist(), abs=1e-5)


def test_tags_equal_the_pipeline(tmp_path: Path) -> None:
    model = save(tmp_path, "BertForTokenClassification", id2label={0: "O", 1: "NAME", 2: "PLACE"})
    theirs = pipeline("token-classification", model=model, tokenizer=tokenizer())
    ours = compiled(tmp_path)
    for text in TEXTS:
        got = [(s.label, s.start, s.end) for s in ours.tag(text)]
        assert got == [(t["entity"], t["start"], t["end"]) for t in theirs(text)]
        scores = [s.score for s in ours.tag(text)]
        assert scores == pytest.approx([float(t["score"]) for t in theirs(text)], abs=1e-5)


def test_tokens_for_masks_equal_the_pipeline(tmp_path: Path) -> None:
    model = save(tmp_path, "BertForMaskedLM")
    text = "the [MASK] sat on the [MASK] ."
    theirs = pipeline("fill-mask", model=model, tokenizer=tokenizer(), top_k=3)(text)
    got = compiled(tmp_path).fill(text, top=3)
    assert [list(best) for best in got] == [[line["token_str"] for line in mask] for mask in theirs]
    scores = [list(best.values()) for best in got]
    assert np.allclose(scores, [[line["score"] for line in mask] for mask in theirs], atol=1e-5)


def test_extractive_answer_is_the_likeliest_span(tmp_path: Path) -> None:
    model = save(tmp_path, "BertForQuestionAnswering")
    question, context = "who ran ?", TEXTS[2]
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
    model = save(tmp_path, "BertForMultipleChoice")
    encoded = tokenizer()([TEXTS[0]] * 3, TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        want = model(**{k: v[None] for k, v in encoded.items()}).logits.softmax(-1)[0]
    assert compiled(tmp_path).choose(TEXTS[0], TEXTS) == pytest.approx(want.tolist(), abs=1e-5)


def test_padding_of_a_batch_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, "BertForSequenceClassification", num_labels=3)
    model = compiled(tmp_path)
    for together, alone in zip(model.classify(TEXTS), model.classify(TEXTS, batch=1), strict=True):
        assert together == pytest.approx(alone, abs=1e-6)


def test_methods_of_another_head_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "base", "BertModel")
    with pytest.raises(weft.WeftError, match="without a head"):
        compiled(tmp_path / "base").classify("a cat")
    save(tmp_path / "three", "BertForSequenceClassification", num_labels=3)
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
