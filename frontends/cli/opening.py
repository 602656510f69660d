"""Models that commands run: compiled folders, and sources that are compiled for the run."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError

from .compiling import tell_random
from .shown import note, progress


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
    trust: bool,
    check: bool,
    verifies: bool = False,
) -> Iterator[Any]:
    """The model in a compiled folder, or of a source compiled while the block runs; `text` needs a tokenizer, what
    `verifies` drafts the logits of all tokens, and a number of `experts` on the device PyTorch."""
    from weft.backends.runtime import load
    from weft.backends.runtime.device import place_for
    from weft.backends.runtime.folder import GENAI, MANIFEST
    from weft.backends.storage import check_contents, scratch_folder

    from ..formats.hf.hub import hub_snapshot

    folder = Path(source) if Path(source).exists() else hub_snapshot(source) or Path(source)
    if any((folder / name).is_file() for name in (MANIFEST, GENAI)):
        if target is not None:
            raise WeftError(f"{source} is already compiled: --target applies to uncompiled sources only")
        for option, given in (("--adapter", adapters), ("--without", without)):
            if given:
                raise WeftError(f"{source} is already compiled: {option} applies to uncompiled sources only")
        if check:
            check_contents(folder)
        yield load(folder, device, threads, trust=trust, experts_on_device=experts)
        return
    if check or trust:
        raise WeftError(f"{source} is not compiled: --{'check' if check else 'trust'} goes with a compiled folder")
    if experts is not None and target not in (None, "torch"):
        raise WeftError(f"--experts-on-device goes with --target torch, not with {target}")
    from .. import load_source
    from ..api.compile import compile

    target = target if experts is None else "torch"
    place, model = place_for(device, target), load_source(source, adapters=adapters, without=without)
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
