"""Results of long fits, stored in a folder so that an interrupted run continues where it stopped.

The key of a result is a digest of all its inputs: the tokens, the constants of the method, and all matrices up
to its own. One folder can therefore serve any number of models and settings.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft.ir import Param, WeftError
from weft.ir.recipes.readers import Array
from weft.ir.storage.documents import expand_home
from weft.ir.storage.partials import PARTIAL, create_temporary, remove_leftovers
from weft.ir.types.block_layouts import BlockLayout, Blocks


def choose_store(out: str | Path) -> Path:
    """Return the folder OUT.partial for results of long fits for `out`; call `remove_results` when `out` is written."""
    return Path(f"{os.path.abspath(expand_home(out))}.partial")


def remove_results(store: Path) -> None:
    """Remove the results in the folder `store`, and the folder if it has no other files."""
    if store.is_dir():
        remove_leftovers(store, PARTIAL)
        for file in store.glob("*.npz"):
            if re.fullmatch(r"[0-9a-f]{32}", file.stem):
                file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            store.rmdir()


class ResultStore:
    """A store of fitted blocks in `folder` (None: inactive). A key depends on all parameters given to `advance` so far.

    `tokens` (arrays of token ids) and `settings` (the constants of the method) enter every key. WeftError is raised if
    the folder cannot be created.
    """

    def __init__(self, folder: str | Path | None, tokens: Sequence[Array], *settings: object) -> None:
        self.folder = None if folder is None else expand_home(folder)
        self._digest = hashlib.sha256(repr(settings).encode())
        for ids in tokens:
            self._digest.update(repr(ids.shape).encode() + np.ascontiguousarray(ids, np.int64).tobytes())
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise WeftError(f"cannot create the folder {self.folder} for results of quantize: {e.strerror}") from e

    def advance(self, param: Param, layout: BlockLayout) -> str:
        """Add the values of `param` and its `layout` to the digest; return the key (32 hex digits) of their result."""
        self._digest.update(f"{param.name} {layout} {param.shape}".encode())
        for rows in param.recipe.blocks(param.graph.reader):
            self._digest.update(np.ascontiguousarray(rows).tobytes())
        return self._digest.hexdigest()[:32]

    def load(self, key: str) -> list[Blocks] | None:
        """Return the blocks stored as `key`, one per matrix of the stack; None if the file is missing or unreadable."""
        assert self.folder is not None
        broken = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
        path = self.folder / f"{key}.npz"
        with contextlib.suppress(*broken), open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return [
                Blocks(arrays[f"codes{i}"], arrays[f"scales{i}"], None, arrays.get(f"zeros{i}"))
                for i in range(int(arrays["count"]))
            ]
        return None

    def save(self, key: str, blocks: Sequence[Blocks]) -> None:
        """Store `blocks` as `key` atomically; raise WeftError if the file cannot be written."""
        assert self.folder is not None
        arrays: dict[str, Array] = {"count": np.array(len(blocks))}
        for i, block in enumerate(blocks):
            arrays |= {f"codes{i}": block.codes, f"scales{i}": block.scales}
            if block.zeros is not None:
                arrays[f"zeros{i}"] = block.zeros
        try:
            with create_temporary(self.folder, folder=False) as partial:
                with partial.open("wb") as file:
                    np.savez(file, allow_pickle=False, **arrays)
                partial.replace(self.folder / f"{key}.npz")
        except OSError as e:
            raise WeftError(f"cannot store a result of quantize in the folder {self.folder}: {e.strerror}") from e
