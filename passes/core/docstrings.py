"""The parts of a pass's docstring, which are printed as its help and on its documentation page.

A docstring has a summary line, paragraphs with the mathematics, a paragraph that starts with ``Condition:``, one that
starts with ``Source:``, and an example: a line ``Example NAME{arguments}::`` and, indented below, a small graph as IR
text.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass

from weft.ir import WeftError


@dataclass(frozen=True)
class Documentation:
    """The parts of a pass's docstring; a missing part is "".

    condition, source: the paragraph after that word and a colon; text: all other paragraphs after the summary.
    pipeline, graph: the example's pass with its arguments, and the IR text that it runs on.
    """

    summary: str
    text: str = ""
    condition: str = ""
    source: str = ""
    pipeline: str = ""
    graph: str = ""


def read_docstring(docstring: str) -> Documentation:
    """Split `docstring` into its parts; raise WeftError for a second paragraph ``Condition:`` or ``Source:``."""
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
