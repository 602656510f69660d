"""Check that tensors tile a checkpoint file: consecutive, each byte in exactly one."""

from __future__ import annotations

from collections.abc import Mapping

from weft.ir.errors import WeftError


def check_tiled(name: str, extents: Mapping[str, tuple[int, int]], start: int, size: int, align: int = 1) -> None:
    """Raise WeftError unless the tensors of the file `name` of `size` bytes lie one behind the other from `start` on.

    `extents` are the first byte of each and the one behind its last; each begins at the next multiple of `align`. The
    safetensors library and llama.cpp ask for the same: bytes that two tensors share, or that none has, are a damaged
    header, or hide something.
    """
    end, before = start, "the header"
    for key, (first, last) in sorted(extents.items(), key=lambda item: item[1]):
        expected = -(-end // align) * align
        if first != expected:
            where = "overlaps" if first < end else f"begins {first - expected} bytes too far behind"
            raise WeftError(f"{name} is damaged: tensor {key!r} at byte {first} {where} {before}; fetch it again")
        end, before = last, f"tensor {key!r}"
    if end > size:
        raise WeftError(f"{name} is truncated: its tensors end at byte {end}, the file at {size}; fetch it again")
