"""Output folders and files appear whole or not at all, and replace nothing but what weft wrote."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.backends.storage import (
    MANIFEST,
    PROVENANCE,
    check_contents,
    check_format,
    check_free,
    check_unchanged,
    disk,
    output,
    partials,
    scratch_folder,
    seal,
    stamps,
    whole_file,
    whole_folder,
)
from weft.ir import WeftError

RECORD = {"weft": "0.1.0"}


def write(out: Path, text: str = "new", name: str = MANIFEST) -> None:
    with whole_folder(out) as folder:
        (folder / "model.bin").write_text(text)
        (folder / "kernels").mkdir()
        (folder / "kernels" / "linear.py").write_text("pass\n")
        seal(folder, name, RECORD)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder that weft wrote."""
    write(tmp_path / "out", "old")
    return tmp_path / "out"


@pytest.fixture(params=["exchange", "renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of replacing: file systems without an exchange of names get two renames."""
    if request.param == "renames":
        monkeypatch.setattr(output, "exchange", lambda a, b: False)
    return str(request.param)


def tree(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def siblings(out: Path) -> list[str]:
    return sorted(p.name for p in out.parent.iterdir())


def fail_inside(out: Path, failure: BaseException) -> None:
    with whole_folder(out) as folder:
        (folder / "half").write_text("new")
        raise failure


def test_a_new_folder_appears(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with whole_folder(out) as folder:
        (folder / "model.bin").write_text("new")
        seal(folder, MANIFEST, RECORD)
        assert not out.exists()
    assert (out / "model.bin").read_text() == "new"
    assert siblings(out) == ["out"]
    assert out.stat().st_mode & 0o777 == 0o777 & ~disk.umask()


def test_an_older_folder_is_replaced(out: Path, way: str) -> None:
    out.chmod(0o750)
    write(out)
    assert (out / "model.bin").read_text() == "new"
    assert siblings(out) == ["out"]
    assert out.stat().st_mode & 0o777 == 0o750


def test_an_empty_folder_is_replaced(tmp_path: Path, way: str) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert siblings(tmp_path / "out") == ["out"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), WeftError("bad weight"), RuntimeError("bug")])
def test_an_older_folder_survives_a_failure(out: Path, failure: BaseException) -> None:
    before = tree(out)
    with pytest.raises(type(failure)):
        fail_inside(out, failure)
    assert tree(out) == before
    assert siblings(out) == ["out"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EACCES, "may write to"),
        (errno.EFBIG, "largest size"),
        (errno.EIO, "error"),
    ],
)
def test_failures_of_the_file_system_are_told_in_a_sentence(out: Path, number: int, words: str) -> None:
    before = tree(out)
    with pytest.raises(WeftError, match=words) as told:
        fail_inside(out, OSError(number, os.strerror(number)))
    assert str(out) in str(told.value)
    assert tree(out) == before
    assert siblings(out) == ["out"]


# --- what is not ours is never lost ---

Layout = Callable[[Path], None]


def text(name: str, content: str = "precious") -> Layout:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)

    return make


def both(*layouts: Layout) -> Layout:
    def make(folder: Path) -> None:
        for layout in layouts:
            layout(folder)

    return make


def ours(folder: Path) -> None:
    (folder / "model.bin").write_text("old")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "linear.py").write_text("pass\n")
    seal(folder, MANIFEST, RECORD)


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


def test_what_is_foreign_is_named(out: Path) -> None:
    for name in ("thesis.tex", ".git/HEAD", "b.md", "c.md", "d.md"):
        text(name)(out)
    with pytest.raises(WeftError, match=r"\(\.git/, b\.md, c\.md and 2 more\); name an empty or new folder"):
        check_free(out)


def test_bytecode_of_our_sources_is_ours(out: Path, way: str) -> None:
    text("kernels/__pycache__/linear.cpython-311.pyc")(out)
    write(out)
    assert (out / "model.bin").read_text() == "new"
    assert siblings(out) == ["out"]


