"""Count the words that cost readers time: in docstrings, comments, messages and names.

`python -m tests.style.words [PATH ...]` prints each rule with its count, `--show RULE` its places. BUDGET has the
largest count of each rule over the four folders; it falls with every rewording and never rises.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("ir", "passes", "backends", "frontends")

# In prose: docstrings, comments, messages.
PROSE = {
    "what as a noun": r"\b[Ww]hat\b(?! (if|is wrong|happens)\b)",
    "is no X": r"(?<![Tt]here )(?<!there would )\b(?:is|are|was|were|be) no\b"
    r"(?! longer| more than| less than| larger than)",
    "stands beside, in, for": r"\bst(?:and|ands|anding|ood) (?:beside|in|for|behind|before|alone|where|there|between)",
    "behind for after": r"\bbehind\b",
    "beside for next to": r"\bbeside\b",
    "turn for rotate": r"\b[Tt]urn(?:s|ed|ing)?\b(?! (?:in|into|on|off|out)\b)",
    "text for sequence": r"\b(?:batch of texts|texts|rows of text|a text of|text's|tokens of a text|so many texts)\b",
    "numbers for elements": r"\bnumbers\b(?! of )",
    "told, tells, says": r"\b(?:told|tells?|says|said)\b",
    "so many": r"\b(?:so|as) many\b(?! as\b)",
    ", too": r", too\b",
    "but for": r"\bbut for\b",
    "the one, those": r"\b[Tt]hose (?:of|that|which|are)\b",
}
OPENINGS = "What Whether Which How Where Why Who When If As Of From By With Only In To At For Both There Those That"
RIDDLE = re.compile(rf"(?:{OPENINGS.replace(' ', '|')})\b")
VAGUE = re.compile(
    "found|made|known|given|taken|held|kept|whole|own|apart|one|told|said|left|begun|more|both|others?|many"
)
PARTICIPLE = re.compile(
    "[a-z]+ed|[a-z]{4,}en|told|held|kept|made|found|known|drawn|said|left|begun|shown|seen|grown|gone|done|laid|paid|bound"
    "|built|sent|lent|lost|won"
)
BASE = {"embed", "feed", "need", "seed", "speed", "breed", "shed", "lengthen", "flatten", "widen", "shorten", "listen"}
PUBLIC = {"named", "provided", "kept", "matched", "unflatten"}
BUDGET: dict[str, int] = {
    "what as a noun": 28,
    "is no X": 0,
    "stands beside, in, for": 0,
    "behind for after": 2,
    "beside for next to": 1,
    "turn for rotate": 5,
    "text for sequence": 57,
    "numbers for elements": 73,
    "told, tells, says": 1,
    "so many": 8,
    ", too": 4,
    "but for": 0,
    "the one, those": 106,
    "summary begins with no verb": 0,
    "function is a participle": 0,
    "vague variable": 41,
}


class Place(NamedTuple):
    """A finding: the file, the line, and the words around."""

    path: Path
    line: int
    text: str


class Source:
    """One Python file: its prose and its names."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def docstrings(self) -> list[tuple[ast.AST, int, str]]:
        """Nodes with a docstring, its line and its text."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node)
                if doc:
                    found.append((node, node.body[0].lineno, doc))
        return found

    def prose(self) -> Iterator[tuple[int, str]]:
        """Yield docstrings, comments and messages with their lines; a message has two spaces at least."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
                yield node.lineno, node.value
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string

    def functions(self) -> Iterator[ast.FunctionDef]:
        """Yield the functions that are no properties."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.FunctionDef) or node.name == "_" or node.name.startswith("__"):
                continue
            if not any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield node

    def assigned(self) -> Iterator[tuple[int, str]]:
        """Yield the names of variables where they are assigned, with their lines."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.lineno, node.id


def is_participle(name: str) -> bool:
    """Return whether a name is a bare participle, such as ``parted`` or ``told``."""
    word = name.strip("_")
    return PARTICIPLE.fullmatch(word) is not None and word not in BASE | PUBLIC


def findings(sources: list[Source]) -> dict[str, list[Place]]:
    """Return the places of every rule, by its name."""
    found: dict[str, list[Place]] = {name: [] for name in BUDGET}
    for source in sources:
        for line, text in source.prose():
            for name, pattern in PROSE.items():
                for match in re.finditer(pattern, text):
                    around = text[max(0, match.start() - 40) : match.end() + 40].replace("\n", " ")
                    found[name].append(Place(source.path, line, around))
        for node, line, doc in source.docstrings:
            if not isinstance(node, ast.Module) and RIDDLE.match(doc):
                found["summary begins with no verb"].append(Place(source.path, line, doc.splitlines()[0]))
        for function in source.functions():
            if is_participle(function.name):
                found["function is a participle"].append(Place(source.path, function.lineno, function.name))
        for line, name in source.assigned():
            if VAGUE.fullmatch(name.strip("_")):
                found["vague variable"].append(Place(source.path, line, name))
    return found


def sources(root: Path) -> list[Source]:
    """Return the Python files of the four folders."""
    return [Source(path) for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]


def main() -> None:
    """Print the counts, or the places of one rule."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--show", choices=BUDGET, help="print the places of this rule")
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; by default the four folders")
    given = parser.parse_args()
    root = Path(__file__).parents[2]
    paths = [file for path in given.paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    counted = findings([Source(path) for path in paths] if paths else sources(root))
    for name, places in counted.items():
        if given.show in (None, name):
            print(f"{len(places):6,} {name}")
            for place in places if given.show else []:
                print(f"       {place.path}:{place.line}: {place.text}")


if __name__ == "__main__":
    main()
