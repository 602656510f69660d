"""Printed answers of models with a head, by task; the scores come from a stub of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weft.frontends.app.cli.answers_output import print_task
from weft.ir.errors import WeftError


def stub(task: str, labels: tuple[str, ...] = ("bad", "good"), **methods: Any) -> Any:
    return SimpleNamespace(folder="out", task=SimpleNamespace(name=task, labels=labels), **methods)


def span(score: float, text: str) -> Any:
    return SimpleNamespace(score=score, text=text, label="PER", start=0, end=len(text))


def classify(inputs: list[Any]) -> list[dict[str, float]]:
    return [{"good": 0.75, "bad": 0.25} for _ in inputs]


@pytest.mark.parametrize(
    ("model", "pairs", "lines"),
    [
        (stub("question-answering", answer=lambda text, pair: [span(0.5, pair)]), ["a cat"], ["0.5000\ta cat"]),
        (
            stub("multiple-choice", choose=lambda text, pairs: [0.25, 0.75]),
            ["no", "yes"],
            ["0.7500\tyes", "0.2500\tno"],
        ),
        (stub("fill-mask", fill=lambda text: [{"cat": 0.5, "dog": 0.125}]), [], ["0.5000\tcat", "0.1250\tdog"]),
        (stub("token-classification", tag=lambda text: [span(1.0, "Ada")]), [], ["1.0000\tPER\tAda\t0:3"]),
        (
            stub("text-classification", ("score",), rank=lambda text, pairs: [SimpleNamespace(score=0.5, index=1)]),
            ["a", "b"],
            ["0.5000\tb"],
        ),
        (stub("text-classification", classify=classify), [], ["0.7500\tgood", "0.2500\tbad"]),
        (stub("next-sentence-prediction", classify=classify), ["then"], ["0.7500\tgood", "0.2500\tbad"]),
    ],
)
def test_each_answer_is_a_line_after_its_score(
    model: Any, pairs: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    print_task(model, "who is it", pairs)
    assert capsys.readouterr().out.splitlines() == lines


def test_control_characters_of_answers_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_task(stub("fill-mask", fill=lambda text: [{"\x1b[2J": 0.5}]), "x", [])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "text", "pairs", "words"),
    [
        ("question-answering", "who", [], "a question needs one context, not 0: give it by --pair, once"),
        ("question-answering", "who", ["a", "b"], "a question needs one context, not 2: give it by --pair, once"),
        ("multiple-choice", "who", [], "needs at least one choice: give each by --pair"),
        ("fill-mask", "a [MASK]", ["b"], "a model for fill-mask reads one text: leave out --pair"),
        ("fill-mask", [1, 2], [], "--ids needs a model that labels one sequence, and out is for fill-mask"),
        ("text-classification", [1, 2], ["b"], "--ids needs a model that labels one sequence"),
        ("image-classification", "a", [], "which `weft run` does not print: use `weft.load`"),
    ],
)
def test_second_texts_that_a_task_lacks_or_does_not_take_are_refused(
    task: str, text: Any, pairs: list[str], words: str
) -> None:
    with pytest.raises(WeftError, match=words.replace("[", r"\[").replace("?", r"\?")):
        print_task(stub(task, answer=None), text, pairs)
