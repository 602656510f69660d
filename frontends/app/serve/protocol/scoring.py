"""Requests for scores as vLLM and text-embeddings-inference (TEI) have them: of labels /classify and /predict, of pairs
/score and /rerank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import invalid
from .fields import Fields
from .requests import MOST_INPUTS

_OWN = ("model", "user", "priority", "truncate_prompt_tokens", "truncate")


@dataclass(frozen=True)
class ScoringRequest(ABC):
    """A request for the scores of `texts`: strings, or pairs if `ranks`; null for `model` means the one that is model.

    `cut`: texts that are too long are cut. The other fields are about the response.
    """

    model: str | None
    texts: Sequence[Any]
    cut: bool
    top: int | None = None
    documents: bool = False  # with the texts
    ranks: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def read(cls, data: dict[str, Any]) -> ScoringRequest:
        """Return the request in the JSON object `data`. Raises ApiError on unknown, missing or wrong fields."""

    @abstractmethod
    def respond(self, model: Any, logits: Any, usage: dict[str, Any]) -> Any:
        """Return the body of the response: `logits` [texts, labels] are those of `model`, and `usage` has the id, the
        creation time, the model's name and the token counts."""

    @staticmethod
    def _common(fields: Fields) -> tuple[str | None, bool]:
        cut = fields.get("truncate", bool, False) or fields.given("truncate_prompt_tokens")
        fields.only("truncate_prompt_tokens", -1)  # which means as many as the model takes
        return fields.get("model", str), cut


class RerankRequest(ScoringRequest):
    """Documents by their relevance for a query."""

    @classmethod
    def read(cls, data: dict[str, Any]) -> RerankRequest:
        """Read a body of vLLM, Jina or Cohere, or of TEI, which says `texts`. Raises ApiError on wrong fields."""
        fields, tei = Fields(data), "texts" in data
        own = ("texts", "return_text", "raw_scores") if tei else ("documents", "top_n", "return_documents")
        fields.check_known((*_OWN, "query", *own))
        fields.only("raw_scores", False)
        query, texts = fields.need("query", str), _texts(fields, own[0])
        shown = fields.get("return_text", bool, False) if tei else fields.get("return_documents", bool, True)
        top = fields.within("top_n", 0, 1 << 31) or None  # 0 is all, as in vLLM
        model, cut = cls._common(fields)
        return (TeiRerankRequest if tei else cls)(model, [(query, text) for text in texts], cut, top, shown)

    def respond(self, model: Any, logits: Any, usage: dict[str, Any]) -> Any:
        """Return an object whose `results` are the documents, the highest score first."""
        scores = model.relevance(logits)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.top]
        results = [
            {
                "index": i,
                **({"document": {"text": self.texts[i][1]}} if self.documents else {}),
                "relevance_score": scores[i],
            }
            for i in order
        ]
        return {"id": f"rerank-{usage['id']}", "model": usage["model"], "usage": usage["usage"], "results": results}


class TeiRerankRequest(RerankRequest):
    """The same as text-embeddings-inference has it."""

    def respond(self, model: Any, logits: Any, usage: dict[str, Any]) -> Any:
        """Return an array of indices and scores."""
        scores = model.relevance(logits)
        texts = [{"text": text} if self.documents else {} for _, text in self.texts]
        return [
            {"index": i, "score": scores[i], **texts[i]} for i in sorted(range(len(scores)), key=lambda i: -scores[i])
        ]


class ScoreRequest(ScoringRequest):
    """The scores of pairs: one text with each of others, or texts pair by pair."""

    @classmethod
    def read(cls, data: dict[str, Any]) -> ScoreRequest:
        """Read a body. Raises ApiError on wrong fields, and where the texts do not pair."""
        fields = Fields(data)
        fields.check_known((*_OWN, "text_1", "text_2", "encoding_format"))
        first, second = _texts(fields, "text_1"), _texts(fields, "text_2")
        if len(first) not in (1, len(second)):
            raise invalid("Invalid 'text_1': give one text, or as many as in 'text_2'.", "text_1")
        model, cut = cls._common(fields)
        return cls(model, list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True)), cut)

    def respond(self, model: Any, logits: Any, usage: dict[str, Any]) -> Any:
        """Return a list of scores in the order of the pairs."""
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(model.relevance(logits))]
        return {**usage, "id": f"score-{usage['id']}", "object": "list", "data": data}


class ClassifyRequest(ScoringRequest):
    """The labels of texts."""

    ranks = False

    @classmethod
    def read(cls, data: dict[str, Any]) -> ClassifyRequest:
        fields = Fields(data)
        fields.check_known((*_OWN, "input"))
        model, cut = cls._common(fields)
        return cls(model, _texts(fields, "input"), cut)

    def respond(self, model: Any, logits: Any, usage: dict[str, Any]) -> Any:
        """Return the likeliest label of each text, and the probabilities of all in the order of the model's labels."""
        labels, data = model.task.labels, []
        for i, row in enumerate(model.probabilities(logits)):
            label = labels[int(row.argmax())]
            data.append({"index": i, "label": label, "probs": row.tolist(), "num_classes": len(labels)})
        return {**usage, "id": f"classify-{usage['id']}", "object": "list", "data": data}


@dataclass(frozen=True)
class PredictRequest(ScoringRequest):
    """The labels of texts and pairs as TEI has them: of one, if `alone`, and as logits, if `raw`."""

    ranks = False
    alone: bool = False
    raw: bool = False

    @classmethod
    def read(cls, data: dict[str, Any]) -> PredictRequest:
        """Return the request in `data`, whose `inputs` are a text, a pair [text, text], or an array of such arrays of
        one or two texts. Raises ApiError as the base class does."""
        fields = Fields(data)
        inputs: Any = fields.raw("inputs")
        fields.check_known((*_OWN, "inputs", "raw_scores"))
        alone = not (isinstance(inputs, list) and all(isinstance(entry, list) for entry in inputs))
        rows = [[inputs] if isinstance(inputs, str) else inputs] if alone else inputs
        found = [Fields({"inputs": row}).texts("inputs", 2) for row in rows]
        if not all(found) or not found or len(found) > MOST_INPUTS:
            raise invalid(f"Invalid 'inputs': give 1 to {MOST_INPUTS} texts or pairs.", "inputs")
        model, cut = cls._common(fields)
        texts = [tuple(row) if len(row) == 2 else row[0] for row in found]
        return cls(model, texts, cut, alone=alone, raw=fields.get("raw_scores", bool, False))

    def respond(self, model: Any, logits: Any, usage: dict[str, Any]) -> Any:
        """Return an array of labels and scores, the highest first; for several texts an array of these."""
        labels, scores = model.task.labels, logits if self.raw else model.probabilities(logits)
        rows = [[{"score": float(x), "label": name} for x, name in zip(row, labels, strict=True)] for row in scores]
        found = [sorted(row, key=lambda entry: -entry["score"]) for row in rows]
        return found[0] if self.alone else found


def _texts(fields: Fields, key: str) -> list[str]:
    if not fields.given(key):
        fields.need(key, str)
    if not (found := fields.texts(key, MOST_INPUTS)):
        raise invalid(f"Invalid '{key}': empty array.", key)
    return found
