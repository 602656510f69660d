"""Runs the blocks of one page in the current folder: ``python pages.py PAGE [without-torch]``, with the second argument
without those that are marked ``torch``. `test_docs` says how pages are read.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
PROGRESS = re.compile(r"weft: .*\d+% done")


@dataclass(frozen=True)
class Block:
    """One fenced block: the line of the page it begins on, its language, what stands behind it, its text."""

    line: int
    language: str
    options: dict[str, str]
    text: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        words = (word.partition("=") for word in found[2].split())
        yield Block(text.count("\n", 0, found.start()) + 1, found[1], {k: v for k, _, v in words}, found[3])


def main(page: Path, torch: bool = True) -> None:
    """Run the blocks of `page` in the current folder, `torch` ones too; exits with a report where one does something
    else."""
    warnings.simplefilter("error")
    namespace = types.ModuleType("page")
    sys.modules["page"] = namespace
    sys.path.insert(0, "")
    printed, skipped = "", False
    drawings = all(block.language == "text" for block in blocks(page))
    for block in [] if drawings else blocks(page):
        at = f"{page.name}:{block.line}"
        if block.language in ("sh", "python"):
            skipped = "torch" in block.options and not torch
        if skipped:
            continue
        if block.language in ("text", "mermaid"):
            if not matches(block.text, printed):
                sys.exit(f"{at} expects\n\n{block.text}\nbut the block before it prints\n\n{printed}")
        elif "from" in block.options:
            if block.text not in (ROOT / block.options["from"]).read_text(encoding="utf-8"):
                sys.exit(f"{at} is not what stands in {block.options['from']}")
        elif "setup" in block.options:
            _check_setup(at, block.text)
        elif "elsewhere" in block.options:
            continue
        elif block.language == "sh":
            printed = _shell(at, block)
        elif block.language == "python":
            printed = _python(at, page, block, namespace)
        else:
            sys.exit(f"{at}: no block can be in {block.language}")


def matches(expected: str, printed: str) -> bool:
    """Check that `printed` equals `expected`, up to …, white space at the ends of lines, and lines on the progress of
    long work, which slow machines print."""
    lines = []
    for line in expected.strip("\n").splitlines():
        pieces = (re.escape(piece) for piece in line.rstrip().split("…"))
        lines.append(r"(?:.*\n)*?" if line.strip() == "…" else "[^\n]*".join(pieces) + "\n")
    given = "".join(line.rstrip() + "\n" for line in printed.strip("\n").splitlines() if not PROGRESS.match(line))
    return re.fullmatch("".join(lines), given) is not None


def _check_setup(at: str, text: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line in text.splitlines():
        match line.split():
            case [] | ["pip", "install", *_] | [".", ".venv/bin/activate", *_]:
                known = True
            case ["make", target, *_]:
                known = target in targets
            case ["cp", file, *_] | ["ln", "-s", file, *_]:
                known = (ROOT / file).exists()
            case _:
                known = False
        if not known:
            sys.exit(f"{at}: {line!r} is no way to set weft up")


def _shell(at: str, block: Block) -> str:
    path = os.environ["PATH"]  # its first folder holds the programs that start at once
    done = subprocess.run(
        ["sh", "-e", "-c", block.text],
        env={**os.environ, "PATH": path.partition(os.pathsep)[2] if "cold" in block.options else path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != int(block.options.get("exit", 0)):
        sys.exit(f"{at} ends with status {done.returncode}:\n\n{block.text}\n{done.stdout}")
    return done.stdout


def _python(at: str, page: Path, block: Block, namespace: types.ModuleType) -> str:
    if name := FILE.match(block.text):
        Path(name[1]).write_text(block.text, encoding="utf-8")
        return ""
    said = io.StringIO()
    code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
    try:
        with contextlib.redirect_stdout(said):
            exec(code, vars(namespace))
    except Exception as error:
        if "raises" not in block.options:
            sys.exit(f"{at}: {traceback.format_exc()}\nafter printing\n{said.getvalue()}")
        return said.getvalue() + traceback.format_exception_only(error)[-1]
    if "raises" in block.options:
        sys.exit(f"{at} raises nothing")
    return said.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch="without-torch" not in sys.argv[2:])
