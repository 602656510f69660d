"""Products by weights that are packed for a CPU, as multiples of the error that their roundings allow.

As a script it prints the largest, for the instructions that ATEN_CPU_CAPABILITY leaves to PyTorch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch

from weft.backends.torch.kernels.cpu import packed
from weft.backends.torch.kernels.shared.quantized_gemv import Codes
from weft.backends.torch.lib.quantized import block_linear
from weft.ir.types.block_layouts import pack_words

SHAPES = [  # bits, group, rows of W, width: groups of each size that operators take, and of others
    (4, 32, 64, 576),
    (4, 32, 1, 64),
    (4, 64, 33, 192),
    (4, 96, 17, 288),
    (4, 128, 130, 256),
    (4, 256, 16, 512),
    (4, 512, 40, 512),
    (4, 70, 19, 70),  # a group as long as a row, which is no multiple of 32
    (8, 32, 65, 160),
    (8, 32, 1, 96),
    (8, 128, 48, 384),
    (8, 50, 3, 50),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Drawn:
    """A weight: its codes [out, width] as whole numbers, scales and offsets [groups, out] as kernels take them."""

    codes: np.ndarray
    given: Codes

    def number(self, part: torch.Tensor | None) -> np.ndarray:
        """Scales or offsets of each code, f64 [out, width]; 0 where there are none."""
        if part is None:
            return np.zeros(self.codes.shape)
        return part.double().numpy().T.repeat(self.codes.shape[1] // len(part), 1)


def draw(bits: int, group: int, out: int, width: int, offsets: bool = True, seed: int = 0) -> Drawn:
    """Draw codes, of which every seventh row stands for zeros, scales in f16, and zero points as offsets."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (out, width))
    scales = torch.from_numpy(rng.uniform(0.01, 0.03, (width // group, out))).half()
    zeros = torch.from_numpy(rng.integers(0, 1 << bits, (width // group, out)))
    zeros[:, 6::7] = (1 << (bits - 1)) + 1
    if offsets:
        codes[6::7] = (1 << (bits - 1)) + 1
    else:
        codes[6::7] = 1 << (bits - 1)
    words = torch.from_numpy(pack_words(codes.astype(np.uint8)[:, None], bits))
    shift = scales.float() * ((1 << (bits - 1)) - zeros)
    return Drawn(codes, Codes(words, scales, shift if offsets else None, bits, width))


def excess(drawn: Drawn, x: torch.Tensor) -> float:
    """The largest error of x Wᵀ, x [..., in], as a multiple of its bound."""
    given, (_, width) = drawn.given, drawn.codes.shape
    middle, scales, offsets = 1 << (given.bits - 1), drawn.number(given.scales), drawn.number(given.offsets)
    weight = scales * (drawn.codes - middle) + offsets
    got = block_linear(x, *given.parts, bits=given.bits)
    assert got.dtype == x.dtype and got.shape == (*x.shape[:-1], len(weight))
    exact = x.double().numpy()
    want, size = exact @ weight.T, np.abs(exact) @ np.abs(weight).T
    unit, sums = torch.finfo(x.dtype).eps / 2, 2 * np.sqrt(width) * torch.finfo(torch.float32).eps / 2
    if x.dtype == torch.bfloat16:
        # Scales and offsets are rounded, and in products of many rows the numbers, too; planes of 8 bits have their
        # middle at 136. Sums have the codes of both planes, and offsets, as terms.
        centred = np.abs(drawn.codes - (8 if given.bits == 4 else 136))
        moved = np.abs(offsets + (8 * scales if given.bits == 8 else 0))
        parts = np.abs(exact) @ (scales * (16 * 16 if given.bits == 8 else 8) + moved).T
        rounded = np.abs(exact) @ (scales * centred + (moved if given.bits == 4 else moved * unit)).T
        bound = unit * (rounded + size + np.abs(want)) + 2 * sums * parts
    elif x.dtype == torch.float16:
        bound = unit * (size + np.abs(want)) + sums * size
    else:
        bound = (2.0**-22 + sums) * size
    # Of two factors of f16 only the least part may be lost below its smallest number.
    bound += torch.finfo(x.dtype).tiny
    return float((np.abs(got.double().numpy() - want) / bound).max())


def tokens(width: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw x [2, rows / 2, width], or of one row [1, 1, width]."""
    x = np.random.default_rng(rows).normal(size=(min(rows, 2), -(-rows // 2), width))
    return torch.from_numpy(x).to(dtype)


def main() -> None:
    worst = 0.0
    for shape in SHAPES:
        drawn = draw(*shape)
        worst = max(worst, *(excess(drawn, tokens(shape[3], n, dtype)) for n in (1, 2, 8) for dtype in DTYPES))
    reasons = {f"{dtype}".removeprefix("torch."): packed.refusal(dtype) for dtype in DTYPES}
    capability = torch.backends.cpu.get_cpu_capability()
    print(json.dumps({"capability": capability, "worst": worst, "refusals": reasons}))


if __name__ == "__main__":
    main()
