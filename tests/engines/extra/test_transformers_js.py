"""Folders of target web in transformers.js, in Node: it computes what transformers and weft compute."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft

from ...e2e.families import ROWS, VOCAB
from ...e2e.head_models import BERT, save
from ...e2e.seq2seq import SEQ2SEQ
from ..node import MODULES

NEW = 12
EXACT = {"session_options": {"extra": {"session": {"qdq_matmulnbits_accuracy_level": "1"}}}}
DECODERS = ("llama-gqa-tied", "qwen3-gqa", "gemma2", "mistral-gqa", "bloom", "mixtral", "gpt-oss", "deepseek-v3", "mpt")
STATES = ("mamba", "mamba2", "qwen3-next", "deepseek_v32", "rwkv", "lfm2", "falcon-h1")  # by loader.js
ENCODERS = ("bert", "modernbert", "deberta-v2", "xlnet")
BOTH_SIDES = ("t5", "bart", "mbart", "umt5")
HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MaskedLM")


def in_node(*jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the replies of transformers.mjs."""
    script = Path(__file__).parents[1] / "transformers.mjs"
    done = subprocess.run(["node", script, MODULES], input=json.dumps(jobs), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    replies: list[dict[str, Any]] = json.loads(done.stdout)
    for reply in replies:
        assert "error" not in reply, reply["error"]
    return replies


@pytest.mark.parametrize("name", [*DECODERS, *STATES, *BOTH_SIDES])
def test_generates_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    row = (ROWS | SEQ2SEQ)[name]
    model: Any = row.save(tmp_path / "hf").eval()
    weft.compile(tmp_path / "hf", tmp_path / "out", target="web", max_length=48, precisions="fp32")
    ids = np.random.default_rng(0).integers(3, VOCAB, (1, 9))
    kind = "Decoder" if name in STATES else "AutoModelForSeq2SeqLM" if name in SEQ2SEQ else "AutoModelForCausalLM"
    fed = {"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()}
    with torch.inference_mode():
        tensors = {key: torch.tensor(rows) for key, rows in fed.items()}
        wanted = model.generate(**tensors, max_new_tokens=NEW, do_sample=False, num_beams=1, eos_token_id=None)
    job = {"folder": str(tmp_path / "out"), "class": kind, "inputs": fed}
    job["generate"] = {"max_new_tokens": NEW, "eos_token_id": -1}  # the loader stops at the model's own
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"] == "weft") == (name in STATES)
    (made,) = in_node(job | {"options": {"dtype": "fp32"}})
    end = len(made["tokens"][0])
    assert made["tokens"][0] == wanted[0].tolist()[:end]
    assert end - 9 * (name not in SEQ2SEQ) > 3  # new tokens


@pytest.mark.parametrize("precision", ["fp32", "fp16", "q8", "q4", "q4f16", "q2"])
def test_every_precision_gives_what_weft_computes_with_it(precision: str, tmp_path: Path) -> None:
    ROWS["llama-gqa-tied"].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", target="web", max_length=48, precisions=precision)
    prompt = np.random.default_rng(0).integers(3, VOCAB, 9).tolist()
    wanted = weft.load(tmp_path / "out").generate(prompt, max_tokens=NEW, temperature=0)[0].tokens
    job = {"folder": str(tmp_path / "out"), "class": "AutoModelForCausalLM", "generate": {"max_new_tokens": NEW}}
    (made,) = in_node(job | {"inputs": {"input_ids": [prompt]}})
    assert made["tokens"][0][9 : 9 + len(wanted)] == wanted


@pytest.mark.parametrize(
    ("name", "precision", "bound"), [*((n, "fp32", 1e-4) for n in ENCODERS), ("bert", "fp16", 2e-2)]
)
def test_encoders_give_the_vectors_of_transformers(name: str, precision: str, bound: float, tmp_path: Path) -> None:
    model: Any = ROWS[name].save(tmp_path / "hf").eval()
    weft.compile(tmp_path / "hf", tmp_path / "out", target="web", precisions=precision)
    ids = np.random.default_rng(0).integers(3, VOCAB, (2, 9))
    mask = (np.arange(9) < [[9], [6]]).astype(np.int64)
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state.numpy()
    fed = {"input_ids": ids.tolist(), "attention_mask": mask.tolist()}
    (made,) = in_node({"folder": str(tmp_path / "out"), "class": "AutoModel", "inputs": fed})
    error = np.abs(np.array(made["outputs"]["last_hidden_state"]) - wanted)[mask == 1].max()
    assert error < bound


@pytest.mark.parametrize("head", HEADS)
def test_heads_give_the_logits_of_transformers(head: str, tmp_path: Path) -> None:
    model: Any = save(tmp_path / "hf", f"Bert{'For' + head}", BERT).eval()
    weft.compile(tmp_path / "hf", tmp_path / "out", target="web", precisions="fp32")
    fed = {"input_ids": [[2, 5, 9, 12, 3]], "attention_mask": [[1] * 5], "token_type_ids": [[0] * 5]}
    with torch.inference_mode():
        wanted = model(**{key: torch.tensor(rows) for key, rows in fed.items()})
    (made,) = in_node({"folder": str(tmp_path / "out"), "class": f"AutoModelFor{head}", "inputs": fed})
    for name, values in wanted.items():
        assert np.abs(np.array(made["outputs"][name]) - values.numpy()).max() < 1e-4


def test_rerankers_score_pairs_as_weft_ranks_them(tmp_path: Path) -> None:
    save(tmp_path / "hf", "BertForSequenceClassification", BERT, num_labels=1)
    weft.compile(tmp_path / "hf", tmp_path / "out", target="web", precisions="fp32")
    query, texts = "where is the cat ?", ["the cat sat on the mat .", "a dog ran far away", "yes"]
    (made,) = in_node(
        {
            "folder": str(tmp_path / "out"),
            "class": "AutoModelForSequenceClassification",
            "pairs": [[query, text] for text in texts],
        }
    )
    scores = 1 / (1 + np.exp(-np.array(made["outputs"]["logits"])[:, 0]))
    ranked = {result.index: result.score for result in weft.load(tmp_path / "out").rank(query, texts)}
    assert [ranked[i] for i in range(3)] == pytest.approx(scores.tolist(), abs=1e-5)


def test_smollm2_continues_texts_as_weft_does_also_in_a_padded_batch(smollm2_gguf: Path, tmp_path: Path) -> None:
    weft.compile(smollm2_gguf, tmp_path / "out", target="web")
    texts = ["The capital of France is", "Water boils at a temperature of about one hundred degrees, and it"]
    job = {"folder": str(tmp_path / "out"), "class": "AutoModelForCausalLM", "generate": {"max_new_tokens": 16}}
    batch, *alone = in_node(job | {"texts": texts}, *(job | {"texts": [text]} for text in texts))
    model = weft.load(tmp_path / "out")
    wanted = [text + model.generate(text, max_tokens=16, temperature=0)[0].text for text in texts]
    assert [one["texts"][0] for one in alone] == wanted
    assert batch["texts"] == wanted


def test_minilm_embeds_as_weft_does(minilm_folder: Path, tmp_path: Path) -> None:
    weft.compile(minilm_folder, tmp_path / "out", target="web", precisions="fp32")
    ids = weft.load(tmp_path / "out").tokenizer.encode("A cat sat on the mat.")
    fed = {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}
    (made,) = in_node({"folder": str(tmp_path / "out"), "class": "AutoModel", "inputs": fed})
    vector = np.array(made["outputs"]["last_hidden_state"])[0].mean(0)
    wanted = weft.load(tmp_path / "out").encode(["A cat sat on the mat."])[0]
    assert np.abs(vector / np.linalg.norm(vector) - wanted / np.linalg.norm(wanted)).max() < 1e-5
