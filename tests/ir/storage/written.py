"""Files that the tests of storage write, and how they inspect them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weft.ir.storage import MANIFEST, replace_folder, write_manifest

RECORD = {"weft": "0.1.0"}


def write(out: Path, text: str = "new", name: str = MANIFEST) -> None:
    with replace_folder(out) as folder:
        (folder / "model.bin").write_text(text)
        (folder / "kernels").mkdir()
        (folder / "kernels" / "linear.py").write_text("pass\n")
        write_manifest(folder, name, RECORD)


def tree(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def siblings(out: Path) -> list[str]:
    return sorted(p.name for p in out.parent.iterdir())


def fail_inside(out: Path, failure: BaseException) -> None:
    with replace_folder(out) as folder:
        (folder / "half").write_text("new")
        raise failure


Layout = Callable[[Path], None]


def text(name: str, content: str = "precious") -> Layout:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)

    return make
