"""Compiled encoders, which compute embeddings of texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError

from ...folder_facts import FolderFacts
from ..arrays import Floats
from ..core.sampler import check_count
from ..tasks import Tasks
from ..text.tokenizer import Prompt, check_ids, is_ids, list_prompts
from .session import Session, convert_ort_errors

Pooling = Literal["mean", "cls", "max", "last", "weighted", "none"]
HIDDEN, SENTENCE = "last_hidden_state", "sentence_embedding"  # names of outputs
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_DTYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}


class EncoderModel(Tasks):
    """An encoder: it computes a vector per token (`hidden_states`) or per text (`encode`); with a head, it performs its
    `task`. `pooling`, `normalize` and `embedding` are the settings with which it was trained to compute one vector per
    text. With `compares`, tokens of inputs above `compares_above` tokens compete, for example for the capacity of
    experts. `outputs` has the names of the model's outputs."""

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
        """Return the token ids of each of `inputs`: a string is tokenized with the prefix `prompt`, token ids are
        checked. With `truncate`, all are cut to the maximum length."""
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


class OrtEncoder(EncoderModel):
    """An encoder graph in an open session: inputs `input_ids`, `attention_mask` and, if declared, `token_type_ids`;
    output `last_hidden_state` [batch, seq, dim] in f32 or f16. Raises WeftError if the graph has other inputs or lacks
    any of these."""

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
