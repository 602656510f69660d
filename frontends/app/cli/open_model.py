"""Models that commands run: compiled folders, and sources that are compiled for a single run."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError

from .compile_command import note_random_weights
from .option_rules import check_applies, select_kind
from .terminal import print_note, show_progress


def find_compiled_folder(source: str) -> Path | None:
    """Return the compiled folder that `source` names, as a path or in the hub's cache; None for other sources."""
    from weft.backends.runtime.compiled_folder import GENAI, MANIFEST

    from ...formats.hf.hub import find_snapshot

    folder = Path(source) if Path(source).exists() else find_snapshot(source) or Path(source)
    return folder if any((folder / name).is_file() for name in (MANIFEST, GENAI)) else None


def check_trust(trusted: Sequence[str]) -> None:
    """Raise WeftError if there are sources `trusted`, and none of them is a compiled folder with Python to run."""
    from weft.backends.runtime.compiled_folder import read_facts
    from weft.backends.target import TARGETS

    folders = filter(None, map(find_compiled_folder, trusted))
    if trusted and not any(TARGETS[read_facts(folder).target].is_code for folder in folders):
        names = ", ".join(trusted)
        raise WeftError(f"--trust runs the Python of folders compiled for PyTorch, and {names} has none: leave it out")


@contextlib.contextmanager
def open_model(
    source: str,
    device: str,
    threads: int | None,
    target: str | None,
    adapters: Sequence[str],
    without: Sequence[str],
    experts: int | None,
    *,
    text: bool,
    trusted: Sequence[str],
    check: bool,
    verifies: bool = False,
) -> Iterator[Any]:
    """Yield the model of a compiled folder, or of a source, compiled into a folder that is removed after the block.

    text: a source needs a tokenizer. verifies: compile a source with the logits of all tokens, to verify drafts.
    experts: number of experts on the device (PyTorch only). trusted: folders that may run their Python. check: compare
    the folder's files with their checksums first.

    Raises:
        WeftError: if the model cannot be loaded, or an option of the command does not apply to it.
    """
    from weft.backends.runtime import load
    from weft.backends.runtime.compiled_folder import read_facts
    from weft.backends.runtime.device import choose_place
    from weft.ir.storage import check_contents, scratch_folder
    from weft.passes.analysis.states import SOUND

    check_trust(trusted)
    if (folder := find_compiled_folder(source)) is not None:
        if target is not None:
            raise WeftError(f"{source} is already compiled: --target applies to uncompiled sources only")
        for option, values in (("--adapter", adapters), ("--without", without)):
            if values:
                raise WeftError(f"{source} is already compiled: {option} applies to uncompiled sources only")
        if check:
            check_contents(folder)
        facts = read_facts(folder)
        check_applies(source, select_kind(facts.kind, facts.task is not None, facts.sound is not None))
        yield load(folder, device, threads, trust=source in trusted, experts_on_device=experts)
        return
    if check:
        raise WeftError(f"{source} is not compiled: --check applies to compiled folders only")
    if experts is not None and target not in (None, "torch"):
        raise WeftError(f"--experts-on-device needs --target torch, not {target}")
    from ... import load_source
    from ..api.compile import compile

    target = target if experts is None else "torch"
    device_place, model = choose_place(device, target), load_source(source, adapters=adapters, without=without)
    graph = model.graph
    kind = select_kind(
        graph.meta.get("kind", "decoder"), "task" in graph.meta, not graph.inputs.keys().isdisjoint(SOUND)
    )
    check_applies(source, kind)
    if model.tokenizer is None and text:  # checked before gigabytes are written
        raise WeftError(f"{source} has no tokenizer, so it takes no text; `weft run` accepts token ids instead (--ids)")
    for line in model.notices():
        print_note(line)
    with scratch_folder() as scratch:
        options = (("--adapter", adapters), ("--without", without))
        flags = "".join(f" {option} {shlex.quote(value)}" for option, values in options for value in values)
        command = f"weft compile {shlex.quote(source)}{flags} --target {device_place.target} -o DIR"
        print_note(f"compiling {source} with {device_place} for this run; keep the result with `{command}`")
        folder = scratch / "model"
        with show_progress(f"reading {source}") as step:
            passes = "default,-last-token-logits" if verifies and device_place.target != "torch" else "default"
            note_random_weights(
                compile(
                    model, folder, target=device_place.target, dtype=device_place.dtype, passes=passes, progress=step
                )
            )
        yield load(folder, device_place.device, threads, trust=True, experts_on_device=experts)  # weft's own code
