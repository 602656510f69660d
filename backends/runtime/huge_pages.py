"""Huge pages for weights: a decode step reads all of them, so 4 KiB pages cause many TLB misses.

Where Linux leaves the choice to programs (`madvise`, the default of most distributions), memory that a library
allocates is in small pages. In a virtual machine, they made decode steps 2 to 11 percent slower while other processes
ran, and up to 20 percent slower on an idle machine. MADV_COLLAPSE (Linux 6.1) moves existing memory to huge pages;
contents and addresses stay the same.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_COLLAPSE = 25  # MADV_COLLAPSE of Linux
_MIN_BYTES = 16 << 20  # least bytes of new memory for which a thread is started
_STRIDE = 32 << 20  # bytes per call: the kernel locks the memory map during a call
_log = logging.getLogger("weft.runtime")

Ranges = list[tuple[int, int]]


@contextmanager
def use_huge_pages() -> Iterator[None]:
    """Move anonymous memory that the process allocates inside the block to huge pages, in a thread that starts after
    the block. Do nothing if the system lacks or forbids huge pages, or if the block allocated less than 16 MiB."""
    page = _read_page_size()
    before = _list_anonymous_ranges() if page else []
    yield
    if page:
        ranges = [
            (-(-first // page) * page, end // page * page)
            for first, end in _subtract_ranges(_list_anonymous_ranges(), before)
        ]
        ranges = [(first, end) for first, end in ranges if first < end]
        if sum(end - first for first, end in ranges) >= _MIN_BYTES:
            threading.Thread(target=_collapse_ranges, args=(ranges, page), name="weft huge pages", daemon=True).start()


def _read_page_size() -> int:
    """Return the size of a huge page in bytes; 0 if the system lacks or forbids huge pages."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        allowed = "[never]" not in (_SETTINGS / "enabled").read_text()
        return int((_SETTINGS / "hpage_pmd_size").read_text()) if allowed else 0
    except (OSError, ValueError):
        return 0


def _list_anonymous_ranges() -> Ranges:
    """Return (start, exclusive end) of private writable anonymous mappings and the heap, ascending; [] if unknown."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    fields = (line.split(maxsplit=5) for line in lines)
    plain = (f[0] for f in fields if f[1] == "rw-p" and (len(f) == 5 or f[5] == "[heap]"))
    return [(int(first, 16), int(end, 16)) for first, _, end in (where.partition("-") for where in plain)]


def _subtract_ranges(ranges: Ranges, excluded: Ranges) -> Ranges:
    """Return the parts of `ranges` that no range in `excluded` covers; both lists are sorted and without overlaps."""
    rest: Ranges = []
    for first, end in ranges:
        for low, high in excluded:
            if low < end and first < high:
                if first < low:
                    rest.append((first, low))
                first = high
        if first < end:
            rest.append((first, end))
    return rest


def _collapse_ranges(ranges: Ranges, page: int) -> None:
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    stride = max(page, _STRIDE // page * page)
    trouble: set[str] = set()
    for first, end in ranges:
        for at in range(first, end, stride):
            # Memory that was freed meanwhile, or never written, stays in small pages.
            if advise(at, min(stride, end - at), _MADV_COLLAPSE):
                trouble.add(os.strerror(ctypes.get_errno()))
    if trouble:
        _log.debug("huge pages: some memory stays in small ones: %s", "; ".join(sorted(trouble)))
