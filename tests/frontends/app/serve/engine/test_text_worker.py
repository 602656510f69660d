"""The process that tokenizes long strings and compiles grammars."""

from __future__ import annotations

from pathlib import Path

from ..serving import CONTEXT, post_completion, served


def test_long_texts_are_tokenized_like_short_ones(folder: Path) -> None:
    with served(folder) as server:
        text = "é💥 the sky\n" * 3000
        error = post_completion(server, prompt=text).json()["error"]["message"]
    assert f"maximum context length is {CONTEXT}" in error and f"in {len(text.encode())} tokens" in error
