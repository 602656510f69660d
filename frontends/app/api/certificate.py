"""`weft.certify`: the statements in the record of a folder, and checks whether they still hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weft.backends.runtime.trust import require_trust
from weft.ir.errors import WeftError
from weft.ir.storage import amend_manifest, read_checked
from weft.ir.storage.contents import hash_file
from weft.ir.storage.documents import Record, expand_home

from ...formats.hf.hub import find_snapshot
from ...formats.weft.manifest import make_absolute
from ...formats.weft.model_folder import BEST, find_model
from ...formats.weft.record_tables import CARD, RecordTable, build_tables, list_levels, render_card
from .source.sources import find_architecture_file
from .verify.evaluation import Evaluation, evaluate
from .verify.verification import Verification, verify_folder

SCORES = ("nll", "nll_loss", "kl", "kl_99", "agreement", "cosine")  # of an evaluation that are recorded
ABSOLUTE, RELATIVE = 1e-3, 0.01  # difference of scores that another machine may cause
INPUTS = ("kind", "against", "sha256", "tokens", "context", "prompt")  # of a measurement
Status = Literal["holds", "FAILS", "not checked"]


class Certificate(NamedTuple):
    """The statements of the record of a folder as tables; of each check the status, the statement and the reason."""

    tables: Sequence[RecordTable]
    checks: Sequence[tuple[Status, str, str]]


def certify(
    folder: str | Path, *, recheck: bool = False, moved: Sequence[str | Path] = (), **options: Any
) -> Certificate:
    """Return the certificate of `folder`, compiled, exported or written by `weft opt`.

    The checksums of its files and, where they are there, of its sources are compared. With `recheck`, recorded
    measurements are repeated with `options` (trust, device, progress, as in `evaluate`); the text of an evaluation is
    at the recorded path or in `moved`. Raise WeftError if the folder has no record, or a malformed one.
    """
    if not (folder := find_model(Path(folder))).is_dir():
        raise WeftError(f"{folder} is not a folder: name one that weft compiled, exported or wrote")
    manifest, damages = read_checked(folder)
    record, files = Record(folder, manifest), f"{len(manifest['files'])} files have their checksums"
    checks: list[tuple[Status, str, str]] = [("FAILS" if damages else "holds", files, "; ".join(damages))]
    for source in (level.record("source", {}) for level in list_levels(record)):
        for name, digest in source.get("hashes", dict[str, str], {}).items():
            statement = f"{name} of the source {source.text('spec', '')}"
            if (path := next(filter(Path.is_file, _find_files(source, name)), None)) is None:
                checks.append(("not checked", statement, "it is not here"))
            else:
                same = hash_file(path) == digest
                checks.append(("holds", statement, "") if same else ("FAILS", statement, "it has changed"))
    for entry in record.records("measurements", []):
        statement = f"{entry.text('kind')} against {entry.text('reference', '') or entry.text('against')}"
        try:
            wrong = _repeat(folder, entry, moved, options) if recheck else None
            status: Status = "not checked" if wrong is None else "FAILS" if wrong else "holds"
            reason = "--recheck repeats it" if wrong is None else wrong
        except WeftError as error:
            status, reason = "not checked", str(error)
        passed = entry.flag("passed", True)
        checks.append((status, statement, reason) if passed else ("FAILS", statement, "it failed when it was recorded"))
    return Certificate(build_tables(record), checks)


def _find_files(source: Record, name: str) -> Iterator[Path]:
    """Yield the paths at which the file `name` of a source may be."""
    if match := re.fullmatch(r"adapter(\d+)/(.+)", name):
        yield from (Path(folder) / match[2] for folder in source.get("adapters", list[str], [])[int(match[1]) :][:1])
    path = find_architecture_file(spec := source.text("spec", "")) or expand_home(spec)
    path = path if path.exists() else find_snapshot(spec) or path
    yield from (path / name, path / BEST / name) if path.is_dir() else (path.with_name(name),)


def _repeat(folder: Path, entry: Record, moved: Sequence[str | Path], options: Mapping[str, Any]) -> str:
    """Repeat the measurement `entry`; return how the result differs, or "". Raise WeftError if that is impossible."""
    tokens, against = entry.integer("tokens"), entry.get("against", str | None)
    if entry.choice("kind", ("evaluation", "verification")) == "verification":
        again = verify_folder(folder, against=against, prompt=entry.get("prompt", str | None), tokens=tokens, **options)
        return "" if again.passed else f"the relative error is {again.max_relative:.2g}"
    paths = filter(Path.is_file, map(Path, (entry.text("text"), *moved)))
    if (text := next((path for path in paths if hash_file(path) == entry.text("sha256")), None)) is None:
        raise WeftError(f"its text, {entry.text('text')}, is not here or has changed: name it with --text")
    if find_architecture_file(str(against)):
        require_trust(options.get("trust", False), f"{folder} names {against}, which is code that this would run")
    context = entry.integer("context")
    result = evaluate([folder], against=against, text=text, tokens=tokens, context=context, **options).scores[1]
    wrong = []
    for key, old in entry.get("scores", dict[str, float]).items():
        new = getattr(result, key) if key in SCORES else None
        if new is None or not abs(new - old) <= ABSOLUTE + RELATIVE * abs(old):
            wrong.append(f"{key} is {new}, recorded {old}")
    return ", ".join(wrong)


def record_evaluation(folder: Path, evaluation: Evaluation, index: int, against: str) -> None:
    """Add score `index` of `evaluation` against the source `against` to the record of `folder`."""
    score, text = evaluation.scores[index], Path(evaluation.text).absolute()
    scores = {key: value for key in SCORES if (value := getattr(score, key)) is not None}
    entry = {"kind": "evaluation", "against": make_absolute(against), "text": str(text), "sha256": hash_file(text)}
    _add_measurement(folder, entry | {"tokens": evaluation.tokens, "context": evaluation.context, "scores": scores})


def record_verification(folder: Path, result: Verification, options: Mapping[str, Any]) -> None:
    """Add `result`, of `verify_folder` with `options`, to the record of `folder`."""
    names = ("reference", "positions", "max_relative", "tolerance", "passed")
    entry = {"kind": "verification", "prompt": options["prompt"], "tokens": options["tokens"]}
    entry["against"] = options["against"] and make_absolute(options["against"])
    _add_measurement(folder, entry | {name: getattr(result, name) for name in names})


def _add_measurement(folder: Path, entry: dict[str, Any]) -> None:
    """Add `entry` to the record of `folder`, in the place of one with the same inputs; update its model card."""
    from weft import __version__

    folder = find_model(folder)
    record, _ = read_checked(folder)
    previous = [e for e in record.get("measurements", []) if any(e.get(key) != entry.get(key) for key in INPUTS)]
    changes = {"measurements": [*previous, entry | {"weft": __version__}]}
    amend_manifest(folder, changes, {CARD: render_card(record | changes)} if CARD in record["files"] else {})
