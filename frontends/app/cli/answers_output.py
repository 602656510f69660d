"""Printing of answers of models with a head: labels, spans, tokens, ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.ir.errors import WeftError

from .terminal import echo, escape_controls

if TYPE_CHECKING:
    from weft.backends.runtime.ort.ort_encoder import EncoderModel


def print_task(model: EncoderModel, text: str | list[int], pairs: Sequence[str]) -> None:
    """Print a line for each label, token, answer or candidate of `pairs`; the line begins with its score.

    Raise WeftError if the task cannot be printed, or does not fit token ids or the number of `pairs`.
    """
    assert model.task is not None
    task = model.task.name
    if isinstance(text, list) and (pairs or task != "text-classification"):
        raise WeftError(f"--ids needs a model that labels one sequence, and {model.folder} is for {task}: use --prompt")
    inputs: Any = text  # the check above rejects ids for methods that need text
    if task == "question-answering":
        if len(pairs) != 1:
            raise WeftError(f"a question needs one context, not {len(pairs)}: give it by --pair, once")
        _print_scores((span.score, span.text) for span in model.answer(inputs, pairs[0]))
    elif task == "multiple-choice":
        if not pairs:
            raise WeftError("a multiple-choice model needs at least one choice: give each by --pair")
        _print_scores(sorted(zip(model.choose(inputs, pairs), pairs, strict=True), reverse=True))
    elif task in ("fill-mask", "token-classification"):
        if pairs:
            raise WeftError(f"a model for {task} reads one text: leave out --pair")
        if task == "fill-mask":
            for best in model.fill(inputs):
                _print_scores((score, token) for token, score in best.items())
        else:
            _print_scores((s.score, f"{s.label}\t{s.text}\t{s.start}:{s.end}") for s in model.tag(inputs))
    elif task == "text-classification" and len(pairs) > 0 and len(model.task.labels) == 1:
        _print_scores((rank.score, pairs[rank.index]) for rank in model.rank(inputs, pairs))
    elif task in ("text-classification", "next-sentence-prediction"):
        for scores in model.classify([(text, pair) for pair in pairs] if pairs else [text]):
            _print_scores((score, label) for label, score in scores.items())
    else:
        raise WeftError(f"{model.folder} has a model for {task}, which `weft run` does not print: use `weft.load`")


def _print_scores(lines: Any) -> None:
    for score, answer in lines:
        echo(f"{score:.4f}\t{escape_controls(answer)}")
