"""The local cache of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from weft.ir.errors import WeftError
from weft.ir.storage.documents import expanded, read_text

HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")


def hub_snapshot(spec: str) -> Path | None:
    """The newest local snapshot of the hub repository `spec`, if it was downloaded before."""
    if not HUB_ID.fullmatch(spec):
        return None
    try:
        home = expanded(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    except WeftError:  # no home folder, so there is no cache in it
        return None
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    repository = cache / f"models--{spec.replace('/', '--')}"
    ref = repository / "refs" / "main"
    snapshot = repository / "snapshots" / (read_text(ref).strip() if ref.is_file() else "")
    return snapshot if ref.is_file() and snapshot.is_dir() else None


def check_inside(folder: Path, file: Path) -> None:
    """Check that `file` lies in `folder`, links followed; the hub's snapshots and their folders link to blobs.

    Raises:
        WeftError: if it does not.
    """
    home, real = folder.resolve(), file.resolve()
    root = next((at.parent for at in home.parents if at.name == "snapshots"), home)
    if not real.is_relative_to(root):
        raise WeftError(f"{file} is a link to {real}, outside of the model's folder: copy the file if it belongs there")
