"""A store of the caches of token prefixes, from which rows of any executor begin instead of running the tokens again.

Two kinds of entries, each under the hash of all tokens from the start of the sequence to its end:

- of models that can rewind: the cache slots of a block of tokens (vLLM's automatic prefix caching). Sequences share the
  blocks of their common prefix, so it is stored once, and any earlier sequence with the same beginning is useful.
- of models with recurrent states or rolling caches: a snapshot of all tensors at the end of a sequence, of use only to
  prompts that begin with the whole sequence, because these tensors cannot drop tokens.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.ir.errors import WeftError

from .batch_context import BatchContext
from .decoder import CachedDecoder

BLOCK = 64  # tokens: long enough that copies are few, short enough that few tokens of a prefix run again
LIMIT = 1024  # MiB


@dataclass(frozen=True)
class _Entry:
    """The tensors of the tokens `start` to `end` of a sequence, as `BatchContext.read_row` returns them."""

    start: int
    end: int
    tensors: Sequence[Any]

    @property
    def nbytes(self) -> int:
        return sum(int(tensor.nbytes) for tensor in self.tensors)


class PrefixCache:
    """The caches of prefixes of a decoder and its adapters, at most `limit` MiB on its device; the least recently used
    entries go first.

    It stores nothing if `limit` is 0, for encoder-decoders, and if the tokens of a model call compete, because then the
    caches depend on how a prompt was split into calls. `hits` counts loads, `tokens` the tokens that they saved, and
    `nbytes` is the size of the entries.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.nbytes, self.hits, self.tokens = limit, 0, 0, 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._lock = threading.Lock()  # conversations of several threads share the entries

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self.nbytes = 0

    def count(self, decoder: CachedDecoder[Any], prompt: Sequence[int]) -> int:
        """Return the number of tokens at the start of `prompt` that `load` would copy. The last two never count:
        the logits of the last one are needed, by a call of several tokens as without stored caches."""
        with self._lock:
            keys = self._match(decoder, prompt)
            return self._entries[keys[-1]].end if keys else 0

    def load(self, decoder: CachedDecoder[Any], context: BatchContext, row: int, prompt: Sequence[int]) -> int:
        """Replace the tokens of batch row `row` of a `context` of `decoder` by the longest stored prefix of `prompt`;
        return its length. The row is unchanged if that is 0."""
        with self._lock:
            if not (keys := self._match(decoder, prompt)):
                return 0
            entries = [self._entries[key] for key in keys]
            context.write_row(row, prompt[: entries[-1].end], [(entry.start, entry.tensors) for entry in entries])
            self._touch(keys)
            self.hits += 1
            self.tokens += entries[-1].end
            return entries[-1].end

    def save(self, decoder: CachedDecoder[Any], context: BatchContext, row: int, prompt: int) -> None:
        """Store the tokens of batch row `row` of a `context` of `decoder`, except parts that are stored already or
        exceed the limit. If the decoder `rounds`, decode steps compute other caches than a prefill: then
        store only the first `prompt` tokens, which ran as one, and no states."""
        if not (self.limit and decoder.shares_prefixes) or (decoder.rounds and not decoder.can_rewind):
            return
        if not (tokens := context.get_tokens(row)[: prompt if decoder.rounds else None]):
            return
        ends = range(BLOCK, len(tokens) + 1, BLOCK) if decoder.can_rewind else [len(tokens)]
        keys = list(_hash_prefixes(decoder, tokens, ends))
        with self._lock:
            self._store(context, row, keys, ends)

    def _store(self, context: BatchContext, row: int, keys: Sequence[bytes], ends: Sequence[int]) -> None:
        start = 0
        self._touch(keys)
        for key, end in zip(keys, ends, strict=True):
            if key not in self._entries:
                try:
                    entry = _Entry(start, end, context.read_row(row, start, end))
                except (WeftError, MemoryError):
                    self.clear()  # memory is short, and running answers need it more
                    return
                if not self._make_room(entry.nbytes, keys):
                    break
                self._entries[key] = entry
                self.nbytes += entry.nbytes
            start = end
        self._touch(keys)

    def _match(self, decoder: CachedDecoder[Any], prompt: Sequence[int]) -> list[bytes]:
        """Return the keys of the entries that together are the longest stored prefix of `prompt[:-2]`."""
        if not (self.limit and self._entries):
            return []
        if not decoder.can_rewind:
            ends = sorted({entry.end for entry in self._entries.values() if entry.end < len(prompt) - 1})
            return [key for key in _hash_prefixes(decoder, prompt, ends) if key in self._entries][-1:]
        keys = list[bytes]()
        for key in _hash_prefixes(decoder, prompt, range(BLOCK, len(prompt) - 1, BLOCK)):
            if key not in self._entries:
                break
            keys.append(key)
        return keys

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Mark the entries `keys` as used; later blocks of a sequence are removed before earlier ones."""
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)

    def _make_room(self, nbytes: int, needed: Sequence[bytes]) -> bool:
        """Remove entries until `nbytes` more fit; return False if only entries in `needed` are left to remove."""
        while self.nbytes + nbytes > self.limit << 20:
            key = next(iter(self._entries), None)
            if key is None or key in needed:
                return False
            self.nbytes -= self._entries.pop(key).nbytes
        return True


def _hash_prefixes(decoder: CachedDecoder[Any], tokens: Sequence[int], ends: Iterable[int]) -> Iterator[bytes]:
    """Yield the hash of the adapter of `decoder` and `tokens[:end]` for each of the ascending `ends`."""
    ids, digest, start = np.array(tokens, np.int64), hashlib.sha256(decoder.adapter.encode()), 0
    for end in ends:
        digest.update(ids[start:end].tobytes())
        start = end
        yield digest.digest()
