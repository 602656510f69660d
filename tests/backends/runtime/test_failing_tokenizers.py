"""Tokenizers that load and then fail, and numbers beyond those that machines have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from weft.backends.runtime.text.tokenizer import Tokenizer
from weft.frontends.export.gguf.tokens import _read_tokens
from weft.ir.errors import WeftError
from weft.ir.readable import format_bytes, format_count


def test_a_tokenizer_that_fails_on_a_text_is_refused(tmp_path: Path) -> None:
    """The library raises of any kind, and its panics are no Exception."""
    tokenizers.Tokenizer(models.WordLevel({"the": 0}, unk_token="absent")).save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer(tmp_path)
    assert ours.encode("the") == [0]
    with pytest.raises(WeftError, match=r"tokenizer\.json cannot encode this: .*UNK"):
        ours.encode("sky")

    class PanicException(BaseException):
        pass

    class Panicking:
        def decode(self, *_: object, **__: object) -> str:
            raise PanicException("index out of bounds")

    broken: Any = ours
    broken._fast = Panicking()
    with pytest.raises(WeftError, match="cannot decode this: index out of bounds"):
        ours.decode([0])


def test_numbers_of_any_size_are_shown() -> None:
    assert format_count(1_234_567) == "1.23 M" and format_count(1_234_600_000_000_000) == "1,235 T"
    assert (
        format_count(10**400).endswith("0 T")
        and format_bytes(10**400).endswith(" GiB")
        and format_bytes(1536) == "1.5 KiB"
    )


def test_a_token_far_beyond_the_others_makes_no_gigabytes_of_fillers() -> None:
    class Source:
        spec = "folder"
        graph = type("Graph", (), {"meta": {"vocab": 2}})

    source: Any = Source
    with pytest.raises(WeftError, match=r"its tokenizer has a token 2147483647, beyond the maximum of 16777216"):
        _read_tokens({"model": {"type": "BPE", "vocab": {"a": 0, "b": 2**31 - 1}}}, source, 2)
