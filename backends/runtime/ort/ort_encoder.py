"""Compiled encoders: embeddings of texts, and tasks of models with a head: classify, tag, rank, answer from a context,
fill masks, choose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from ...folder_facts import FolderFacts, Task
from ..arrays import Floats
from ..core.sampler import check_count
from ..text.tokenizer import Encoding, Prompt, Tokenizer, check_ids, is_ids, list_prompts, pad_rows
from .session import Session, convert_ort_errors

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


Pooling = Literal["mean", "cls", "max", "last", "weighted", "none"]
HIDDEN, SENTENCE = "last_hidden_state", "sentence_embedding"  # names of outputs
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_DTYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}


class EncoderModel(ABC):
    """An encoder: it computes a vector per token (`hidden_states`) or per text (`encode`); with a head, it performs its
    `task` by methods such as `classify`, which raise WeftError for another task. `pooling`, `normalize` and `embedding`
    are the settings with which it was trained to compute one vector per text. With `compares`, tokens of inputs above
    `compares_above` tokens compete, for example for the capacity of experts. `outputs` names its outputs."""

    def __init__(self, facts: FolderFacts, outputs: Collection[str]) -> None:
        self.outputs, self.task = outputs, facts.task
        self.vocab, self.max_length, self.folder = facts.vocab, facts.max_length, facts.folder
        self.pooling, self.normalize = facts.pooling, facts.normalize
        self.compares, self.compares_above = facts.compares, facts.compares_above
        self.embedding = facts.embedding

    def generate(self, *_: object, **__: object) -> NoReturn:
        """Raise WeftError: an encoder computes embeddings of texts and predicts no next token."""
        raise WeftError(f"{self.folder} is an encoder, which cannot generate text: use `encode` for embeddings")

    stream = conversation = generate  # so that callers of `load`, which returns either kind, find the right method

    def encode(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        batch: int = 32,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_dim: int | None = None,
    ) -> Floats | list[Floats]:
        """Return float32 embeddings of `texts` (strings or token ids): [texts, dim], or with pooling "none" a list with
        an array [tokens, dim] per text.

        Pooling "mean" averages the vectors of a text's tokens, "weighted" averages them with weights 1, 2, … in order;
        "max" takes the maximum of each feature, "cls" the vector of the first token, "last" that of the last token.
        `normalize` scales every vector to unit length. If `pooling` or `normalize` is None, the setting of the
        sentence-transformers folder that the model was compiled from applies, else "mean" without scaling. With pooling
        None, the model's own output sentence_embedding is returned if it has one; with `normalize` False only if
        modules after the pooling compute it. Texts of similar length run together, `batch` at a time, right-padded;
        inputs so long that their tokens would compete for experts run one by one.

        The text `prompt`, else the model's prompt called `prompt_name`, else the model's default prompt is put before
        each string; token ids get no prompt. Vectors keep their first `truncate_dim` features (Kusupati 2022,
        Matryoshka); None means the model's setting, else all. After that cut, vectors are scaled to unit length again
        only if `normalize` is True.

        Raises WeftError on a text without tokens or longer than the model's maximum (with `truncate` it is cut), and on
        arguments outside their range or that exclude each other.
        """
        pooled = self.pooling if pooling is None else pooling
        if pooled not in get_args(Pooling):
            raise WeftError(f"pooling is {pooled!r}, but it must be one of {', '.join(get_args(Pooling))}")
        check_count("batch", batch)
        if truncate_dim is not None:
            check_count("truncate_dim", truncate_dim)
        if pooled == "none" and truncate_dim is not None:
            raise WeftError('truncate_dim cannot cut vectors of single tokens: leave it out, or pooling "none"')
        if prompt is not None and prompt_name is not None:
            raise WeftError(
                "prompt and prompt_name are both given, but a text can begin with only one: leave out either"
            )
        inputs = list_prompts(texts)
        prefix = self.prompt(prompt_name, prompt)
        if (prompt or prompt_name) and prefix and any(map(is_ids, inputs)):
            raise WeftError("a prompt cannot be put before token ids: leave it out, and begin the ids with its ids")
        skipped = 0 if self.embedding.include_prompt or not prefix else self.tokenizer.prompt_length(prefix)
        rows = self._tokenize(inputs, prefix, truncate)
        vectors: list[Floats] = [np.empty(0, np.float32)] * len(rows)
        pooled_by_graph = (
            pooling is None and SENTENCE in self.outputs and (normalize is not False or self.embedding.modules)
        )
        if pooled_by_graph and normalize is False and self.embedding.unit:
            raise WeftError(
                f"{self.folder}: its graph scales vectors to unit length: set pooling to get vectors without scaling"
            )
        if pooled_by_graph and (pad := self.embedding.pad) is not None:
            rows = [row + [pad] * (self.max_length - len(row)) for row in rows]
        for indices in self.split_batches(list(map(len, rows)), batch):
            names = [SENTENCE if pooled_by_graph else HIDDEN]
            (states,) = self.run([rows[row] for row in indices], None, names, skipped)
            for row, state in zip(indices, states, strict=True):
                vectors[row] = state if pooled_by_graph else _pool(state[: len(rows[row])], pooled, skipped)
        if not pooled_by_graph and normalize is None and self.normalize and pooled != "none":
            vectors = list(map(_normalize, vectors))
        width = self.embedding.truncate_dim if truncate_dim is None else truncate_dim
        if truncate_dim is not None and vectors and truncate_dim > vectors[0].shape[-1]:
            raise WeftError(f"truncate_dim is {truncate_dim}, but the vectors have {vectors[0].shape[-1]} features")
        vectors = vectors if pooled == "none" else [vector[:width] for vector in vectors]
        vectors = list(map(_normalize, vectors)) if normalize else vectors
        return vectors if pooled == "none" else np.stack(vectors) if vectors else np.empty((0, 0), np.float32)

    def hidden_states(self, rows: Sequence[Sequence[int]]) -> Floats:
        """Return the last hidden states for `rows` of token ids, float32 [batch, longest, dim], with zeros for padding.
        Raises WeftError on ids outside the vocabulary, and on a row that is empty or longer than the maximum."""
        rows = [[int(i) for i in ids] for ids in rows]
        for ids in rows:
            check_ids("a row", ids, self.vocab, self.max_length, "cut it")
        lengths, states = list(map(len, rows)), dict[int, Floats]()
        for indices in self.split_batches(lengths, max(len(rows), 1)):
            (outputs,) = self.run([rows[row] for row in indices], None, [HIDDEN])
            states.update(zip(indices, outputs, strict=True))
        longest = max(lengths, default=0)
        if not rows:
            return np.empty((0, 0, 0), np.float32)
        return np.stack([np.pad(states[i][:n], ((0, longest - n), (0, 0))) for i, n in enumerate(lengths)])

    def prompt(self, name: str | None = None, prompt: str | None = None) -> str:
        """Return the prefix for texts: `prompt`, else the model's prompt called `name`, else its default prompt, else
        "". Raises WeftError if no prompt has that name."""
        prompts = self.embedding.prompts
        if name is not None and name not in prompts:
            raise WeftError(f"{self.folder} has no prompt {name!r}; its prompts are {', '.join(prompts)}")
        name = name or self.embedding.default
        return prompt if prompt is not None else prompts[name] if name is not None else ""

    def _tokenize(self, inputs: Sequence[object], prompt: str, truncate: bool) -> list[list[int]]:
        """Return token ids of `inputs`, strings with the prefix `prompt`; with `truncate`, cut to the maximum."""
        limit = self.max_length if truncate else None
        texts = [prompt + text for text in inputs if isinstance(text, str)]
        encoded = iter(self.tokenizer.encode_batch(texts, limit) if texts else [])
        rows = list[list[int]]()
        for text in inputs:
            if not isinstance(text, str) and not is_ids(text):
                raise WeftError(f"a text is {text!r:.60}, but it must be a string or a list of token ids")
            ids = next(encoded) if isinstance(text, str) else [int(i) for i in text][:limit]
            check_ids("a text", ids, self.vocab, self.max_length, "cut it with truncate=True")
            rows.append(ids)
        return rows

    # -- the task of its head

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
        of each row get the value 2 in the attention mask: attention sees them, but pooling in the graph skips them."""
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
        from ..text.chat import read_special_token

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
        from ..text.chat import ChatTemplate

        system = [{"role": "system", "content": task.prompt}] if task.prompt else []
        pair = [{"role": "query", "content": query}, {"role": "document", "content": text}]
        return self.tokenizer.encode(ChatTemplate(self.folder).render([*system, *pair], answer=False), special=False)


