"""Rewrites as text: graphs before and after a pipeline, side by side in the `.weft` file next to a test module.

A file is a list of cases, each with a title that begins with the pipeline::

    // fuse-glu: SiLU written as x·σ(x)
    graph gate { ... }
    // after
    graph gate { ... }

Instead of ``// after`` and a graph, ``// unchanged`` says that the pipeline leaves the graph alone, and
``// refused: WORDS`` that it raises a WeftError with these words. After a change that is meant, write the graphs after
``// after`` with ``WEFT_GOLDEN=write pytest -n 0 tests/passes/library``, and read the diff.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from weft.ir import WeftError, parse
from weft.passes import parse_pipeline, run_passes

TITLE = re.compile(r"^// ((?:[^{:]|\{[^}]*\})+): (.+)$")


@dataclass(frozen=True)
class Rewrite:
    """One case of the file `path`: `before` is text, `after` is text, "unchanged", or "refused: WORDS"."""

    path: Path
    pipeline: str
    title: str
    before: str
    after: str

    def __str__(self) -> str:
        return self.title

    def check(self) -> None:
        """Run the pipeline, check the declared effects of its passes, and compare the text of the result."""
        graph = parse(self.before)
        if self.after.startswith("refused: "):
            with pytest.raises(WeftError, match=re.escape(self.after.removeprefix("refused: "))):
                run_passes(graph, self.pipeline)
            return
        text = str(run_passes(graph, self.pipeline, verify=True))
        if self.after == "unchanged":
            assert text == str(graph), self.title
            return
        assert text != str(graph), f"{self.path.name}: nothing happens to {self.title!r}; write // unchanged"
        if os.environ.get("WEFT_GOLDEN") == "write":
            self._write(text)
        else:
            assert text == str(parse(self.after)), f"{self.path.name}: {self.title}"

    def _write(self, after: str) -> None:
        """Replace the graph after the pipeline in the file."""
        head = f"// {self.pipeline}: {self.title}\n{self.before}\n// after\n"
        text = self.path.read_text(encoding="utf-8")
        assert text.count(head) == 1
        start = text.index(head) + len(head)
        end = text.find("\n// ", start)
        rest = "\n" if end < 0 else "\n" + text[end:]
        self.path.write_text(text[:start] + after.rstrip("\n") + rest, encoding="utf-8")


def rewrites(test_file: str) -> list[Rewrite]:
    """Return the cases of the `.weft` file of a test module, in order.

    ``test_fuse_glu.py`` has ``fuse_glu.weft``.
    """
    module = Path(test_file)
    path = module.with_name(module.stem.removeprefix("test_") + ".weft")
    blocks: list[list[str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("// "):
            blocks.append([line])
        elif blocks:
            blocks[-1].append(line)
    cases: list[Rewrite] = []
    for i, (title, *lines) in enumerate(blocks):
        match = TITLE.match(title)
        if title == "// after" or title == "// unchanged" or title.startswith("// refused: "):
            continue
        assert match is not None and i + 1 < len(blocks), f"{path.name}: {title}"
        parse_pipeline(match[1])
        outcome, *after = blocks[i + 1]
        result = "\n".join(after).strip("\n") if outcome == "// after" else outcome.removeprefix("// ")
        assert outcome != "// after" or result or os.environ.get("WEFT_GOLDEN") == "write", f"{path.name}: {title}"
        cases.append(Rewrite(path, match[1], match[2], "\n".join(lines).strip("\n"), result))
    return cases
