"""Parts of a pass's docstring: the text of its help and of its page.

A docstring is a summary line, paragraphs with the mathematics, a paragraph each that starts with ``Condition:`` and
``Source:``, and an example: a line ``Example NAME{arguments}::`` and, indented below it, a small graph in IR text.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass

from weft.ir import WeftError


@dataclass(frozen=True)
class Documentation:
    """The parts of a docstring; `pipeline` is the example's pass with its arguments, `graph` its IR text."""

    summary: str
    text: str = ""
    condition: str = ""
    source: str = ""
    pipeline: str = ""
    graph: str = ""


def read_docstring(docstring: str) -> Documentation:
    """The parts of `docstring`.

    Raises:
        WeftError: if a part stands twice.
    """
    sections: dict[str, str] = {}
    text: list[str] = []
    body = inspect.cleandoc(docstring)
    if match := re.search(r"^Example (.+)::\n((?:(?:[ \t].*)?\n|[ \t].*\Z)+)", body + "\n", re.MULTILINE):
        sections["pipeline"], sections["graph"] = match[1], textwrap.dedent(match[2]).strip() + "\n"
        body = (body[: match.start()] + body[match.end() :]).strip()
    summary, *paragraphs = re.split(r"\n\s*\n", body)
    for paragraph in paragraphs:
        name, colon, rest = paragraph.partition(":")
        if colon and name in ("Condition", "Source"):
            if name.lower() in sections:
                raise WeftError(f"docstring {summary!r} has two paragraphs {name}")
            sections[name.lower()] = rest.strip()
        else:
            text.append(paragraph)
    return Documentation(" ".join(summary.split()), "\n\n".join(text), **sections)
