"""lm-eval scores a folder by tasks in local files; `weft eval` and weft's own ONNX reach the same scores."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import yaml
from lm_eval.tasks import TaskManager

import weft

from ...frontends.tokenizer_files import LICENSE

WINDOW, WINDOWS = 48, 3
QUESTIONS = {
    "The capital of France is": " Paris",
    "Two plus two is": " four",
    "The sun rises in the": " west",
}


def test_lm_eval_perplexity_equals_weft_eval(smollm2: Path, tmp_path: Path) -> None:
    """Both read windows that do not overlap. Where the last is full, lm-eval reads nothing twice.

    lm-eval puts the token in front that begins texts; `weft eval` reads it with the text.
    """
    tokenizer = weft.load(smollm2_onnx(smollm2, tmp_path)).tokenizer
    tokens = tokenizer.encode(LICENSE.read_text(encoding="utf-8"))[: WINDOW * WINDOWS]
    text = tokenizer.decode(tokens)
    assert tokenizer.encode(text) == tokens
    told = scored(tmp_path, smollm2, [{"text": text}], task("text", "loglikelihood_rolling", "bits_per_byte"))
    (tmp_path / "text.txt").write_text("<|im_start|>" + text, encoding="utf-8")
    ours = weft.evaluate(against=smollm2, text=tmp_path / "text.txt", context=WINDOW, tokens=10_000)
    assert ours.tokens == WINDOW * WINDOWS
    nll = ours.scores[0].nll
    assert nll is not None
    bits = nll * ours.tokens / len(text.encode()) / math.log(2)
    assert abs(told["bits_per_byte,none"] - bits) <= 1e-5 * bits


def test_lm_eval_scores_equal_onnx_log_probabilities(smollm2: Path, tmp_path: Path) -> None:
    rows = [{"question": question, "answer": answer} for question, answer in QUESTIONS.items()]
    told = scored(tmp_path, smollm2, rows, task("answers", "loglikelihood", "perplexity", "acc"))
    model = weft.load(smollm2_onnx(smollm2, tmp_path))
    found, right = [], []
    for question, answer in QUESTIONS.items():
        before, after = model.tokenizer.encode(question), model.tokenizer.encode(answer)
        logits = np.asarray(model.logits([*before, *after]), np.float64)[len(before) - 1 : -1]
        likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found.append(likely[np.arange(len(after)), after].sum())
        right.append(bool((logits.argmax(-1) == after).all()))
    assert 0 < sum(right) < len(right) and told["acc,none"] == np.mean(right)
    perplexity = math.exp(-np.mean(found))
    assert abs(told["perplexity,none"] - perplexity) <= 1e-4 * perplexity


def smollm2_onnx(folder: Path, out: Path) -> Path:
    """Return the folder for ONNX Runtime that weft compiles of `folder`."""
    if not (out / "onnx").exists():
        weft.compile(folder, out / "onnx", passes="default,-last-token-logits")
    return out / "onnx"


def task(name: str, kind: str, *metrics: str) -> dict[str, Any]:
    """Return the description of a task, as a file of YAML has it."""
    text, target = ("", "{{text}}") if name == "text" else ("{{question}}", "{{answer}}")
    return {
        "task": name,
        "dataset_path": "json",
        "output_type": kind,
        "test_split": "test",
        "doc_to_text": text,
        "doc_to_target": target,
        "target_delimiter": "",
        "metric_list": [{"metric": metric} for metric in metrics],
    }


def scored(folder: Path, model: Path, rows: list[dict[str, str]], description: dict[str, Any]) -> dict[str, Any]:
    """Return what lm-eval tells of `model` on `rows` by a task that `description` describes, both written to files."""
    data, name = folder / "rows.jsonl", description["task"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    description = {**description, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    (folder / "tasks").mkdir()
    (folder / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump(description), encoding="utf-8")
    arguments = {"pretrained": str(model), "trust_remote_code": True, "dtype": "float32", "max_length": WINDOW}
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=[name],
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
    )
    assert found is not None
    told: dict[str, Any] = found["results"][name]
    return told
