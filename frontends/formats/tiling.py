"""A check that tensors tile a checkpoint file: consecutive, each byte in exactly one."""

from __future__ import annotations

from collections.abc import Mapping

from weft.ir.errors import WeftError


def check_tiling(name: str, extents: Mapping[str, tuple[int, int]], start: int, size: int, align: int = 1) -> None:
    """Raise WeftError unless the tensors of the file `name` are consecutive from byte `start` and end by byte `size`.

    `extents` has (first byte, byte after the last) of each tensor. Each tensor must begin at the first multiple of
    `align` after the previous one. The safetensors library and llama.cpp require the same: shared or unused bytes
    indicate a damaged header or hidden data.
    """
    end, previous = start, "the header"
    for key, (first, last) in sorted(extents.items(), key=lambda item: item[1]):
        expected = -(-end // align) * align
        if gap := first - expected:
            fault = "overlaps" if first < end else f"leaves {gap} unused byte{'s' * (gap > 1)} after"
            raise WeftError(f"{name} is damaged: tensor {key!r} at byte {first} {fault} {previous}; fetch it again")
        end, previous = last, f"tensor {key!r}"
    if end > size:
        raise WeftError(f"{name} is truncated: its tensors end at byte {end}, the file at {size}; fetch it again")
