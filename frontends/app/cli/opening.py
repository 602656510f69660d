"""Models that commands run: compiled folders, and sources that are compiled for the run."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError

from .applying import check_applies, kind_of
from .compiling import tell_random
from .shown import note, progress


def compiled_folder(source: str) -> Path | None:
    """Return the compiled folder that `source` names, here or in the hub's cache; None if it names none."""
    from weft.backends.runtime.folder import GENAI, MANIFEST

    from ...formats.hf.hub import hub_snapshot

    folder = Path(source) if Path(source).exists() else hub_snapshot(source) or Path(source)
    return folder if any((folder / name).is_file() for name in (MANIFEST, GENAI)) else None


def check_trust(trusted: Sequence[str]) -> None:
    """Check that a folder among those that are `trusted` has Python to run.

    Raises:
        WeftError: if none has.
    """
    from weft.backends.runtime.folder import read_facts
    from weft.backends.targets import TARGETS

    folders = filter(None, map(compiled_folder, trusted))
    if trusted and not any(TARGETS[read_facts(folder).target].is_code for folder in folders):
        named = ", ".join(trusted)
        raise WeftError(f"--trust is for a folder compiled for PyTorch, whose Python it runs, not for {named}")


@contextlib.contextmanager
def opened_model(
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
    """The model in a compiled folder, or of a source compiled while the block runs; `text` needs a tokenizer, what
    `verifies` drafts the logits of all tokens, and a number of `experts` on the device PyTorch. Folders that are
    `trusted` may run their Python.

    Raises:
        WeftError: also on options of the command that do not apply to the model.
    """
    from weft.backends.runtime import load
    from weft.backends.runtime.device import place_for
    from weft.backends.runtime.folder import read_facts
    from weft.ir.storage import check_contents, scratch_folder
    from weft.passes.analysis.states import SOUND

    check_trust(trusted)
    if (folder := compiled_folder(source)) is not None:
        if target is not None:
            raise WeftError(f"{source} is already compiled: --target applies to uncompiled sources only")
        for option, given in (("--adapter", adapters), ("--without", without)):
            if given:
                raise WeftError(f"{source} is already compiled: {option} applies to uncompiled sources only")
        if check:
            check_contents(folder)
        facts = read_facts(folder)
        check_applies(source, kind_of(facts.kind, facts.task is not None, facts.sound is not None))
        yield load(folder, device, threads, trust=source in trusted, experts_on_device=experts)
        return
    if check:
        raise WeftError(f"{source} is not compiled: --check goes with a compiled folder")
    if experts is not None and target not in (None, "torch"):
        raise WeftError(f"--experts-on-device goes with --target torch, not with {target}")
    from ... import load_source
    from ..api.compile import compile

    target = target if experts is None else "torch"
    place, model = place_for(device, target), load_source(source, adapters=adapters, without=without)
    graph = model.graph
    kind = kind_of(graph.meta.get("kind", "decoder"), "task" in graph.meta, not graph.inputs.keys().isdisjoint(SOUND))
    check_applies(source, kind)
    if model.tokenizer is None and text:  # said before gigabytes are written
        raise WeftError(f"{source} has no tokenizer for a prompt; give it --ids")
    for line in model.notices():
        note(line)
    with scratch_folder() as scratch:
        options = (("--adapter", adapters), ("--without", without))
        said = "".join(f" {option} {shlex.quote(value)}" for option, values in options for value in values)
        keep = f"weft compile {shlex.quote(source)}{said} --target {place.target} -o DIR"
        note(f"compiling {source} with {place} for this run; keep the result with `{keep}`")
        folder = scratch / "model"
        with progress(f"reading {source}") as step:
            passes = "default,-last-token-logits" if verifies and place.target != "torch" else "default"
            tell_random(compile(model, folder, target=place.target, dtype=place.dtype, passes=passes, progress=step))
        yield load(folder, place.device, threads, trust=True, experts_on_device=experts)  # weft's own code
