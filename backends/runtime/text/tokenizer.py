"""Prompts: tokenization with tokenizer.json, streaming detokenization, stop strings, and the inputs of encoders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError
from weft.ir.storage.documents import read_text

from ..arrays import Floats, Ints

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Fast
from typing import Any

from ...folder_facts import Sound

Prompt = str | Sequence[int] | Floats

_BROKEN = "\N{REPLACEMENT CHARACTER}"


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return `prompts` as a list: [prompts] if it is a single prompt, which is a string, a sequence of token ids, or a
    sound (a float array with one or two axes)."""
    if isinstance(prompts, str) or is_ids(prompts) or is_sound(prompts):
        return [prompts]
    return cast(list[Prompt], list(prompts))  # several prompts: mypy cannot infer this from `is_ids`


def is_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Return whether `prompt` is one sequence of token ids: an integer array [n], or a nonempty sequence of int."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and prompt.dtype.kind in "iu"
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes) or len(prompt) == 0:
        return False
    return all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in prompt)


def is_sound(prompt: object) -> TypeGuard[Floats]:
    """Return whether `prompt` is a single sound: a waveform [samples], or a spectrogram [bins, frames]."""
    return isinstance(prompt, np.ndarray) and prompt.ndim in (1, 2) and prompt.dtype.kind == "f"


def check_ids(what: str, ids: Sequence[int], vocab: int, longest: int, remedy: str) -> None:
    """Check that `ids` has 1 to `longest` token ids, each from 0 to `vocab` − 1. Raises WeftError if not; the message
    calls the sequence `what`, and ends in `remedy` if it is too long."""
    if not ids:
        raise WeftError(f"{what} has no tokens, but it needs at least one")
    if len(ids) > longest:
        raise WeftError(
            f"{what} of {len(ids)} tokens is longer than the maximum of {longest} tokens the model was compiled for; "
            f"shorten it, or {remedy}"
        )
    if min(ids) < 0 or max(ids) >= vocab:
        wrong = next(i for i in ids if not 0 <= i < vocab)
        raise WeftError(f"token {wrong} of {what} is outside the vocabulary of {vocab} tokens")


def check_text(what: str, text: str) -> None:
    """Check that `text`, called `what` in the error, is valid Unicode. Raises WeftError if not. Python represents bytes
    that are not UTF-8 as lone surrogates (PEP 383), which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        wrong = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"the half of a pair U+{code:04X}"
        raise WeftError(
            f"{what} is not valid UTF-8: {wrong} stands at character {error.start + 1}; convert it to UTF-8"
        ) from None


def pad_rows(rows: Sequence[Sequence[int]]) -> tuple[Ints, NDArray[np.bool_]]:
    """Return (token ids [rows, longest], right-padded with zeros; their mask [rows, longest], False for padding)."""
    lengths = np.array([len(row) for row in rows])
    mask: NDArray[np.bool_] = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return ids, mask


def parse_tokenizer(text: str, path: Path) -> Fast:
    """Return the tokenizer that `text`, read from tokenizer.json at `path`, describes. Raises WeftError if broken."""
    from tokenizers import Tokenizer as Fast

    with _convert_library_errors(f"{path}: not a readable tokenizer"):
        return Fast.from_str(text)


class Encoding(NamedTuple):
    """The tokens of a text or a pair of texts: their ids, token types, character offsets (start, end), and parts (0:
    first text, 1: second text, None: special token)."""

    ids: list[int]
    types: list[int]
    offsets: list[tuple[int, int]]
    parts: list[int | None]


class Tokenizer:
    """The tokenizer of a compiled folder (tokenizer.json), without the padding and truncation that it may configure.
    Raises WeftError if the file is missing or broken."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise WeftError(f"{path}: no such file, so the model has no tokenizer: use token ids instead of text")
        self._fast = parse_tokenizer(read_text(path), path)
        self._fast.no_padding()
        self._fast.no_truncation()

    def encode(self, text: str, special: bool = True, limit: int | None = None) -> list[int]:
        """Return the token ids of `text`; with `special`, they include special tokens such as BOS. They are cut to
        `limit` tokens (None: no limit), special tokens included. Raises WeftError if the text is not valid Unicode or
        the tokenizer fails."""
        return self.encode_parts(text, limit=limit, special=special).ids

    def encode_parts(
        self, text: str, pair: str | None = None, limit: int | None = None, special: bool = True
    ) -> Encoding:
        """Return the tokens of `text`, or of the pair (`text`, `pair`), with their types and offsets. They are cut to
        `limit` tokens as in `encode`; of a pair, the longer text is cut first. Raises WeftError as `encode` does."""
        for part in (text, pair or ""):
            check_text("a text", part)
        with self._truncate_encodings(limit):
            # As a batch: only then does the library release Python's global interpreter lock.
            tokens = self._fast.encode_batch([text if pair is None else (text, pair)], add_special_tokens=special)[0]
        return Encoding(list(tokens.ids), list(tokens.type_ids), list(tokens.offsets), list(tokens.sequence_ids))

    def get_token(self, index: int) -> str:
        """Return the token with id `index` as written in the vocabulary; if the vocabulary lacks it, str(index)."""
        return str(self._fast.id_to_token(index) or index)

    def find_id(self, token: str) -> int | None:
        """Return the id of `token`; None if the vocabulary lacks it."""
        index: int | None = self._fast.token_to_id(token)
        return index

    def encode_batch(self, texts: Sequence[str], limit: int | None = None) -> list[list[int]]:
        """Return the token ids of each of `texts`, with special tokens, as `encode` does; all cores share the work."""
        for text in texts:
            check_text("a text", text)
        with self._truncate_encodings(limit):
            return [list(row.ids) for row in self._fast.encode_batch_fast(list(texts))]

    @contextlib.contextmanager
    def _truncate_encodings(self, limit: int | None) -> Iterator[None]:
        """Truncate encodings inside the block to `limit` tokens (None: all); convert errors to WeftError."""
        with _convert_library_errors("tokenizer.json cannot encode this"):
            if limit is not None:
                self._fast.enable_truncation(limit)
            try:
                yield
            finally:
                if limit is not None:  # without a limit, other threads may encode at the same time
                    self._fast.no_truncation()

    def prompt_length(self, prompt: str) -> int:
        """Return the number of tokens of the prefix `prompt`, special ones included, except one at its end."""
        ids, added = self.encode(prompt), self._fast.get_added_tokens_decoder()
        return len(ids) - (bool(ids) and ids[-1] in added and added[ids[-1]].special)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        with _convert_library_errors("tokenizer.json cannot decode this"):
            return str(self._fast.decode(list(ids), skip_special_tokens=True))


