"""Rerankers: sentence-transformers' CrossEncoder ranks texts as weft does."""

from __future__ import annotations

from pathlib import Path

import pytest
from sentence_transformers import CrossEncoder

from ...backends.runtime.ort.test_ort_encoder import TEXTS, compiled
from ...e2e.head_models import save, tokenizer


@pytest.mark.parametrize("activation", ["", "torch.nn.modules.linear.Identity"])
def test_ranks_equal_those_of_a_cross_encoder(activation: str, tmp_path: Path) -> None:
    more = {"sentence_transformers": {"activation_fn": activation}} if activation else {}
    save(tmp_path, "BertForSequenceClassification", num_labels=1, **more)
    want = CrossEncoder(str(tmp_path), device="cpu").rank(TEXTS[1], TEXTS)
    got = compiled(tmp_path).rank(TEXTS[1], TEXTS)
    assert [r.index for r in got] == [r["corpus_id"] for r in want]
    assert [r.score for r in got] == pytest.approx([float(r["score"]) for r in want], abs=1e-5)


def test_logit_score_model_ranks_like_a_cross_encoder(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} ? {% endfor %}"
    config = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config |= {"intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "num_key_value_heads": 2}
    save(tmp_path / "lm", "Qwen3ForCausalLM", config, tie_word_embeddings=True)
    tokenizer(chat_template=template, padding_side="left").save_pretrained(tmp_path / "lm")
    theirs = CrossEncoder(str(tmp_path / "lm"), device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    want = theirs.rank(TEXTS[1], TEXTS)
    got = compiled(tmp_path / "saved").rank(TEXTS[1], TEXTS)
    assert [r.index for r in got] == [r["corpus_id"] for r in want]
    assert [r.score for r in got] == pytest.approx([float(r["score"]) for r in want], abs=1e-5)
