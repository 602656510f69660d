"""Answers of models with a head: labels of texts and tokens, spans, tokens for masks, ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from .arrays import Floats
from .core.sampling import check_count
from .text.tokenizer import Encoded, Tokenizer, check_ids, is_ids, padded

if TYPE_CHECKING:
    from ..facts import Task

Pair = tuple[str, str]
BATCH = 32


class Span(NamedTuple):
    """A part of a text from character `start` to `end`, its label (that of an answer is "answer") and its score."""

    text: str
    start: int
    end: int
    label: str
    score: float


@dataclass(frozen=True)
class Ranked:
    """A text by its index, and its score for the query."""

    index: int
    score: float


class Tasks(ABC):
    """The methods of an encoder that has a head; each refuses a head of another task."""

    task: Task | None
    outputs: Collection[str]
    vocab: int
    max_length: int
    compares: bool
    compares_above: int
    folder: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises WeftError when there is none."""
        return Tokenizer(self.folder)

    def run(
        self, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]], names: Sequence[str], skipped: int = 0
    ) -> list[Floats]:
        """Return the outputs `names` for token ids and their types, padded on the right together, as float32; the first
        `skipped` are not pooled."""
        ids, mask = padded(rows)
        mask = mask * np.where(np.arange(mask.shape[1]) < skipped, 2, 1)
        values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": padded(types)[0]}
        return self._outputs(values, names)

    @abstractmethod
    def _outputs(self, values: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[Floats]:
        """Return the outputs `names` for those inputs [rows, longest] that the model takes, float32."""

    def classify(self, texts: Any, *, batch: int = BATCH, truncate: bool = False) -> list[dict[str, float]]:
        """Return for each of `texts` the scores of all labels, the highest first: probabilities (softmax, or sigmoid
        where there is one label or several may hold), or the numbers as they are of a regression.

        A text is a string, token ids, or a pair (text, text). Raises WeftError on a model without such a head, and on
        a text that is longer than the model's maximum (with `truncate` it is cut).
        """
        task = self.needs("text-classification", "next-sentence-prediction")
        scores = self.probabilities(self._scores(_several(texts), batch, truncate))
        return [_by_score(task.labels, row) for row in scores]

    def probabilities(self, logits: Floats) -> Floats:
        """Return what `classify` makes of logits [texts, labels]. Raises WeftError on another task."""
        return _as_problem(logits, self.needs("text-classification", "next-sentence-prediction").problem)

    def rank(
        self, query: str, texts: Sequence[str], *, batch: int = BATCH, truncate: bool = False, top: int | None = None
    ) -> list[Ranked]:
        """Return the `top` of `texts` by their scores for `query`, the highest first.

        The score is that of sentence-transformers' CrossEncoder: the sigmoid of the only label, or what the folder
        says. Raises WeftError where the model scores several labels, and as `classify` does.
        """
        scores = self.scores([(query, text) for text in texts], batch=batch, truncate=truncate)
        order = sorted(range(len(texts)), key=lambda i: -scores[i])
        return [Ranked(i, scores[i]) for i in order[:top]]

    def scores(self, pairs: Sequence[Pair], *, batch: int = BATCH, truncate: bool = False) -> list[float]:
        """Return the score of each pair of texts. Raises WeftError as `rank` does."""
        self.check_ranks()
        return self.relevance(self._scores([self.rendered(*pair) for pair in pairs], batch, truncate))

    def relevance(self, logits: Floats) -> list[float]:
        """Return the scores that `rank` makes of logits [pairs, 1]. Raises WeftError where it ranks nothing."""
        found = logits[:, 0]
        return [float(x) for x in (_sigmoid(found) if self.check_ranks().activation == "sigmoid" else found)]

    def check_ranks(self) -> Task:
        """Return the task of a model that ranks. Raises WeftError for another."""
        task = self.needs("text-classification")
        if len(task.labels) != 1:
            raise WeftError(
                f"{self.folder} scores {len(task.labels)} labels, and ranks by none of them: `classify` gives them all"
            )
        if task.activation not in ("sigmoid", "identity"):
            raise WeftError(
                f"{self.folder} was trained for scores by {task.activation}; weft knows sigmoid and identity"
            )
        return task

    def tag(self, text: str, *, ignore: Sequence[str] = ("O",)) -> list[Span]:
        """Return the tokens of `text` with the likeliest label of each, but those whose label is to be ignored."""
        task, encoded = self.needs("token-classification"), self.encoded(text, False)
        (logits,) = self.run([encoded.ids], [encoded.types], ["logits"])
        found = _softmax(logits[0])
        spans = []
        for i, (start, end) in enumerate(encoded.offsets):
            label = task.labels[int(found[i].argmax())]
            if encoded.parts[i] == 0 and label not in ignore:
                spans.append(Span(text[start:end], start, end, label, float(found[i].max())))
        return spans

    def answer(self, question: str, context: str, *, longest: int = 15, top: int = 1) -> list[Span]:
        """Return the `top` likeliest answers to `question`: parts of `context` of at most `longest` tokens."""
        self.needs("question-answering")
        check_count("longest", longest)
        encoded = self.encoded((question, context), False)
        starts, ends = self.run([encoded.ids], [encoded.types], ["start_logits", "end_logits"])
        inside = np.array([part == 1 for part in encoded.parts])
        if not inside.any():
            raise WeftError("the context has no tokens: give it some text")
        first, last = (_softmax(np.where(inside, x[0], -np.inf)) for x in (starts, ends))
        both = np.triu(np.outer(first, last)) - np.triu(np.outer(first, last), longest)
        found = []
        for at in np.argsort(-both, axis=None, kind="stable")[:top]:
            i, j = divmod(int(at), len(last))
            start, end = encoded.offsets[i][0], encoded.offsets[j][1]
            found.append(Span(context[start:end], start, end, "answer", float(both[i, j])))
        return found

    def fill(self, text: str, *, top: int = 5) -> list[dict[str, float]]:
        """Return for each mask token of `text` its `top` likeliest tokens with their probabilities."""
        from .text.chat import special_token

        self.needs("fill-mask")
        encoded, mask = self.encoded(text, False), special_token(self.folder, "mask_token")
        places = [i for i, token in enumerate(encoded.ids) if mask is not None and token == self.tokenizer.find(mask)]
        if not places:
            raise WeftError(f"the text has no mask token: put {mask or 'one'} where a token is to be found")
        name = "logits" if "logits" in self.outputs else "prediction_logits"  # of a model that has two heads
        (logits,) = self.run([encoded.ids], [encoded.types], [name])
        probabilities = _softmax(logits[0, places])
        order = [np.argsort(-row, kind="stable")[:top] for row in probabilities]
        return [
            {self.tokenizer.token(int(i)): float(row[i]) for i in best}
            for row, best in zip(probabilities, order, strict=True)
        ]

    def choose(self, text: str, choices: Sequence[str], *, batch: int = BATCH) -> list[float]:
        """Return the probability of each of `choices` to go on from `text`."""
        self.needs("multiple-choice")
        return [float(x) for x in _softmax(self._scores([(text, choice) for choice in choices], batch, False)[:, 0])]

    def needs(self, *tasks: str) -> Task:
        """The task of the model. Raises WeftError if it is none of `tasks`."""
        if self.task is None or self.task.name not in tasks:
            what = "an encoder without a head" if self.task is None else f"a model for {self.task.name}"
            raise WeftError(f"{self.folder} holds {what}: it cannot do {tasks[0]}")
        return self.task

    def _scores(self, texts: Sequence[Any], batch: int, truncate: bool) -> Floats:
        check_count("batch", batch)
        return self.logits([self.encoded(text, truncate) for text in texts], batch)

    def logits(self, encoded: Sequence[Encoded], batch: int = BATCH) -> Floats:
        """Return the logits [texts, labels], those of texts of similar length together, as padding costs time."""
        found: list[Floats] = [np.empty(0, np.float32)] * len(encoded)
        for some in self.batches([len(text.ids) for text in encoded], batch):
            (made,) = self.run([encoded[i].ids for i in some], [encoded[i].types for i in some], ["logits"])
            for i, row in zip(some, made, strict=True):
                found[i] = row
        return np.stack(found) if found else np.empty((0, 1), np.float32)

    def batches(self, lengths: Sequence[int], batch: int) -> Iterator[list[int]]:
        """Yield the indices of texts of these `lengths` that run together: `batch` of similar length, each by itself
        where padding would change its tokens."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        alone = [i for i in order if self.compares and lengths[i] > self.compares_above]
        together = order[: len(order) - len(alone)]
        yield from (together[at : at + batch] for at in range(0, len(together), batch))
        yield from ([i] for i in alone)

    def encoded(self, text: Any, truncate: bool = False) -> Encoded:
        """Return the tokens of a text, a pair or token ids. Raises WeftError where the model does not take them."""
        limit = self.max_length if truncate else None
        if is_ids(text):
            ids = [int(i) for i in text][:limit]
            encoded = Encoded(ids, [0] * len(ids), [(0, 0)] * len(ids), [0] * len(ids))
        elif isinstance(text, str):
            encoded = self.tokenizer.encode_parts(text, limit=limit)
        elif isinstance(text, (tuple, list)) and len(text) == 2 and all(isinstance(part, str) for part in text):
            encoded = self.tokenizer.encode_parts(text[0], text[1], limit=limit)
        else:
            raise WeftError(
                f"a text is {text!r:.60}, but it must be a string, a pair of strings or a list of token ids"
            )
        check_ids("a text", encoded.ids, self.vocab, self.max_length, "let it be cut with truncate=True")
        return encoded

    def rendered(self, query: str, text: str) -> Pair | list[int]:
        """A pair as the model reads it: by the chat template, where the folder says so."""
        task = self.needs("text-classification")
        if not task.template:
            return f"{task.prompt}{query}", text
        from .text.chat import ChatTemplate

        before = [{"role": "system", "content": task.prompt}] if task.prompt else []
        pair = [{"role": "query", "content": query}, {"role": "document", "content": text}]
        return self.tokenizer.encode(ChatTemplate(self.folder).render([*before, *pair], answer=False), special=False)


def _several(texts: Any) -> list[Any]:
    """One text or several, as a list; a tuple of two strings is a pair."""
    one = isinstance(texts, str) or is_ids(texts)
    pair = isinstance(texts, tuple) and len(texts) == 2 and all(isinstance(text, str) for text in texts)
    return [texts] if one or pair else list(texts)


def _as_problem(scores: Floats, problem: str) -> Floats:
    if problem == "regression":
        return scores
    return _sigmoid(scores) if problem == "multi_label_classification" else _softmax(scores)


def _sigmoid(x: Floats) -> Floats:
    made: Floats = np.exp(-np.logaddexp(0, -x.astype(np.float64)))
    return made


def _softmax(x: Floats) -> Floats:
    e = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    made: Floats = e / e.sum(axis=-1, keepdims=True)
    return made


def _by_score(labels: Sequence[str], row: Floats) -> dict[str, float]:
    return {labels[i]: float(row[i]) for i in np.argsort(-row, kind="stable")}
