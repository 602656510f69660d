"""Other processes: readers, writers of the same folder, and those that died."""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.ir import WeftError
from weft.ir.storage import (
    MANIFEST,
    check_contents,
    disk,
    output,
    partials,
    replace_file,
    replace_folder,
    scratch_folder,
)

from .written import fail_inside, siblings, text, tree, write


def test_a_reader_always_finds_a_whole_folder(out: Path) -> None:
    """Every look at the name finds a folder, and by its manifest a whole one: the older or the new."""
    done, failures, seen = threading.Event(), list[BaseException](), set[str]()

    def poll() -> None:
        try:
            while not done.is_set():
                seen.add(json.loads((out / MANIFEST).read_text())["files"]["model.bin"])
        except BaseException as e:
            failures.append(e)

    reader = threading.Thread(target=poll)
    reader.start()
    for i in range(50):
        write(out, str(i))
    done.set()
    reader.join()
    assert not failures
    assert len(seen) > 1  # it read while the folder was replaced


def leave(folder: Path, how: str, ready: multiprocessing.synchronize.Event) -> None:
    """Be killed with something half-written."""
    if how == "folder":
        with replace_folder(folder / "out") as partial:
            (partial / "half").write_text("x" * 1000)
            ready.set()
            signal.pause()
    elif how == "file":
        with replace_file(folder / "page.html") as page:
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


def test_leftovers_of_dead_processes_are_removed_and_reported(
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


def test_leftover_of_a_replaced_folder_keeps_foreign_files(out: Path, caplog: pytest.LogCaptureFixture) -> None:
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
def test_kill_between_two_renames_is_recovered(out: Path, renamed: bool, caplog: pytest.LogCaptureFixture) -> None:
    before = tree(out)
    out.rename(output._backup_path(out))
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
    real, swap = disk.flush, output.swap_paths

    def note(path: Path) -> None:
        done.append(path.name if path != out.parent else "parent")
        real(path)

    def swapped(a: Path, b: Path) -> bool:
        done.append("exchange")
        return swap(a, b)

    monkeypatch.setattr(disk, "flush", note)
    monkeypatch.setattr(output, "flush", note)
    monkeypatch.setattr(output, "swap_paths", swapped)
    write(out)
    at = done.index("exchange")
    assert {"model.bin", "linear.py", "kernels", MANIFEST} < set(done[:at])
    assert done.index("linear.py") < done.index("kernels") < at
    assert done[at - 1].startswith(partials.PARTIAL)  # the folder itself, after all that it names
    assert done[at + 1] == "parent"
