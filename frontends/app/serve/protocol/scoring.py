"""Requests for scores in the form of vLLM and text-embeddings-inference (TEI).

/classify and /predict return scores of labels for texts, /score and /rerank a relevance score for each text pair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from .errors import bad_request
from .fields import Items, RequestObject, Texts, allow_only, choose_type, field_error
from .requests import MAX_INPUTS

Inputs = Annotated[Texts, Field(min_length=1, max_length=MAX_INPUTS)]


class ScoringRequest(RequestObject, ABC, extra="forbid"):
    """A request for the scores of `texts`: strings or pairs of strings; with `ranks`, relevance of pairs.

    Inputs that are too long are truncated if one of the two truncation fields requests it.
    """

    model: str | None = None
    priority: Any = None
    truncate: bool = False
    truncate_prompt_tokens: Annotated[int | None, allow_only(-1)] = None  # -1: the model's maximum
    ranks: ClassVar[bool] = True
    ignored = frozenset({"user"})

    @property
    @abstractmethod
    def texts(self) -> Sequence[Any]:
        """Return the strings or pairs of strings to score."""

    @abstractmethod
    def respond(self, model: Any, logits: Any, usage: dict[str, Any]) -> Any:
        """Return the response to `logits` [texts, labels] of `model`; `usage` has id, time, model and token counts."""


class RerankRequest(ScoringRequest):
    """A request to rank documents by their relevance for a query, in the form of vLLM, Jina and Cohere."""

    query: str
    documents: Inputs
    return_documents: bool = True
    top_n: int = Field(0, ge=0, le=1 << 31)  # 0 is all, as in vLLM

    @classmethod
    def read(cls, data: dict[str, Any]) -> Any:
        """Return the request in `data`, a TeiRerankRequest if it has `texts`; raise ApiError for invalid fields."""
        return super(RerankRequest, TeiRerankRequest if "texts" in data else cls).read(data)

    @property
    def texts(self) -> Sequence[Any]:
        return [(self.query, document) for document in self.documents]

    def respond(self, model: Any, logits: Any, usage: dict[str, Any]) -> Any:
        """Return an object whose `results` are the documents, the highest score first."""
        results = [
            {"index": i, "relevance_score": score, **({"document": {"text": text}} if self.return_documents else {})}
            for i, score, text in self._rank_documents(model, logits)
        ]
        return {"id": f"rerank-{usage['id']}", "model": usage["model"], "usage": usage["usage"], "results": results}

    def _rank_documents(self, model: Any, logits: Any) -> list[tuple[int, float, str]]:
        """Return (index, score, text) of the `top_n` best documents (0: all), the highest score first."""
        scores = model.compute_relevance(logits)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.top_n or None]
        return [(i, scores[i], self.documents[i]) for i in order]


class TeiRerankRequest(RerankRequest):
    """A request to rank documents by their relevance for a query, in the form of text-embeddings-inference."""

    documents: Inputs = Field(alias="texts")
    return_documents: bool = Field(False, alias="return_text")
    raw_scores: Annotated[bool, allow_only(False)] = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_top_n(cls, data: Any) -> Any:
        if "top_n" in data:
            raise field_error("top_n", "extra_forbidden")
        return data

    def respond(self, model: Any, logits: Any, usage: dict[str, Any]) -> Any:
        ranked = self._rank_documents(model, logits)
        return [{"index": i, "score": s, **({"text": text} if self.return_documents else {})} for i, s, text in ranked]


class ScoreRequest(ScoringRequest):
    """A request for the scores of pairs: one text with each of several, or two equally long lists of texts."""

    text_1: Inputs
    text_2: Inputs
    encoding_format: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise bad_request("Invalid 'text_1': send one text, or the same number as in 'text_2'.", "text_1")
        return self

    @property
    def texts(self) -> Sequence[Any]:
        first = self.text_1 * (len(self.text_2) // len(self.text_1))
        return list(zip(first, self.text_2, strict=True))

    def respond(self, model: Any, logits: Any, usage: dict[str, Any]) -> Any:
        scores = model.compute_relevance(logits)
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return {**usage, "id": f"score-{usage['id']}", "object": "list", "data": data}


class ClassifyRequest(ScoringRequest):
    """A request for the labels of texts."""

    ranks = False
    input: Inputs

    @property
    def texts(self) -> Sequence[Any]:
        return self.input

    def respond(self, model: Any, logits: Any, usage: dict[str, Any]) -> Any:
        """Return the most likely label of each input, and the probabilities of all labels in the model's order."""
        labels, data = model.task.labels, []
        for i, row in enumerate(model.compute_probabilities(logits)):
            label = labels[int(row.argmax())]
            data.append({"index": i, "label": label, "probs": row.tolist(), "num_classes": len(labels)})
        return {**usage, "id": f"classify-{usage['id']}", "object": "list", "data": data}


def _is_batch(inputs: Any) -> bool:
    return isinstance(inputs, list) and all(isinstance(row, list) for row in inputs)


Row = Annotated[Texts, Field(min_length=1, max_length=2)]
Rows = Annotated[Items[Row], Field(min_length=1, max_length=MAX_INPUTS)]


class PredictRequest(ScoringRequest):
    """A request for the labels of a text, a pair [text, text], or an array of arrays of one or two texts (TEI)."""

    inputs: Annotated[list[Any], choose_type(_is_batch, Rows, Row)]
    raw_scores: bool = False
    ranks = False

    @property
    def texts(self) -> Sequence[Any]:
        rows = self.inputs if _is_batch(self.inputs) else [self.inputs]
        return [tuple(row) if len(row) == 2 else row[0] for row in rows]

    def respond(self, model: Any, logits: Any, usage: dict[str, Any]) -> Any:
        """Return an array of labels and scores, highest score first; for a batch an array of such arrays."""
        labels, scores = model.task.labels, logits if self.raw_scores else model.compute_probabilities(logits)
        rows = [[{"score": float(x), "label": name} for x, name in zip(row, labels, strict=True)] for row in scores]
        ordered = [sorted(row, key=lambda entry: -entry["score"]) for row in rows]
        return ordered if _is_batch(self.inputs) else ordered[0]
