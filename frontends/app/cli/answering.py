"""Print answers of models with a head: labels, spans, tokens, ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.ir.errors import WeftError

from .shown import echo, printable

if TYPE_CHECKING:
    from weft.backends.runtime.ort.encoder import Encoder


def print_task(model: Encoder, text: str | list[int], pairs: Sequence[str]) -> None:
    """Print a line for each label, token, answer or text of `pairs`, the score first.

    Raises:
        WeftError: if the task needs a second text that is not there, or takes none.
    """
    assert model.task is not None
    task = model.task.name
    if isinstance(text, list) and (pairs or task != "text-classification"):
        raise WeftError(f"{model.folder} holds a model for {task}: --ids are for labels of one text; give it --prompt")
    given: Any = text  # ids were refused above where a method takes none
    if task == "question-answering":
        _print((span.score, span.text) for span in model.answer(given, _only(pairs, "the context of the question")))
    elif task == "multiple-choice":
        if not pairs:
            raise WeftError("give each choice by --pair")
        _print(sorted(zip(model.choose(given, pairs), pairs, strict=True), reverse=True))
    elif task in ("fill-mask", "token-classification"):
        if pairs:
            raise WeftError(f"a model for {task} reads one text: leave out --pair")
        if task == "fill-mask":
            for best in model.fill(given):
                _print((score, token) for token, score in best.items())
        else:
            _print((span.score, f"{span.label}\t{span.text}\t{span.start}:{span.end}") for span in model.tag(given))
    elif task == "text-classification" and len(pairs) > 0 and len(model.task.labels) == 1:
        _print((found.score, pairs[found.index]) for found in model.rank(given, pairs))
    elif task in ("text-classification", "next-sentence-prediction"):
        several = [(text, pair) for pair in pairs] if pairs else [text]
        for scores in model.classify(several):
            _print((score, label) for label, score in scores.items())
    else:
        raise WeftError(f"{model.folder} holds a model for {task}, which `weft run` does not print: use `weft.load`")


def _only(pairs: Sequence[str], what: str) -> str:
    if len(pairs) != 1:
        raise WeftError(f"give {what} by --pair, once")
    return pairs[0]


def _print(lines: Any) -> None:
    for score, what in lines:
        echo(f"{score:.4f}\t{printable(what)}")
