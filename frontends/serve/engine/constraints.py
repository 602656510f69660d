"""Constrained answers by llguidance: JSON schemas, regular expressions, choices and grammars as masks of tokens."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from weft.backends.runtime.arrays import Floats
from weft.ir.documents import read_text
from weft.ir.errors import WeftError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# No whitespace around JSON: a model that may write any amount of it can go on for ever.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False}


class Guide:
    """A language as constraint of an answer (see `Constraint` of the runtime)."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fresh(self) -> Guide:
        """Return another one at the beginning of the same language."""
        return Guide(self._matcher.deep_copy())

    @property
    def complete(self) -> bool:
        """Return whether the text belongs to the language and nothing may follow."""
        return self._matcher.is_stopped()

    def masked(self, logits: Floats) -> Floats:
        """Return `logits` [vocab] with minus infinity for tokens that may not follow.

        Raises WeftError when llguidance gives up, as on a grammar that takes too much work.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise WeftError(f"the constraint cannot be followed: {_brief(self._matcher.get_error())}")
        allowed = np.unpackbits(mask, bitorder="little", count=logits.size).view(np.bool_)
        masked: Floats = np.where(allowed, logits, np.float32(-np.inf))
        return masked

    def accept(self, token: int) -> None:
        """Go on behind `token`. Raises WeftError where it does not belong to the language."""
        if not self._matcher.consume_token(token):
            raise WeftError(f"the constraint cannot be followed: {_brief(self._matcher.get_error())}")


class Constraints:
    """Constraints for the tokenizer of a compiled `folder`, whose model gives logits of `vocab` tokens."""

    def __init__(self, folder: Path, vocab: int, stop_ids: Collection[int]) -> None:
        self._folder, self._vocab, self._stop_ids = folder, vocab, sorted(stop_ids)

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """The tokenizer as llguidance reads it. Raises WeftError where it cannot."""
        path = self._folder / "tokenizer.json"
        try:
            return LLTokenizer(read_text(path), n_vocab=self._vocab, eos_token=self._stop_ids or None)
        except (ValueError, RuntimeError) as error:
            raise WeftError(f"llguidance cannot read the tokenizer of this model: {_brief(str(error))}") from error

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that `token` stands for. Raises WeftError as `tokenizer` does."""
        return self.tokenizer.decode_bytes([token])

    def json_schema(self, schema: dict[str, Any]) -> Guide:
        """Return the guide of JSON that a schema describes. Raises WeftError where it is wrong or not supported."""
        return self._guide(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS))

    def regex(self, pattern: str) -> Guide:
        """Return the guide of texts that `pattern` matches as a whole. Raises WeftError where it is wrong."""
        return self._guide(LLMatcher.grammar_from_regex(pattern))

    def choice(self, texts: Sequence[str]) -> Guide:
        """Return the guide of one of `texts`."""
        return self.lark("start: " + " | ".join(json.dumps(text) for text in texts))

    def lark(self, grammar: str) -> Guide:
        """Return the guide of a grammar in llguidance's variant of Lark. Raises WeftError where it is wrong."""
        return self._guide(LLMatcher.grammar_from_lark(grammar))

    def _guide(self, grammar: str) -> Guide:
        tokenizer = self.tokenizer
        if (wrong := LLMatcher.validate_grammar(grammar, tokenizer)) and not wrong.startswith("WARNING"):
            raise WeftError(_brief(wrong))
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise WeftError(_brief(matcher.get_error()))
        return Guide(matcher)


def _brief(text: str) -> str:
    """Return the words of llguidance in one line."""
    return " ".join(text.split())[:500]