@contextlib.contextmanager
def _convert_library_errors(what: str) -> Iterator[None]:
    """Convert errors and panics of the library tokenizers inside the block to a WeftError "{what}: …"."""
    try:
        yield
    except BaseException as error:  # tokenizers raises nothing more specific; Rust panics are not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise WeftError(f"{what}: {error}") from error


class StreamingDetokenizer:
    """A streaming detokenizer. The pieces that it returns, joined, are the text of all tokens. A piece never ends
    inside a code point: text that ends in U+FFFD is withheld, because bytes may be missing. New tokens are decoded
    together with the tokens of the last piece, since spaces and byte runs depend on the token before. So the work per
    token does not grow with the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the tokens of the last piece, then the pending tokens
        self._emitted = 0  # number of tokens of the last piece
        self._text = ""  # the text of the last piece's tokens

    def push(self, token: int) -> str:
        """Add `token`; return the piece of text that is now complete, "" if none is."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith(_BROKEN) else self._emit_piece(text)

    def flush(self) -> str:
        """Return the text that is still withheld, "" if there is none."""
        return self._emit_piece(self._tokenizer.decode(self._ids)) if self._emitted < len(self._ids) else ""

    def _emit_piece(self, text: str) -> str:
        piece = text[len(self._text) :]
        if piece:
            del self._ids[: self._emitted]
            # Decode again: at the beginning of a text these tokens may lack the space that they have after others.
            self._text = self._tokenizer.decode(self._ids)
        self._emitted = len(self._ids)
        return piece


class StopStringFilter:
    """A filter that cuts streamed text before its first stop string, regardless of token boundaries."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""  # the end of the text that may be the beginning of a stop string
        self.stopped = False

    def push(self, piece: str) -> str:
        """Add `piece`; return the text that is now known not to be part of a stop string. At the first stop string, set
        `stopped` and return the text before it."""
        text = self._pending + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._pending = True, ""
            return text[: min(ends)[1]]
        pending = max((measure_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - pending :]
        return text[: len(text) - pending]

    def flush(self) -> str:
        """Return the text that is still withheld, and clear it."""
        pending, self._pending = self._pending, ""
        return pending


def measure_overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


IDS, MASK = "encoder_input_ids", "encoder_attention_mask"


def check_sound(sound: Sound, prompt: object) -> Floats:
    """Return the sound `prompt` as float32. Raises WeftError unless it is a float array of the shape of `sound`."""
    if not is_sound(prompt):
        raise WeftError(f"a prompt is {quote_prompt(prompt)}, but the model takes sound: an array of floats, {sound}")
    length = prompt.shape[-1]
    fits = prompt.shape[:-1] == (() if sound.bins is None else (sound.bins,))
    if not fits or length == 0 or sound.length not in (None, length):
        raise WeftError(f"a prompt is {quote_prompt(prompt)}, but the model takes {sound}")
    return prompt.astype(np.float32)


def quote_prompt(prompt: object) -> str:
    """Return a description of `prompt` for errors: the shape of an array, else the start of its repr."""
    return f"an array {list(prompt.shape)}" if isinstance(prompt, np.ndarray) else f"{prompt!r:.60}"


def measure_prompt(prompt: Sequence[int] | Floats) -> int:
    """Return the length of a prompt: its number of tokens, or of samples or frames if it is a sound."""
    return prompt.shape[-1] if isinstance(prompt, np.ndarray) else len(prompt)


def build_encoder_inputs(sources: Sequence[Any], sound: Sound | None) -> dict[str, NDArray[Any]]:
    """Return a dict with two encoder inputs, keyed by name: the batch of `sources`, right-padded, and its mask [batch,
    length] (False: padding). Without `sound`, sources are token ids."""
    if sound is None:
        ids, mask = pad_rows(sources)
        return {IDS: ids, MASK: mask}
    lengths = np.array([measure_prompt(source) for source in sources])
    batch = np.zeros((len(sources), *sources[0].shape[:-1], int(lengths.max())), np.float32)
    for row, source in zip(batch, sources, strict=True):
        row[..., : measure_prompt(source)] = source
    return {sound.input: batch, MASK: np.arange(batch.shape[-1]) < lengths[:, None]}
