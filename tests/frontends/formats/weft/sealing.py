"""Folders whose files a test has changed, with checksums as if they had been so from the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.ir.storage import MANIFEST, write_manifest
from weft.ir.storage.contents import SEALED


def seal_again(folder: Path, **changes: Any) -> None:
    """Give what a test has changed in `folder` the checksums that it would have from the start."""
    record = json.loads((folder / MANIFEST).read_text())
    write_manifest(folder, MANIFEST, {key: value for key, value in record.items() if key not in SEALED} | changes)