def test_what_arrives_at_the_last_moment_stays(out: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = output._replace

    def write_first(new: Path, old: Path) -> None:
        text("thesis.tex")(old)
        taken(new, old)

    monkeypatch.setattr(output, "_replace", write_first)
    with pytest.raises(WeftError, match=r"written to meanwhile \(thesis\.tex\)"):
        write(out)
    assert tree(out)["model.bin"] == "old" and tree(out)["thesis.tex"] == "precious"
    assert siblings(out) == ["out"]


def test_files_and_folders_in_the_way_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for name in ("file", "file/out"):
        with pytest.raises(WeftError, match="in the way"):
            write(tmp_path / name)
    with pytest.raises(WeftError, match="it is a folder"), whole_file(tmp_path):
        pass
    assert (tmp_path / "file").read_text() == "precious"


def test_a_source_is_never_replaced(out: Path) -> None:
    source = out / "model.bin"
    for sources, words in (([source], "it holds the source"), ([out / "." / "kernels" / "linear.py"], "it holds")):
        with pytest.raises(WeftError, match=words), whole_folder(out, sources):
            pass
    link = out.parent / "link"
    link.symlink_to(source)
    hard = out.parent / "hard"
    hard.hardlink_to(source)
    for place in (source, link, hard):
        with pytest.raises(WeftError, match="it is the source"), whole_file(place, [source]):
            pass
    assert source.read_text() == "old"


# --- names ---


def test_a_link_stays_a_link(tmp_path: Path, out: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for target in (out, tmp_path / "elsewhere" / "new"):
        link = tmp_path / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        write(link)
        assert link.is_symlink() and (target / "model.bin").read_text() == "new"
    (tmp_path / "file").write_text("old")
    (tmp_path / "to_file").symlink_to(tmp_path / "file")
    with whole_file(tmp_path / "to_file") as partial:
        partial.write_text("new")
    assert (tmp_path / "to_file").is_symlink() and (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("length", [240, 255])
def test_long_names_work(tmp_path: Path, length: int, way: str) -> None:
    for _ in range(2):
        write(tmp_path / ("o" * length))
        with whole_file(tmp_path / ("f" * length)) as partial:
            partial.write_text("new")
    assert siblings(tmp_path / "x") == ["f" * length, "o" * length]


def test_names_that_are_too_long_or_impossible_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("o" * 256, "a\0b", "loop/out"):
        with pytest.raises(WeftError, match="cannot write to"):
            write(tmp_path / name)
        with pytest.raises(WeftError, match="cannot write to"), whole_file(tmp_path / name):
            pass


def test_devices_are_written_into() -> None:
    read, end = os.pipe()
    with whole_file(Path(f"/dev/fd/{end}")) as partial:
        partial.write_text("through the pipe")
    os.close(end)
    with os.fdopen(read) as stream:
        assert stream.read() == "through the pipe"
    with whole_file(Path(os.devnull)) as partial:
        partial.write_text("nothing")
    assert not Path(os.devnull).is_file()


# --- other processes ---


def test_a_reader_always_finds_a_whole_folder(out: Path) -> None:
    done, seen = threading.Event(), set[str]()

    def poll() -> None:
        while not done.is_set():
            folder = os.open(out, os.O_RDONLY)
            with open(os.open("model.bin", os.O_RDONLY, dir_fd=folder)) as file:
                seen.add(file.read())
            os.close(folder)

    failures: list[BaseException] = []

    def watched() -> None:
        try:
            poll()
        except BaseException as e:
            failures.append(e)

    reader = threading.Thread(target=watched)
    reader.start()
    for i in range(50):
        write(out, str(i))
    done.set()
    reader.join()
    # the folder was opened, and emptied before its file was: never that the name was missing
    assert all(isinstance(e, FileNotFoundError) and e.filename == "model.bin" for e in failures)


def leave(folder: Path, how: str, ready: multiprocessing.synchronize.Event) -> None:
    """Be killed with something half-written."""
    if how == "folder":
        with whole_folder(folder / "out") as partial:
            (partial / "half").write_text("x" * 1000)
            ready.set()
            signal.pause()
    elif how == "file":
        with whole_file(folder / "page.html") as page:
            page.write_text("x" * 1000)
            ready.set()
            signal.pause()
    else:
        with scratch_folder() as scratch:
            (scratch / "half").write_text("x" * 1000)
            ready.set()
            signal.pause()


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], int]]:
    """Start processes that write into `tmp_path`, and give what kills the one of a kind."""
    monkeypatch.setattr(partials.tempfile, "tempdir", str(tmp_path))
    context = multiprocessing.get_context("fork")
    started: dict[str, multiprocessing.process.BaseProcess] = {}
    for how in ("folder", "file", "scratch"):
        ready = context.Event()
        started[how] = context.Process(target=leave, args=(tmp_path, how, ready))
        started[how].start()
        ready.wait()

    def kill(how: str) -> int:
        started[how].kill()
        started[how].join()
        return 0

    yield kill
    for how in started:
        kill(how)


