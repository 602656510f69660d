"""GGUF files in several parts, as llama-gguf-split writes them: NAME-00001-of-00003.gguf and so on.

The first part has the metadata, every part some of the tensors. Each says how many there are (`split.count`), which it
is (`split.no`, from 0) and the number of all tensors (`split.tensors.count`).
"""

from __future__ import annotations

import re
from pathlib import Path

from weft.ir.errors import WeftError

from .header import Header, read_header

_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\.gguf)")
MOST_PARTS = 10_000


def part_files(path: Path) -> tuple[Path, ...]:
    """The files of the model of which the file at `path` is one by its name, whether or not they are there."""
    if (match := _PART.fullmatch(path.name)) is None or not 1 <= int(match[3]) <= MOST_PARTS:
        return (path,)
    return tuple(path.with_name(f"{match[1]}{i:05}-of-{match[3]}{match[4]}") for i in range(1, int(match[3]) + 1))


def read_parts(path: Path) -> dict[Path, Header]:
    """Read the headers of all parts of the model of which the file at `path` is one, the first part first.

    Raises:
        WeftError: if a part is missing, unsound or another model's.
    """
    header = read_header(path)
    count = header.metadata.get("split.count", 1)
    if count in (0, 1):
        return {path: header}
    files = part_files(path)
    if len(files) != count:
        raise WeftError(
            f"{path} is one of {count} parts, and its name must say so, as in NAME-00001-of-{count:05}.gguf: give the "
            "parts their names back, or merge them with llama-gguf-split --merge"
        )
    for file in files:
        if not file.is_file():
            raise WeftError(f"{path} is one of {count} parts, and {file.name} is missing: fetch it too")
    parts = {file: header if file == path else read_header(file) for file in files}
    seen: dict[str, Path] = {}
    for number, (file, part) in enumerate(parts.items()):
        said = part.metadata.get("split.count"), part.metadata.get("split.no")
        if said != (count, number):
            raise WeftError(
                f"{file} says that it is part {said[1]} (from 0) of {said[0]}: its name or its model is another"
            )
        for name in part.tensors:
            if name in seen:
                raise WeftError(
                    f"{file} holds the tensor {name}, as {seen[name]} does: the parts are of several models"
                )
            seen[name] = file
    total = header.metadata.get("split.tensors.count", len(seen))
    if total != len(seen):
        raise WeftError(f"{path} says that the parts hold {total} tensors, and they hold {len(seen)}: fetch them again")
    return parts
