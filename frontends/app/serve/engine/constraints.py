"""Constrained answers by llguidance: JSON schemas, regular expressions, choices and grammars as masks of tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from weft.backends.runtime.arrays import Floats
from weft.ir.errors import WeftError
from weft.ir.storage.documents import read_text

from ..protocol.tools import write_json_rule


class ConstraintError(WeftError):
    """An answer cannot continue as its constraint requires."""


class Guide:
    """A constraint that keeps an answer in a formal language by masking logits (the runtime's `Constraint`)."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Guide:
        """Return an independent copy in the same state."""
        return Guide(self._matcher.deep_copy())

    @property
    def is_complete(self) -> bool:
        """Return whether the text is in the language and no token may follow."""
        return self._matcher.is_stopped()

    def mask_logits(self, logits: Floats) -> Floats:
        """Return `logits` [vocab] with −∞ for tokens that may not follow.

        Raises ConstraintError if the grammar is wrong, or llguidance gives up, as on grammars that take too much work.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ConstraintError(_shorten(self._matcher.get_error()))
        allowed = np.unpackbits(mask, bitorder="little", count=logits.size).view(np.bool_)
        masked: Floats = np.where(allowed, logits, np.float32(-np.inf))
        return masked

    def accept_token(self, token: int) -> None:
        """Advance by `token`; raise ConstraintError if the language does not allow it here."""
        if not self._matcher.consume_token(token):
            raise ConstraintError(_shorten(self._matcher.get_error()))


class Constraints:
    """Constraints for the tokenizer in `folder`, whose model has logits of `vocab` tokens and ends with `stop_ids`."""

    def __init__(self, folder: Path, vocab: int, stop_ids: Collection[int]) -> None:
        self._folder, self._vocab, self._stop_ids = folder, vocab, sorted(stop_ids)

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Return the tokenizer in llguidance's form; raise WeftError if llguidance cannot read it."""
        path = self._folder / "tokenizer.json"
        try:
            return LLTokenizer(read_text(path), n_vocab=self._vocab, eos_token=self._stop_ids or None)
        except (ValueError, RuntimeError) as error:
            raise WeftError(f"llguidance cannot read the tokenizer of this model: {_shorten(str(error))}") from error

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of `token`; raise WeftError as `tokenizer` does."""
        return self.tokenizer.decode_bytes([token])

    def build_guide(self, grammar: str) -> Guide:
        """Return the guide of `grammar` (Lark); raise WeftError if it is invalid, or allows no first token."""
        guide = Guide(LLMatcher(self.tokenizer, grammar, log_level=0))
        trial = guide.copy()
        trial.accept_token(int(trial.mask_logits(np.zeros(self._vocab, np.float32)).argmax()))
        return guide


def build_grammar(kind: str, value: Any) -> str:
    """Return `value`, a JSON schema, regex, list of choices or grammar (as `kind` states), as a grammar (Lark)."""
    if kind == "json_schema":
        return f"start: {write_json_rule(value)}"
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    return "start: " + " | ".join(json.dumps(text) for text in value) if kind == "choice" else str(value)


def _shorten(text: str) -> str:
    """Return llguidance's message in one line, without its stack frames and state."""
    return " ".join(re.split("<backtrace>|<state>", text)[0].split())[:500]
