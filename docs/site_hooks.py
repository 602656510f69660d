"""Adapt pages that are written for the repository to the site; mkdocs calls `on_page_markdown`."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

FENCE = re.compile(r"^(```\w+)[^\n]*$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Drop what stands behind the language of a block, which tells the tests, and links to what is no page."""
    here = PurePosixPath(page.file.src_uri).parent

    def kept(link: re.Match[str]) -> str:
        parts: list[str] = []
        for part in (here / link[2]).parts:
            if part == ".." and not parts:
                return link[1]  # outside docs/: a file of the repository
            parts = parts[:-1] if part == ".." else [*parts, part]
        return link[0]

    text = LINK.sub(kept, FENCE.sub(r"\1", markdown))
    return re.sub(r"\] \[(?=\w; \w)", r"] \\[", text)  # a product of matrices is no link
