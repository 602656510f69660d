"""Loading of the source that the manifest of a compiled folder names."""

from __future__ import annotations

from pathlib import Path

from weft.backends.runtime.compiled_folder import MANIFEST
from weft.backends.runtime.trust import require_trust
from weft.ir.errors import WeftError
from weft.ir.storage.contents import hash_file
from weft.ir.storage.documents import Record

from ....model import Model
from .sources import find_architecture_file, load_source


def load_recorded_source(folder: Path, manifest: Record, trust: bool = False) -> Model:
    """Return the source that `folder` was compiled from, after a check that its files have not changed.

    An architecture file is code: it runs only with `trust`, and only if it is the file that was compiled.

    Raises:
        WeftError: if the manifest names no source, or the source cannot be read, has changed, or is not trusted.
    """
    source = manifest.record("source", {})
    spec, seed, hashes = source.text("spec", ""), source.integer("seed", 0), source.get("hashes", dict[str, str], {})
    adapters, family = source.get("adapters", list[str], []), source.text("family", "") or None
    without = source.get("without", list[str], [])
    if not spec:
        raise WeftError(f"{folder / MANIFEST} names no source that can be loaded again: the model was built in Python")
    if (code := find_architecture_file(spec)) is not None:
        require_trust(trust, f"{folder} names {spec} as its source, which is code that this would run")
        if code.is_file() and hashes.get(code.name) != hash_file(code):
            raise _make_changed_error(folder, spec, [code.name])
    try:
        model = load_source(spec, seed or None, adapters, family, without)
    except WeftError as error:
        raise WeftError(f"{folder} was compiled from {spec}, which cannot be read again: {error}") from error
    hashes_now = model.hashes()
    if changed := sorted(
        name for name in hashes.keys() | hashes_now.keys() if hashes.get(name) != hashes_now.get(name)
    ):
        raise _make_changed_error(folder, spec, changed)
    return model


def _make_changed_error(folder: Path, spec: str, names: list[str]) -> WeftError:
    return WeftError(f"{folder}: its source {spec} has changed ({', '.join(names)}): compile it again")
