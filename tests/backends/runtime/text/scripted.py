"""A decoder that speaks scripts, and tokenizers of a token per byte and of sentencepiece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.core.results import ExpertCounts

BOS, EOS = 256, 257


class Scripted:
    """A decoder whose row i generates the tokens of script i, and then EOS without end."""

    def __init__(self, *scripts: Sequence[int], max_length: int = 1000) -> None:
        self.scripts, self.vocab, self.max_length = scripts, 300, max_length
        self.capacity, self.lengths = max_length, np.zeros(len(scripts), np.int64)
        self.max_prompt, self.start, self.cache_bytes, self.chunk = max_length, None, 0, 512
        self.said: list[list[int]] = []
        self.experts, self.sound, self.shares_prefixes, self.drafts_pay = ExpertCounts(), None, False, False

    @contextmanager
    def context(self, batch: int, tokens: int) -> Iterator[Scripted]:
        yield self

    def reset(self) -> None:
        self.lengths[:] = 0

    def _logits(self) -> Any:
        logits = np.zeros((len(self.scripts), self.vocab), np.float32)
        for row, script in enumerate(self.scripts):
            logits[row, script[len(self.said)] if len(self.said) < len(script) else EOS] = 1
        return logits

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int = 512, keep: int = 0) -> Any:
        self.said, self.prompts = [], prompts
        return self._logits()

    def step(self, tokens: Any, active: Any = None) -> Any:
        self.said.append(tokens.tolist())
        return self._logits()

    def new_sampling_step(self, samplers: Sequence[Any]) -> None:
        """Return None: the host samples."""

    def extend(self, tokens: Sequence[int]) -> Any:
        raise AssertionError("generating needs no extend")

    def count_cached(self, prompt: Sequence[int]) -> int:
        return 0

    def gather(self, rows: Any) -> None:
        raise AssertionError("one row has nothing to gather")

    def take(self, other: Any) -> None:
        self.lengths[:] = other.lengths


def byte_level() -> Tokenizer:
    """Return a tokenizer with a token per byte and the special tokens <s> and </s>; <s> precedes every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    fast.enable_padding(length=50)
    fast.enable_truncation(3)
    return fast


def sentencepiece() -> Tokenizer:
    """Return a tokenizer of words with a leading ▁ and bytes as <0xXX>, which drops the first space as llama-2 does."""
    words = ["▁the", "▁cat", "s", "▁", "▁sat"]
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    return fast


PLAIN = byte_level()
PLAIN.no_padding()
PLAIN.no_truncation()


def ids(text: str) -> list[int]:
    """Return the tokens of `text`, one per byte."""
    return list(PLAIN.encode(text, add_special_tokens=False).ids)


def speaker(folder: Path, *scripts: Sequence[int], **facts: Any) -> Generator:
    return Generator(Scripted(*scripts, **facts), stop_ids=frozenset([EOS]), folder=folder)