def test_what_dead_processes_leave_goes_and_is_told(
    tmp_path: Path, killed: Callable[[str], int], caplog: pytest.LogCaptureFixture
) -> None:
    def left() -> int:
        return len([p for p in tmp_path.iterdir() if p.name.startswith((partials.PARTIAL, partials.SCRATCH))])

    with caplog.at_level(logging.WARNING, "weft"):
        write(tmp_path / "other")
        with scratch_folder():
            pass
    assert left() == 3 and not caplog.records  # of the living
    for how in ("folder", "file", "scratch"):
        killed(how)
    with caplog.at_level(logging.WARNING, "weft"):
        write(tmp_path / "other")
        assert left() == 1
        with scratch_folder():
            pass
    assert left() == 0
    assert sum("1000 B that an interrupted run had left" in r.getMessage() for r in caplog.records) == 3


def test_a_leftover_of_a_replaced_folder_keeps_what_is_foreign(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = out.parent / f"{partials.PARTIAL}x"
    out.rename(left)
    text("thesis.tex")(left)
    with caplog.at_level(logging.WARNING, "weft"):
        write(out)
    assert tree(left)["thesis.tex"] == "precious"
    assert "holds files that weft did not write" in caplog.text
    (left / "thesis.tex").unlink()
    write(out)
    assert siblings(out) == ["out"]


@pytest.mark.parametrize("renamed", [True, False])
def test_a_kill_between_two_renames_is_mended(out: Path, renamed: bool, caplog: pytest.LogCaptureFixture) -> None:
    before = tree(out)
    out.rename(output._aside(out))
    if renamed:
        write(out.parent / "new")
        (out.parent / "new").rename(out)
    with caplog.at_level(logging.WARNING, "weft"), pytest.raises(WeftError):
        fail_inside(out, WeftError("later"))
    assert ("restored" in caplog.text) is not renamed
    assert (tree(out) == before) is not renamed
    assert siblings(out) == ["out"]


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(20):
                write(tmp_path / "out", name)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert check_contents(tmp_path / "out") == 2
    assert siblings(tmp_path / "out") == ["out"]


def test_everything_is_flushed_before_and_after_the_exchange(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real, swap = disk.flush, output.exchange

    def note(path: Path) -> None:
        done.append(path.name if path != out.parent else "parent")
        real(path)

    def swapped(a: Path, b: Path) -> bool:
        done.append("exchange")
        return swap(a, b)

    monkeypatch.setattr(disk, "flush", note)
    monkeypatch.setattr(output, "flush", note)
    monkeypatch.setattr(output, "exchange", swapped)
    write(out)
    at = done.index("exchange")
    assert {"model.bin", "linear.py", "kernels", MANIFEST} < set(done[:at])
    assert done.index("linear.py") < done.index("kernels") < at
    assert done[at - 1].startswith(partials.PARTIAL)  # the folder itself, after all that it names
    assert done[at + 1] == "parent"


# --- checksums ---


def test_every_flipped_bit_is_noticed(out: Path) -> None:
    assert check_contents(out) == 2
    for path in (p for p in out.rglob("*") if p.is_file()):
        whole = path.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 40)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            if path.name == MANIFEST and _same(path, whole):
                continue  # white space
            with pytest.raises(WeftError):
                check_contents(out)
        path.write_bytes(whole)
    assert check_contents(out) == 2


def _same(path: Path, whole: bytes) -> bool:
    try:
        return bool(json.loads(path.read_bytes()) == json.loads(whole))
    except ValueError:
        return False


def test_missing_files_and_manifests_are_named(out: Path) -> None:
    (out / "model.bin").unlink()
    with pytest.raises(WeftError, match=r"model\.bin is missing"):
        check_contents(out)
    (out / MANIFEST).write_text("{}")
    with pytest.raises(WeftError, match="cannot be checked"):
        check_contents(out)


@pytest.mark.parametrize("version", [2, 10**9, "1", True, -1, None])
def test_newer_formats_are_refused(version: object) -> None:
    with pytest.raises(WeftError, match="upgrade weft" if type(version) is int and version > 0 else "whole number"):
        check_format(Path(PROVENANCE), {"weft": "9.0", "format": version})


# --- sources ---


def test_a_source_that_changes_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    changes: list[Callable[[], object]] = [
        lambda: path.write_bytes(b"other"),
        lambda: os.utime(path, ns=(0, 1)),
        path.unlink,
        lambda: (tmp_path / "new").rename(path),
    ]
    for change in changes:
        path.write_bytes(b"bytes")
        os.utime(path, ns=(0, 0))
        before = stamps([path, tmp_path / "missing"])
        (tmp_path / "new").write_bytes(b"bytes")
        os.utime(tmp_path / "new", ns=(0, 0))
        check_unchanged(before)
        change()
        with pytest.raises(WeftError, match=r"model\.gguf has changed while it was read"):
            check_unchanged(before)
