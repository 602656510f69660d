"""From text to tokens and back: tokenizer.json, text that grows token by token, stop strings."""

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

Prompt = str | Sequence[int] | Floats

_BROKEN = "\N{REPLACEMENT CHARACTER}"


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list: a text, a sequence of token ids, or an array of floats of one or two axes (a
    sound) is one."""
    if isinstance(prompts, str) or is_ids(prompts) or is_sound(prompts):
        return [prompts]
    return cast(list[Prompt], list(prompts))  # no single prompt: mypy cannot tell from `is_ids`


def is_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Return whether `prompt` is one sequence of token ids, not several prompts."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and prompt.dtype.kind in "iu"
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in prompt)
    )


def is_sound(prompt: object) -> TypeGuard[Floats]:
    """Return whether `prompt` is one sound: a waveform [samples], or a spectrogram [bins, frames]."""
    return isinstance(prompt, np.ndarray) and prompt.ndim in (1, 2) and prompt.dtype.kind == "f"


def check_ids(what: str, ids: Sequence[int], vocab: int, longest: int, remedy: str) -> None:
    """Raises WeftError unless `ids`, those of `what`, are 1 to `longest` tokens of `vocab`; `remedy` if too many."""
    if not ids:
        raise WeftError(f"{what} has no tokens: give it at least one")
    if len(ids) > longest:
        raise WeftError(
            f"{what} of {len(ids)} tokens is longer than the maximum of {longest} tokens the model was compiled for; "
            f"shorten it, or {remedy}"
        )
    if min(ids) < 0 or max(ids) >= vocab:
        wrong = next(i for i in ids if not 0 <= i < vocab)
        raise WeftError(f"token {wrong} of {what} is outside the vocabulary of {vocab} tokens")


def check_text(what: str, text: str) -> None:
    """Raises WeftError unless `text`, called `what`, is Unicode: Python passes on bytes that are not UTF-8 as halves of
    surrogate pairs (PEP 383), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        wrong = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"the half of a pair U+{code:04X}"
        raise WeftError(
            f"{what} is not valid UTF-8: {wrong} stands at character {error.start + 1}; convert it to UTF-8"
        ) from None


def padded(rows: Sequence[Sequence[int]]) -> tuple[Ints, NDArray[np.bool_]]:
    """Token ids [rows, longest] padded with zeros on the right, and where they are tokens."""
    lengths = np.array([len(row) for row in rows])
    mask: NDArray[np.bool_] = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return ids, mask


def parse_tokenizer(text: str, path: Path) -> Fast:
    """Parse the `text` of the tokenizer.json at `path`.

    Raises:
        WeftError: if it is no tokenizer.
    """
    from tokenizers import Tokenizer as Fast

    try:
        return Fast.from_str(text)
    except BaseException as error:  # tokenizers raises nothing more specific, and panics of Rust are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise WeftError(f"{path}: not a readable tokenizer: {error}") from error


class Encoded(NamedTuple):
    """Tokens of a text or of a pair: their ids and token types, the characters that each is of, and the part (0 or 1)
    that it belongs to; None for the tokens around them."""

    ids: list[int]
    types: list[int]
    offsets: list[tuple[int, int]]
    parts: list[int | None]


class Tokenizer:
    """The tokenizer.json of a compiled folder, without the padding and truncation it may ask for.

    Raises WeftError when the file is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise WeftError(f"{path}: no such file, so the model takes and gives token ids only, not text")
        self._fast = parse_tokenizer(read_text(path), path)
        self._fast.no_padding()
        self._fast.no_truncation()

    def encode(self, text: str, special: bool = True, limit: int | None = None) -> list[int]:
        """The tokens of `text`; with the ones the tokenizer puts around it (such as BOS) where `special`.

        Longer text is cut, inside what is put around it, to `limit` tokens. Raises WeftError where it is no Unicode, or
        the tokenizer fails on it.
        """
        return self.encode_parts(text, limit=limit, special=special).ids

    def encode_parts(
        self, text: str, pair: str | None = None, limit: int | None = None, special: bool = True
    ) -> Encoded:
        """The tokens of `text`, or of it and its `pair`, with their types and places; cut as by `encode`, the longer of
        a pair first. Raises WeftError as `encode` does."""
        for one in (text, pair or ""):
            check_text("a text", one)
        with self._cut(limit):
            # As a batch: the library gives Python's lock to other threads then alone.
            made = self._fast.encode_batch([text if pair is None else (text, pair)], add_special_tokens=special)[0]
        return Encoded(list(made.ids), list(made.type_ids), list(made.offsets), list(made.sequence_ids))

    def token(self, index: int) -> str:
        """The token with that id, as the vocabulary has it; the id itself where it has none."""
        return str(self._fast.id_to_token(index) or index)

    def find(self, token: str) -> int | None:
        """The id of `token`; None if there is none."""
        found: int | None = self._fast.token_to_id(token)
        return found

    def encode_batch(self, texts: Sequence[str], limit: int | None = None) -> list[list[int]]:
        """The tokens of each of `texts` as of `encode`, on all cores."""
        for text in texts:
            check_text("a text", text)
        with self._cut(limit):
            return [list(row.ids) for row in self._fast.encode_batch_fast(list(texts))]

    @contextlib.contextmanager
    def _cut(self, limit: int | None) -> Iterator[None]:
        """Cut what is encoded inside to `limit` tokens."""
        with _refusing("encode"):
            if limit is not None:
                self._fast.enable_truncation(limit)
            try:
                yield
            finally:
                if limit is not None:  # where there is none, other threads may encode, too
                    self._fast.no_truncation()

    def prompt_length(self, prompt: str) -> int:
        """The number of tokens that `prompt` takes before a text, with the special ones at its beginning."""
        ids, added = self.encode(prompt), self._fast.get_added_tokens_decoder()
        return len(ids) - (bool(ids) and ids[-1] in added and added[ids[-1]].special)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        with _refusing("decode"):
            return str(self._fast.decode(list(ids), skip_special_tokens=True))


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Convert errors of the library, whose panics are no Exception, to WeftError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise WeftError(f"tokenizer.json cannot {what} this: {error}") from error


class GrowingText:
    """Turns tokens into text as they come: the pieces, joined, are the text of all tokens.

    A piece never ends inside a code point: while the text ends in U+FFFD, bytes may be missing, and it is held back.
    Each piece is what the last few tokens add to the text of the ones before, so a decoder that looks at its left
    neighbour (spaces, byte runs) sees one; the work per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the tokens of the last piece, then those not in a piece yet
        self._known = 0  # how many of them are in a piece
        self._text = ""  # the text of those

    def push(self, token: int) -> str:
        """The text that `token` completes."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith(_BROKEN) else self._take(text)

    def flush(self) -> str:
        """Return the pending text unchanged."""
        return self._take(self._tokenizer.decode(self._ids)) if self._known < len(self._ids) else ""

    def _take(self, text: str) -> str:
        piece = text[len(self._text) :]
        if piece:
            del self._ids[: self._known]
            # Decoded anew: text that begins with these tokens may lack the space that they have behind others.
            self._text = self._tokenizer.decode(self._ids)
        self._known = len(self._ids)
        return piece


class StopStrings:
    """Cuts growing text before the first stop string that is complete, wherever tokens begin and end."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # the end of the text that may be the beginning of a stop string
        self.found = False

    def push(self, piece: str) -> str:
        """The text that is certain after `piece`: sets `found`, and returns what lies before, at a stop string."""
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        pending = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - pending :]
        return text[: len(text) - pending]

    def flush(self) -> str:
        """Return the pending text."""
        pending, self._held = self._held, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
