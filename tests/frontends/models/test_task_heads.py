"""Heads by the class that a config names: labels, names of their tensors, heads that are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.models.families import FAMILIES
from weft.frontends.models.task_heads import (
    Head,
    add_head,
    add_token_head,
    extract_encoder,
    find_base_classes,
    find_class_suffix,
    find_unread_head,
    read_labels,
    write_head_config,
)
from weft.ir import MemoryReader, WeftError

from .families.tables import SIZES

BERT, LLAMA = FAMILIES["bert"], FAMILIES["llama"]
TOKENS = {**SIZES, "architectures": ["BertForTokenClassification"], "id2label": {"1": "B", "0": "A"}}


@pytest.mark.parametrize(
    ("config", "labels"),
    [({}, 2), ({"num_labels": 5}, 5), ({"id2label": {"10": "c", "2": "b", "0": "a"}}, ("a", "b", "c"))],
)
def test_labels_are_ordered_by_id(config: dict[str, Any], labels: Any) -> None:
    assert read_labels(config) == labels


def test_ids_of_labels_must_be_integers() -> None:
    with pytest.raises(WeftError, match=r"id2label=.* must map integers to names"):
        read_labels({"id2label": {"x": "a"}})


@pytest.mark.parametrize(
    ("name", "suffix", "base"),
    [
        ("BertForMaskedLM", "ForMaskedLM", "BertModel"),
        ("GPT2LMHeadModel", "LMHeadModel", "GPT2Model"),
        ("BertModel", "", "BertModel"),
    ],
)
def test_classes_have_a_suffix_after_the_base_model(name: str, suffix: str, base: str) -> None:
    assert find_class_suffix({"architectures": [name]}) == suffix
    assert find_base_classes({"architectures": [name]}) == [base]
    assert find_class_suffix({"architectures": None}) == find_class_suffix({}) == ""


def test_the_head_of_the_stated_class_is_added() -> None:
    keys = frozenset(["classifier.weight", "classifier.bias", "bert.embeddings.word_embeddings.weight"])
    table, left_out = add_head(BERT, TOKENS, keys, "config.json")
    assert left_out is None and table.names["head.out"] == "classifier"
    head = table.read(TOKENS, keys, "config.json").head
    assert head is not None and (head.task, head.labels) == ("token-classification", ("A", "B"))


def test_a_head_that_the_checkpoint_lacks_is_left_out() -> None:
    table, left_out = add_head(BERT, TOKENS, frozenset(["bert.pooler.dense.weight"]), "config.json")
    assert left_out is not None and (left_out.kind, left_out.name, left_out.changes) == ("head", "classifier", True)
    assert "head.out" not in table.names
    assert add_head(BERT, {**TOKENS, "architectures": ["BertModel"]}, frozenset(), "c") == (BERT, None)


def test_classes_that_no_table_lists_are_left_out() -> None:
    config = {"architectures": ["BertForMagic"]}
    part = find_unread_head(BERT, config, ["magic.weight", "bert.x", "cls.position_ids"])
    assert part is not None and part.name == "magic" and "weft reads only the heads ForSequence" in part.detail
    assert find_unread_head(BERT, config, ["bert.x"]) is None
    assert find_unread_head(BERT, TOKENS, ["magic.weight"]) is None
    causal = {"architectures": ["BertForCausalLM"]}
    assert find_unread_head(BERT, causal, ["cls.x"], logits=True) is None
    assert find_unread_head(BERT, causal, ["cls.x"]) is not None


def test_token_heads_subtract_the_second_row() -> None:
    rows = np.arange(97 * 32, dtype=np.float32).reshape(97, 32)
    for tokens, wanted in (([5], rows[5:6]), ([5, 3], rows[5:6] - rows[3:4])):
        table = add_token_head(LLAMA, SIZES, frozenset(["lm_head.weight"]), "config.json", tokens)
        settings = table.read(SIZES, frozenset(), "config.json")
        recipe = table.recipe("head.out.weight", settings, frozenset(["lm_head.weight"]))
        assert recipe is not None
        np.testing.assert_array_equal(recipe.evaluate(MemoryReader({"lm_head.weight": rows})), wanted)
    with pytest.raises(WeftError, match=r"^c: LogitScore needs a decoder"):
        add_token_head(BERT, SIZES, frozenset(), "c", [5])


def test_configs_of_heads_are_written_back() -> None:
    assert write_head_config(LLAMA, {}) == {}
    meta = {"task": "token-classification", "labels": ["A", "B"], "problem_type": "x"}
    assert write_head_config(LLAMA, meta) == {
        **{"architectures": ["LlamaForTokenClassification"], "problem_type": "x"},
        **{"id2label": {0: "A", 1: "B"}, "label2id": {"A": 0, "B": 1}},
    }


def test_encoders_are_extracted_from_encoder_decoders() -> None:
    encoder = extract_encoder(FAMILIES["t5"])
    assert encoder.settings["kind"] == "encoder" and list(encoder.tasks) == ["ForTokenClassification"]
    assert "layers.{i}.attn.q" in encoder.names and "is_encoder_decoder" not in encoder.refuse


def test_biases_of_tied_heads_have_two_names() -> None:
    head = Head("fill-mask", "cls.decoder", out_bias="cls.bias", dense="cls.dense", norm="cls.norm")
    found = head.names()
    assert {name for name in found if isinstance(found[name], str)} == {
        "head.out", "head.transform.dense", "head.transform.norm",
    }  # fmt: skip
    table = BERT.derive("bert", names=found)
    settings = table.read(SIZES, frozenset(), "c")
    for keys, name in (
        ([], "cls.bias"),
        (["cls.decoder.bias"], "cls.decoder.bias"),
        (["cls.decoder.bias", "cls.bias"], "cls.bias"),
    ):
        recipe = table.recipe("head.out.bias", settings, frozenset(keys))
        assert recipe is not None and [n.removeprefix("bert.") for n in recipe.sources()] == [name]