class OrtEncoder(EncoderModel):
    """An encoder graph in an open session: inputs `input_ids`, `attention_mask` and, if declared, `token_type_ids`;
    output `last_hidden_state` [batch, seq, dim] in f32 or f16. Raises WeftError if the graph differs."""

    def __init__(self, session: Session, facts: FolderFacts) -> None:
        outputs = {o.name: o.type for o in session.ort.get_outputs()}
        super().__init__(facts, outputs)
        self.session, name = session, facts.model
        self._inputs = {i.name: i.type for i in session.ort.get_inputs()}
        if not {"input_ids", "attention_mask"} <= self._inputs.keys() <= set(_INPUTS):
            raise WeftError(f"{name}: its inputs are {', '.join(self._inputs)}, so it is not an encoder")
        if wrong := [f"{i} has type {kind}" for i, kind in self._inputs.items() if kind not in _DTYPES]:
            raise WeftError(f"{name}: the input {wrong[0]}, which the runtime does not support")
        if outputs.get("last_hidden_state") not in ("tensor(float)", "tensor(float16)"):
            raise WeftError(f"{name}: it has no output last_hidden_state in f32 or f16, so it is not an encoder")

    def _outputs(self, values: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[Floats]:
        feed = {name: values[name].astype(_DTYPES[kind]) for name, kind in self._inputs.items()}
        with convert_ort_errors(str(self.folder)):
            outputs = self.session.ort.run([*names], feed)
        return [np.asarray(value, np.float32) for value in outputs]


def _normalize(vectors: Floats) -> Floats:
    # The bound is that of torch's F.normalize.
    unit: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32(1e-12))
    return unit


def _pool(states: Floats, pooling: str, skipped: int = 0) -> Floats:
    """Return `states` [tokens, dim], the vectors of a text, pooled to [dim]; for pooling "none" return all of them.
    Else the first `skipped` tokens are left out, but at least one token remains."""
    begin = min(skipped, len(states) - 1) if pooling != "none" else 0
    states, count = states[begin:], len(states)
    if pooling in ("mean", "weighted"):
        weights = np.arange(begin + 1.0, count + 1) if pooling == "weighted" else None
        states = np.average(states.astype(np.float64), axis=0, weights=weights)
    elif pooling != "none":
        states = states.max(axis=0) if pooling == "max" else states[0 if pooling == "cls" else -1]
    return np.array(states, np.float32)
