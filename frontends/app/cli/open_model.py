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
    """Raise WeftError if `trusted` has sources, but none of them is a compiled folder with Python to run."""
    from weft.backends.runtime.compiled_folder import read_facts
    from weft.backends.target import TARGETS

    folders = filter(None, map(find_compiled_folder, trusted))
    if trusted and not any(TARGETS[read_facts(folder).target].is_code for folder in folders):
        names = ", ".join(trusted)
        raise WeftError(f"--trust runs the Python of folders compiled for PyTorch, not of {names}: leave it out")


@contextlib.contextmanager
def open_model(
    source: str,
    *,
    text: bool,
    trusted: Sequence[str],
    verifies: bool = False,
    device: str,
    threads: int | None,
    check: bool,
    adapters: Sequence[str],
    without: Sequence[str],
    target: str | None,
    experts_on_device: int | None = None,
) -> Iterator[Any]:
    """Yield the model of a compiled folder, or of a source, compiled into a folder that is removed after the block.

    text: a source needs a tokenizer. trusted: folders that may run their Python. verifies: compile a source with the
    logits of all tokens, to verify drafts. The other arguments are options of the command. Raise WeftError if the model
    cannot be loaded, or an option of the command does not apply to it.
    """
    from weft.backends.runtime import load
    from weft.backends.runtime.compiled_folder import read_facts
    from weft.backends.runtime.device import choose_place
    from weft.ir.storage import check_contents, scratch_folder
    from weft.passes.analysis.states import SOUND

    check_trust(trusted)
    if (folder := find_compiled_folder(source)) is not None:
        for option, value in (("--target", target), ("--adapter", adapters), ("--without", without)):
            if value:
                raise WeftError(f"{source} is already compiled: {option} applies to uncompiled sources only")
        if check:
            check_contents(folder)
        facts = read_facts(folder)
        check_applies(source, select_kind(facts.kind, facts.task is not None, facts.sound is not None))
        yield load(folder, device, threads, trust=source in trusted, experts_on_device=experts_on_device)
        return
    if check:
        raise WeftError(f"{source} is not compiled: --check applies to compiled folders only, so leave it out")
    if experts_on_device is not None and target not in (None, "torch"):
        raise WeftError(f"--experts-on-device needs --target torch, not {target}")
    from ... import load_source
    from ..api.compile import compile

    place = choose_place(device, target if experts_on_device is None else "torch")
    model = load_source(source, adapters=adapters, without=without)
    meta, hears = model.graph.meta, not model.graph.inputs.keys().isdisjoint(SOUND)
    check_applies(source, select_kind(meta.get("kind", "decoder"), "task" in meta, hears))
    if model.tokenizer is None and text:  # checked before gigabytes are written
        raise WeftError(f"{source} has no tokenizer, so it takes no text; `weft run` accepts token ids instead (--ids)")
    for line in model.notices():
        print_note(line)
    with scratch_folder() as scratch:
        options = (("--adapter", adapters), ("--without", without))
        flags = "".join(f" {option} {shlex.quote(value)}" for option, values in options for value in values)
        command = f"weft compile {shlex.quote(source)}{flags} --target {place.target} -o DIR"
        print_note(f"compiling {source} with {place} for this run; keep the result with `{command}`")
        folder = scratch / "model"
        with show_progress(f"reading {source}") as step:
            passes = "default,-last-token-logits" if verifies and place.target != "torch" else "default"
            report = compile(model, folder, target=place.target, dtype=place.dtype, passes=passes, progress=step)
            note_random_weights(report)
        # Trusted: it is weft's own code.
        yield load(folder, place.device, threads, trust=True, experts_on_device=experts_on_device)
