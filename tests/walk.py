"""Walk through one `weft compile`: the files it runs, in the order of its stages, and its calls into earlier stages.

The stages are source, passes, build and write; `frontends/app/api` conducts them, and facts of any stage may be asked:
those of the IR, of analyses, and what targets declare. A climb is a call from one stage into an earlier one, from
outside of any pass.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import weft

ROOT = Path(__file__).parent.parent
FLOORS = ("ir", "passes", "backends", "frontends")
TARGETS = ("ort-cpu", "torch", "transformers")
STAGES = (  # the first that begins a path decides; "" is no stage
    ("write", ("ir/storage/output.py", "ir/storage/contents.py", "ir/storage/partials.py", "ir/storage/disk.py")),
    ("", ("ir/", "frontends/app/api/", "passes/analysis/", "passes/fitting/", "passes/forms.py")),
    ("", ("backends/targets/", "backends/target.py", "backends/options.py", "backends/folder_facts.py")),
    ("source", ("frontends/",)),
    ("passes", ("passes/",)),
    ("build", ("backends/",)),
)
ORDER = ("source", "passes", "build", "write")
MODEL = ROOT / "examples" / "tiny_gpt.py"


@dataclass(frozen=True)
class Walk:
    """The files of each stage in the order in which they are entered, and the climbs as pairs of files."""

    files: dict[str, list[str]]
    climbs: list[tuple[str, str]]


def walk(run: Callable[[], object]) -> Walk:
    """Return the walk through `run`."""
    known, seen, climbs = dict[str, str](), dict[str, None](), dict[tuple[str, str], None]()

    def file(frame: FrameType | None) -> str:
        name = frame.f_code.co_filename if frame is not None else ""
        if name not in known:
            known[name] = _within(name)
        return known[name]

    def called(frame: FrameType, event: str, arg: Any) -> None:
        here = file(frame) if event == "call" and frame.f_code.co_name[0] != "<" else ""
        if not here:
            return
        seen[here] = None
        callers, at = list[str](), frame.f_back
        while at is not None:
            if at.f_code.co_name[0] != "<" and (name := file(at)):
                callers.append(name)
            at = at.f_back
        if callers and _climbs(callers[0], here) and not any(stage(c) == "passes" for c in callers):
            climbs[callers[0], here] = None

    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Walk({s: [f for f in seen if stage(f) == s] for s in ORDER}, list(climbs))


def stage(file: str) -> str:
    """Return the stage that `file` belongs to, "" if it belongs to none."""
    return next((name for name, begins in STAGES if file.startswith(begins)), "")


def compiled(target: str) -> Walk:
    """Return the walk through the compilation of a small model for `target`."""
    with tempfile.TemporaryDirectory() as folder:
        outs = iter((Path(folder) / "first", Path(folder) / "second"))

        def run() -> object:
            return weft.compile(MODEL, next(outs), target=target, seed=0)

        run()  # registries are filled
        return walk(run)


def _climbs(caller: str, callee: str) -> bool:
    one, other = stage(caller), stage(callee)
    return bool(one and other) and ORDER.index(other) < ORDER.index(one)


def _within(name: str) -> str:
    """Return a path from the root of the repository, "" for other code."""
    real = os.path.realpath(name)
    for floor in FLOORS:
        base = os.path.realpath(ROOT / floor)
        if real.startswith(f"{base}{os.sep}"):
            return f"{floor}/{Path(real).relative_to(base).as_posix()}"
    return ""


if __name__ == "__main__":
    for name in sys.argv[1:] or TARGETS:
        found = compiled(name)
        print(name, {s: len(files) for s, files in found.files.items()}, "climbs", found.climbs)
