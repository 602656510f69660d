"""Files that weft did not write are never lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from weft.ir import WeftError
from weft.ir.storage import MANIFEST, check_replaceable, output, replace_file, replace_folder, write_manifest

from .written import RECORD, Layout, siblings, text, tree, write


def both(*layouts: Layout) -> Layout:
    def make(folder: Path) -> None:
        for layout in layouts:
            layout(folder)

    return make


def ours(folder: Path) -> None:
    (folder / "model.bin").write_text("old")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "linear.py").write_text("pass\n")
    write_manifest(folder, MANIFEST, RECORD)


def listing(files: object) -> Layout:
    return text(MANIFEST, json.dumps({"weft": "0.1.0", "files": files}))


FOREIGN: dict[str, Layout] = {
    "a file": text("thesis.tex"),
    "an empty folder": lambda folder: (folder / "drafts").mkdir(),
    "a repository": text(".git/HEAD"),
    "a hidden file": text(".env"),
    "somebody's provenance.json": both(text("provenance.json", "{}"), text("thesis.tex")),
    "somebody's weft.json": both(text("weft.json", '{"loom": 3}'), text("cloth.csv")),
    "a manifest alone that lists nothing": text("weft.json", '{"weft": "0.1.0"}'),
    "a broken manifest": both(text("weft.json", '{"weft": '), text("model.bin")),
    "a manifest nested too deep": both(text("weft.json", "[" * 100_000), text("model.bin")),
    "a list of files that is none": both(listing(["thesis.tex"]), text("thesis.tex")),
    "a list that reaches out": both(listing({"../notes.txt": "0" * 64}), text("thesis.tex")),
    "a file beside ours": both(ours, text("thesis.tex")),
    "a file in a folder of ours": both(ours, text("kernels/mine.py")),
    "a folder beside ours": both(ours, text("notes/monday.md")),
    "an empty folder beside ours": both(ours, lambda folder: (folder / "notes").mkdir()),
    "a source in our folder": both(ours, text("model.gguf")),
    "a link beside ours": both(ours, lambda folder: (folder / "link").symlink_to("/etc/passwd")),
    "a link in the place of one of ours": both(
        ours, lambda folder: ((folder / "model.bin").unlink(), (folder / "model.bin").symlink_to("elsewhere"))[0]
    ),
    "a pipe beside ours": both(ours, lambda folder: os.mkfifo(folder / "pipe")),
    "bytecode of a foreign source": both(ours, text("kernels/__pycache__/mine.cpython-311.pyc")),
    "notes among bytecode": both(ours, text("kernels/__pycache__/notes.txt")),
    "an edited source of ours": both(ours, text("kernels/linear.py", "changed = 1\n")),
    "retrained weights in ours": both(ours, text("model.bin", "trained")),
    "an edited manifest of ours": both(
        ours, lambda folder: text(MANIFEST, (folder / MANIFEST).read_text().replace("0.1.0", "0.1.1"))(folder)
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_never_lost(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    FOREIGN[name](out)
    before = sorted((str(p), p.lstat().st_ino) for p in out.rglob("*"))
    with pytest.raises(WeftError, match="will not replace"):
        write(out)
    assert sorted((str(p), p.lstat().st_ino) for p in out.rglob("*")) == before
    assert siblings(out) == ["out"]


def test_foreign_files_are_named_in_the_refusal(out: Path) -> None:
    for name in ("thesis.tex", ".git/HEAD", "b.md", "c.md", "d.md"):
        text(name)(out)
    with pytest.raises(WeftError, match=r"\(\.git/, b\.md, c\.md and 2 more\); name an empty or new folder"):
        check_replaceable(out)


def test_bytecode_of_our_sources_is_ours(out: Path, way: str) -> None:
    text("kernels/__pycache__/linear.cpython-311.pyc")(out)
    write(out)
    assert (out / "model.bin").read_text() == "new"
    assert siblings(out) == ["out"]


def test_files_added_during_replacement_are_kept(out: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = output._swap_folders

    def write_first(new: Path, old: Path) -> None:
        text("thesis.tex")(old)
        taken(new, old)

    monkeypatch.setattr(output, "_swap_folders", write_first)
    with pytest.raises(WeftError, match=r"written to meanwhile \(thesis\.tex\)"):
        write(out)
    assert tree(out)["model.bin"] == "old" and tree(out)["thesis.tex"] == "precious"
    assert siblings(out) == ["out"]


def test_files_and_folders_in_the_way_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for name in ("file", "file/out"):
        with pytest.raises(WeftError, match="in the way"):
            write(tmp_path / name)
    with pytest.raises(WeftError, match="it is a folder"), replace_file(tmp_path):
        pass
    assert (tmp_path / "file").read_text() == "precious"


def test_a_source_is_never_replaced(out: Path) -> None:
    source = out / "model.bin"
    for sources, words in (([source], "it holds the source"), ([out / "." / "kernels" / "linear.py"], "it holds")):
        with pytest.raises(WeftError, match=words), replace_folder(out, sources):
            pass
    link = out.parent / "link"
    link.symlink_to(source)
    hard = out.parent / "hard"
    hard.hardlink_to(source)
    for place in (source, link, hard):
        with pytest.raises(WeftError, match="it is the source"), replace_file(place, [source]):
            pass
    assert source.read_text() == "old"
