"""Look up models in the local cache of the Hugging Face hub; nothing is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from weft.ir.errors import WeftError
from weft.ir.storage.documents import expand_home, read_text

HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")


def find_snapshot(spec: str) -> Path | None:
    """Return the folder of the cached snapshot of branch main of the hub repository `spec`; None without one."""
    if not HUB_ID.fullmatch(spec):
        return None
    try:
        home = expand_home(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    except WeftError:  # without a home folder there is no cache
        return None
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    repository = cache / f"models--{spec.replace('/', '--')}"
    ref = repository / "refs" / "main"
    snapshot = repository / "snapshots" / (read_text(ref).strip() if ref.is_file() else "")
    return snapshot if ref.is_file() and snapshot.is_dir() else None


def check_inside(folder: Path, file: Path) -> None:
    """Check that `file` is inside `folder` after following links; in a snapshot of the hub, inside the repository.

    Raises:
        WeftError: if it is outside.
    """
    resolved_folder, resolved_file = folder.resolve(), file.resolve()
    root = next((parent.parent for parent in resolved_folder.parents if parent.name == "snapshots"), resolved_folder)
    if not resolved_file.is_relative_to(root):
        raise WeftError(f"{file} is a link to {resolved_file}, outside the model's folder: copy the file into it")
