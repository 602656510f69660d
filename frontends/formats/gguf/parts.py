"""GGUF files in several parts, as llama-gguf-split writes them: NAME-00001-of-00003.gguf, NAME-00002-of-00003.gguf, …

The first part has the metadata; every part has some of the tensors, and states the number of parts (`split.count`), its
own index from 0 (`split.no`) and the number of all tensors (`split.tensors.count`).
"""

from __future__ import annotations

import re
from pathlib import Path

from weft.ir.errors import WeftError

from .header import Header, read_header

_PART = re.compile(r"(.*-)\d{5}-of-(\d{5})(\.gguf)")


def list_parts(path: Path) -> tuple[Path, ...]:
    """Return the paths of all parts, in order, if `path` is named as a part, else only `path`; they need not exist."""
    match = _PART.fullmatch(path.name)
    names = [f"{match[1]}{i + 1:05}-of-{match[2]}{match[3]}" for i in range(int(match[2]))] if match else []
    return tuple(map(path.with_name, names)) if path.name in names else (path,)


def read_parts(path: Path) -> dict[Path, Header]:
    """Read the headers of all parts of the model that the file at `path` belongs to; return path → header, in order.

    Raises:
        WeftError: if a part is missing, invalid, or belongs to another model by its index, count or tensors.
    """
    header, files, parts = read_header(path), list_parts(path), dict[Path, Header]()
    if (count := header.metadata.get("split.count", 1)) in (0, 1):
        return {path: header}
    if len(files) != count:
        raise WeftError(f"{path} is one of {count} parts: name the parts NAME-00001-of-{count:05}.gguf and so on")
    homes: dict[str, Path] = {}
    for number, file in enumerate(files):
        if not file.is_file():
            raise WeftError(f"{path} is one of {count} parts, and {file.name} is missing: fetch it too")
        part = parts[file] = header if file == path else read_header(file)
        no, of = (part.metadata.get(f"split.{key}") for key in ("no", "count"))
        if (no, of) != (number, count):
            raise WeftError(f"{file} has split.no {no} of split.count {of}, not {number} of {count}: fetch it again")
        if repeated := homes.keys() & part.tensors.keys():
            raise WeftError(f"{file} and {homes[min(repeated)]} both have the tensor {min(repeated)}: fetch them again")
        homes |= dict.fromkeys(part.tensors, file)
    if (total := header.metadata.get("split.tensors.count", len(homes))) != len(homes):
        raise WeftError(f"the parts of {path} have {len(homes)} tensors instead of {total}: fetch them again")
    return parts
