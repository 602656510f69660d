"""Results of long fits in a folder, so that a run that was stopped goes on where it was.

A result is found by a digest of all that it was made of: the tokens, the constants of the method, and every matrix up
to it. A folder may therefore serve any number of models and settings, and never returns what belongs to another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Sequence

import numpy as np

from weft.ir import Param, WeftError
from weft.ir.recipes.readers import Array
from weft.ir.storage.documents import expanded
from weft.ir.types.block_layouts import BlockLayout, Blocks


class Finished:
    """Blocks of matrices in `folder`, in the order in which they are fitted; without a folder nothing is kept.

    Raises:
        WeftError: if the folder cannot be made.
    """

    def __init__(self, folder: str | None, tokens: Sequence[Array], *settings: object) -> None:
        self._folder = None if folder is None else expanded(folder)
        self._digest = hashlib.sha256(repr(settings).encode())
        for ids in tokens:
            self._digest.update(repr(ids.shape).encode() + np.ascontiguousarray(ids, np.int64).tobytes())
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise WeftError(f"no folder {self._folder} for results of quantize can be made: {e.strerror}") from e

    @property
    def keeps(self) -> bool:
        """True if results are kept at all."""
        return self._folder is not None

    def advance(self, param: Param, layout: BlockLayout) -> str:
        """Take the next matrix into account, and return the key of its result."""
        self._digest.update(f"{param.name} {layout} {param.shape}".encode())
        for rows in param.recipe.blocks(param.graph.reader):
            self._digest.update(np.ascontiguousarray(rows).tobytes())
        return self._digest.hexdigest()[:32]

    def load(self, key: str) -> list[Blocks] | None:
        """The blocks called `key`, of a stack one for each matrix; None if there are none, or the file is broken."""
        assert self._folder is not None
        broken = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
        path = self._folder / f"{key}.npz"
        with contextlib.suppress(*broken), open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = []
            for i in range(int(arrays["count"])):
                zeros = arrays.get(f"zeros{i}")
                found.append(Blocks(arrays[f"codes{i}"], arrays[f"scales{i}"], None, zeros))
            return found
        return None

    def save(self, key: str, blocks: Sequence[Blocks]) -> None:
        """Keep `blocks` under `key`; the file is whole or not there.

        Raises:
            WeftError: if there is no room.
        """
        assert self._folder is not None
        arrays: dict[str, Array] = {"count": np.array(len(blocks))}
        for i, one in enumerate(blocks):
            arrays |= {f"codes{i}": one.codes, f"scales{i}": one.scales}
            if one.zeros is not None:
                arrays[f"zeros{i}"] = one.zeros
        partial = None
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".partial", delete=False) as file:
                partial = file.name
                np.savez(file, allow_pickle=False, **arrays)
            os.replace(partial, self._folder / f"{key}.npz")
        except OSError as e:
            if partial is not None:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
            raise WeftError(f"no room for a result of quantize in {self._folder}: {e.strerror}") from e
