"""Memory that is moved to huge pages holds what it held, and nothing else is moved."""

from __future__ import annotations

import mmap
import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from weft.backends.runtime import huge_pages as module
from weft.backends.runtime.huge_pages import _subtract_ranges, use_huge_pages

MIB = 1 << 20


def taken(size: int) -> tuple[mmap.mmap, np.ndarray]:
    """Map new memory, separate from numpy's, which requests huge pages itself."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    numbers = np.frombuffer(memory, np.uint32)
    numbers[:] = np.arange(numbers.size)
    return memory, numbers


def in_huge_pages() -> int:
    """Return the bytes of the process that are in huge pages."""
    found = re.search(r"^AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


def finish() -> None:
    for thread in threading.enumerate():
        if thread.name == "weft huge pages":
            thread.join(60)
            assert not thread.is_alive()


def test_allocated_memory_moves_to_huge_pages_with_its_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    finish()  # what other tests have opened
    other, outside = taken(32 * MIB)
    asking, asked = taken(32 * MIB)
    before = in_huge_pages()
    if page := module._read_page_size():
        module._collapse_ranges([(-(-asked.ctypes.data // page) * page, asked.ctypes.data + 16 * MIB)], page)
    gives_them = in_huge_pages() > before  # to a program that asks

    moved: list[module.Ranges] = []
    collapse = module._collapse_ranges
    monkeypatch.setattr(module, "_collapse_ranges", lambda found, page: (moved.append(found), collapse(found, page)))
    with use_huge_pages():
        memory, numbers = taken(64 * MIB)
        before = in_huge_pages()
    finish()
    np.testing.assert_array_equal(numbers, np.arange(numbers.size, dtype=np.uint32))
    np.testing.assert_array_equal(outside, np.arange(outside.size, dtype=np.uint32))
    assert (in_huge_pages() > before) is gives_them
    for first, end in (span for ranges in moved for span in ranges):
        assert end <= outside.ctypes.data or outside.ctypes.data + outside.nbytes <= first, "taken before, yet moved"
    del numbers, outside, asked
    memory.close(), other.close(), asking.close()


def test_memory_freed_during_collapse_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[module.Ranges] = []
    monkeypatch.setattr(module, "_collapse_ranges", lambda found, page: ranges.append(found))
    monkeypatch.setattr(module, "_read_page_size", lambda: 2 * MIB)
    with use_huge_pages():
        memory, numbers = taken(64 * MIB)
    finish()
    monkeypatch.undo()
    del numbers
    memory.close()
    assert ranges
    module._collapse_ranges(ranges[0], 2 * MIB)


def test_little_memory_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_collapse_ranges", lambda *_: pytest.fail("moved"))
    with use_huge_pages():
        memory, numbers = taken(4 * MIB)
    finish()
    del numbers
    memory.close()


@pytest.mark.parametrize(
    ("enabled", "size", "expected"),
    [
        ("always [madvise] never", "2097152\n", 2 * MIB),
        ("[always] madvise never", "2097152\n", 2 * MIB),
        ("always madvise [never]", "2097152\n", 0),
        ("always [madvise] never", "", 0),
        (None, None, 0),
    ],
)
def test_system_setting_for_huge_pages_is_obeyed(
    enabled: str | None, size: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTINGS", tmp_path)
    monkeypatch.setattr(module.sys, "platform", "linux")
    if enabled is not None and size is not None:
        (tmp_path / "enabled").write_text(enabled)
        (tmp_path / "hpage_pmd_size").write_text(size)
    assert module._read_page_size() == expected
    monkeypatch.setattr(module.sys, "platform", "win32")
    assert module._read_page_size() == 0


def test_ranges_are_subtracted() -> None:
    draw = random.Random(0)

    def mappings() -> list[tuple[int, int]]:
        borders = sorted(draw.sample(range(60), 2 * draw.randrange(6)))
        return list(zip(borders[::2], borders[1::2], strict=True))

    for _ in range(2000):
        ranges, others = mappings(), mappings()
        expected = {x for a, b in ranges for x in range(a, b)} - {x for a, b in others for x in range(a, b)}
        found = _subtract_ranges(ranges, others)
        assert [x for a, b in found for x in range(a, b)] == sorted(expected)
        assert all(a < b for a, b in found)
