"""Tasks of models with a head: classify, tag, rank, answer from a context, fill masks, choose."""

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
from .core.sampler import check_count
from .text.tokenizer import Encoding, Tokenizer, check_ids, is_ids, pad_rows

if TYPE_CHECKING:
    from ..folder_facts import Task

Pair = tuple[str, str]
BATCH = 32


class Span(NamedTuple):
    """The characters `start` to `end` (exclusive) of a text, with a label ("answer" for answers) and a score."""

    text: str
    start: int
    end: int
    label: str
    score: float


@dataclass(frozen=True)
class RankedText:
    """The index of a text in the list that was ranked, and its score for the query."""

    index: int
    score: float


class Tasks(ABC):
    """An encoder's methods for the task of its head, such as `classify`; for another task they raise WeftError."""

    task: Task | None
    outputs: Collection[str]
    vocab: int
    max_length: int
    compares: bool
    compares_above: int
    folder: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the folder's tokenizer. Raises WeftError when there is none."""
        return Tokenizer(self.folder)

    def run(
        self,
        rows: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None,
        names: Sequence[str],
        skipped: int = 0,
    ) -> list[Floats]:
        """Run the model on a batch, right-padded to its longest row; return the outputs `names` in order, as float32.
        `rows` and `types` are the token ids and token types (None: all 0) of each batch row. The first `skipped` tokens
        of each row get the value 2 in the attention mask: other tokens attend to them, but pooling in the graph skips
        them."""
        ids, mask = pad_rows(rows)
        mask = mask * np.where(np.arange(mask.shape[1]) < skipped, 2, 1)
        type_ids = np.zeros_like(ids) if types is None else pad_rows(types)[0]
        return self._outputs({"input_ids": ids, "attention_mask": mask, "token_type_ids": type_ids}, names)

    @abstractmethod
    def _outputs(self, values: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[Floats]:
        """Run the model on `values` (input name to array [batch, seq]); return the outputs `names` as float32. Inputs
        that the model does not declare are ignored."""

    def classify(self, texts: Any, *, batch: int = BATCH, truncate: bool = False) -> list[dict[str, float]]:
        """Return a dict per text of `texts`, from every label to its score, the highest score first. Scores are
        probabilities (sigmoid for a multi-label problem, else softmax), or raw outputs for a regression. A text is a
        string, token ids, or a pair (text, text); `batch` is the maximum batch size. With `truncate`, texts are cut to
        the model's maximum length. Raises WeftError if the head is for another task, or a text is empty or too long."""
        labels = self.require_task("text-classification", "next-sentence-prediction").labels
        scores = self.compute_probabilities(self._scores(_list_texts(texts), batch, truncate))
        return [{labels[i]: float(row[i]) for i in np.argsort(-row, kind="stable")} for row in scores]

    def compute_probabilities(self, logits: Floats) -> Floats:
        """Return the scores [texts, labels] that `classify` reports for logits [texts, labels]. Raises WeftError if the
        head is for another task."""
        problem = self.require_task("text-classification", "next-sentence-prediction").problem
        if problem == "regression":
            return logits
        return _sigmoid(logits) if problem == "multi_label_classification" else _softmax(logits)

    def rank(
        self, query: str, texts: Sequence[str], *, batch: int = BATCH, truncate: bool = False, top: int | None = None
    ) -> list[RankedText]:
        """Return the indices and scores of the `top` texts (None: all) for `query`, the highest score first. As in
        sentence-transformers' CrossEncoder, a score is the logit of the model's only label after the activation that
        the folder names (default: sigmoid). `batch` and `truncate` are as in `classify`. Raises WeftError as
        `require_ranking` and `classify` do."""
        scores = self.scores([(query, text) for text in texts], batch=batch, truncate=truncate)
        order = sorted(range(len(texts)), key=lambda i: -scores[i])
        return [RankedText(i, scores[i]) for i in order[:top]]

    def scores(self, pairs: Sequence[Pair], *, batch: int = BATCH, truncate: bool = False) -> list[float]:
        """Return the score of each pair (query, text), as `rank` computes it. Raises WeftError as `rank` does."""
        self.require_ranking()
        return self.compute_relevance(self._scores([self.render_pair(*pair) for pair in pairs], batch, truncate))

    def compute_relevance(self, logits: Floats) -> list[float]:
        """Return the score per pair that `rank` reports for logits [pairs, 1]. Raises WeftError as `rank` does."""
        logit = logits[:, 0]
        return [float(x) for x in (_sigmoid(logit) if self.require_ranking().activation == "sigmoid" else logit)]

    def require_ranking(self) -> Task:
        """Return the task of the model. Raises WeftError unless the model can rank texts: it needs exactly one label
        and the activation sigmoid or identity."""
        task = self.require_task("text-classification")
        if len(task.labels) != 1:
            raise WeftError(
                f"{self.folder} has {len(task.labels)} labels, but ranking needs a model with one: use `classify`"
            )
        if task.activation not in ("sigmoid", "identity"):
            raise WeftError(f"{self.folder} scores by {task.activation}, but ranking needs sigmoid or identity")
        return task

    def tag(self, text: str, *, ignore: Sequence[str] = ("O",)) -> list[Span]:
        """Return a span with the likeliest label for each token of `text`, except special tokens and those with a label
        in `ignore`. Raises WeftError if the head is for another task, or `text` is empty or too long."""
        task, encoded = self.require_task("token-classification"), self.encode_input(text, False)
        (logits,) = self.run([encoded.ids], [encoded.types], ["logits"])
        probabilities = _softmax(logits[0])
        spans = []
        for i, (start, end) in enumerate(encoded.offsets):
            label = task.labels[int(probabilities[i].argmax())]
            if encoded.parts[i] == 0 and label not in ignore:
                spans.append(Span(text[start:end], start, end, label, float(probabilities[i].max())))
        return spans

    def answer(self, question: str, context: str, *, longest: int = 15, top: int = 1) -> list[Span]:
        """Return the `top` likeliest answers to `question`, best first: spans of `context` of at most `longest` tokens.
        Raises WeftError if the head is for another task, `longest` is below 1, or the texts are empty or too long."""
        self.require_task("question-answering")
        check_count("longest", longest)
        encoded = self.encode_input((question, context), False)
        starts, ends = self.run([encoded.ids], [encoded.types], ["start_logits", "end_logits"])
        inside = np.array([part == 1 for part in encoded.parts])
        if not inside.any():
            raise WeftError("the context has no tokens: give it some text")
        first, last = (_softmax(np.where(inside, x[0], -np.inf)) for x in (starts, ends))
        scores = np.triu(np.outer(first, last)) - np.triu(np.outer(first, last), longest)
        spans = []
        for at in np.argsort(-scores, axis=None, kind="stable")[:top]:
            i, j = divmod(int(at), len(last))
            start, end = encoded.offsets[i][0], encoded.offsets[j][1]
            spans.append(Span(context[start:end], start, end, "answer", float(scores[i, j])))
        return spans

    def fill(self, text: str, *, top: int = 5) -> list[dict[str, float]]:
        """Return a dict per mask token of `text`, from each of the `top` likeliest tokens to its probability. Raises
        WeftError if the head is for another task, or `text` has no mask token or is too long."""
        from .text.chat import read_special_token

        self.require_task("fill-mask")
        encoded, mask = self.encode_input(text, False), read_special_token(self.folder, "mask_token")
        mask_id = None if mask is None else self.tokenizer.find_id(mask)
        positions = [i for i, token in enumerate(encoded.ids) if token == mask_id]
        if not positions:
            raise WeftError(f"the text has no mask token: write {mask or 'one'} where the model should fill in a token")
        name = "logits" if "logits" in self.outputs else "prediction_logits"  # of a model that has two heads
        (logits,) = self.run([encoded.ids], [encoded.types], [name])
        probabilities = _softmax(logits[0, positions])
        return [
            {self.tokenizer.get_token(int(i)): float(row[i]) for i in np.argsort(-row, kind="stable")[:top]}
            for row in probabilities
        ]

    def choose(self, text: str, choices: Sequence[str], *, batch: int = BATCH) -> list[float]:
        """Return for each of `choices` the probability that it continues `text` (softmax over `choices`). Raises
        WeftError if the head is for another task, or a text is too long."""
        self.require_task("multiple-choice")
        return [float(x) for x in _softmax(self._scores([(text, choice) for choice in choices], batch, False)[:, 0])]

    def require_task(self, *tasks: str) -> Task:
        """Return the task of the model. Raises WeftError if it is not one of `tasks`."""
        if self.task is None or self.task.name not in tasks:
            content = "an encoder without a head" if self.task is None else f"a model for {self.task.name}"
            raise WeftError(f"{self.folder} is {content}, so it cannot do {tasks[0]}: use a model trained for that")
        return self.task

    def _scores(self, texts: Sequence[Any], batch: int, truncate: bool) -> Floats:
        check_count("batch", batch)
        return self.logits([self.encode_input(text, truncate) for text in texts], batch)

    def logits(self, encoded: Sequence[Encoding], batch: int = BATCH) -> Floats:
        """Return the logits [texts, labels] of tokenized texts, [0, 1] without texts. One run of the model has at most
        `batch` texts, of similar length to save padding."""
        rows: list[Floats] = [np.empty(0, np.float32)] * len(encoded)
        for indices in self.split_batches([len(text.ids) for text in encoded], batch):
            (outputs,) = self.run([encoded[i].ids for i in indices], [encoded[i].types for i in indices], ["logits"])
            for i, row in zip(indices, outputs, strict=True):
                rows[i] = row
        return np.stack(rows) if rows else np.empty((0, 1), np.float32)

    def split_batches(self, lengths: Sequence[int], batch: int) -> Iterator[list[int]]:
        """Yield lists of at most `batch` indices of inputs to run together, given their `lengths` in tokens, the
        shortest first. If tokens compete for experts (`compares`), inputs of more than `compares_above` tokens come
        last, one by one, because padding would change their routing."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        singles = [i for i in order if self.compares and lengths[i] > self.compares_above]
        batched = order[: len(order) - len(singles)]
        yield from (batched[at : at + batch] for at in range(0, len(batched), batch))
        yield from ([i] for i in singles)

    def encode_input(self, text: Any, truncate: bool = False) -> Encoding:
        """Return the tokens of `text` (a string, a pair of strings, or token ids), with `truncate` cut to the model's
        maximum length. Raises WeftError if `text` has another type, or no, too many or unknown tokens."""
        limit = self.max_length if truncate else None
        if is_ids(text):
            ids = [int(i) for i in text][:limit]
            encoded = Encoding(ids, [0] * len(ids), [(0, 0)] * len(ids), [0] * len(ids))
        elif isinstance(text, str):
            encoded = self.tokenizer.encode_parts(text, limit=limit)
        elif isinstance(text, (tuple, list)) and len(text) == 2 and all(isinstance(part, str) for part in text):
            encoded = self.tokenizer.encode_parts(text[0], text[1], limit=limit)
        else:
            raise WeftError(
                f"a text is {text!r:.60}, but it must be a string, a pair of strings or a list of token ids"
            )
        check_ids("a text", encoded.ids, self.vocab, self.max_length, "cut it with truncate=True")
        return encoded

    def render_pair(self, query: str, text: str) -> Pair | list[int]:
        """Return the model input for (query, text). It is this pair, with the task's prompt before the query. But if
        the task has a chat template, it is the token ids of this template, with the prompt as a system message."""
        task = self.require_task("text-classification")
        if not task.template:
            return f"{task.prompt}{query}", text
        from .text.chat import ChatTemplate

        system = [{"role": "system", "content": task.prompt}] if task.prompt else []
        pair = [{"role": "query", "content": query}, {"role": "document", "content": text}]
        return self.tokenizer.encode(ChatTemplate(self.folder).render([*system, *pair], answer=False), special=False)


def _list_texts(texts: Any) -> list[Any]:
    """Return `texts` as a list: [texts] if `texts` is a single string, token id sequence, or tuple of two strings."""
    single = isinstance(texts, str) or is_ids(texts)
    pair = isinstance(texts, tuple) and len(texts) == 2 and all(isinstance(text, str) for text in texts)
    return [texts] if single or pair else list(texts)


def _sigmoid(x: Floats) -> Floats:
    y: Floats = np.exp(-np.logaddexp(0, -x.astype(np.float64)))
    return y


def _softmax(x: Floats) -> Floats:
    e = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    p: Floats = e / e.sum(axis=-1, keepdims=True)
    return p
