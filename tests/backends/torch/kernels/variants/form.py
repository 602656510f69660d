"""Forms in which kernels are compiled: types and constants of their arguments, and what the machine code must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.backends.torch.kernels.shared.gemv import Tile
from weft.backends.torch.kernels.shared.launch import DTYPES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CODES = {"weight": "*i32", "scales": "*fp16", "offsets": "*fp32"}  # their types, where they come from a checkpoint
FLOATS = {"weight": "*fp8e4nv", "scales": "*fp32"}  # likewise
MXFP4 = {"weight": "*u8", "scales": "*u8"}
NVFP4 = {"weight": "*u8", "scales": "*fp8e4nv", "offsets": "*fp32"}


@dataclass(frozen=True)
class Variant:
    """A compiled form of a kernel that ships: what the offline check compiles, and what it must find.

    `types` are the Triton types of the arguments that are not constants ("*bf16", "*fp32", "i32", …); pointers count
    as aligned to 16 bytes, and the integers named in `divisible` are multiples of 16. `constants` are all other
    arguments, with None for a pointer that is not given. `vectors` says that 16-byte loads from global memory must be
    there, `pdl` that the kernel waits for the one before it and lets the next one start, `ahead` that some of those
    loads come before the wait.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    pdl: bool = True
    vectors: bool = True
    ahead: bool = False
    divisible: Sequence[str] = field(default=())


KINDS = {  # Triton types of pointers and numbers by their names in all kernels; what is not here has the data's type
    **dict.fromkeys(("partial", "state", "raw", "past", "present", "ends", "starts", "sums", "cos", "sin"), "*fp32"),
    **{"tickets": "*i32", "used": "*i32", "positions": "*i64"},
    **dict.fromkeys(("scale", "eps", "head_eps", "b_eps", "c_eps"), "fp32"),
}


def variant(
    kernel: Any,
    data: torch.dtype,
    constants: Mapping[str, Any],
    counts: str = "",
    rows: str = "",
    absent: str = "",
    types: Mapping[str, str] | None = None,
    **more: Any,
) -> Variant:
    """The Variant of `kernel` for pointers to `data`: how its arguments are typed follows from their names.

    `counts` are its whole numbers, `rows` those that are multiples of 16, as distances between rows are; `absent` are
    the pointers that are not given. `types` come before KINDS. Of `constants` the kernel takes those that it knows;
    PDL and INTERP need not be among them. `more` are fields of the Variant.
    """
    constants = {"PDL": True, "INTERP": False, **constants, **dict.fromkeys(absent.split())}
    plain = [name for name in kernel.arg_names if name not in constants]
    whole = {*counts.split(), *rows.split()}
    known = {**KINDS, **(types or {})}
    return Variant(
        kernel,
        {n: "i32" if n in whole else known.get(n.removesuffix("_ptr"), f"*{DTYPES[data]}") for n in plain},
        {name: value for name, value in constants.items() if name in kernel.arg_names},
        divisible=[name for name in rows.split() if name in plain],
        **more,
    )


def of_tile(
    plan: Tile,
    kernel: Any,
    m: int,
    dtype: torch.dtype,
    rows: str,
    constants: dict[str, Any],
    counts: str = "",
    absent: str = "",
    **more: Any,
) -> Variant:
    """The Variant of `kernel` with a tile for m rows of x; `rows`, `counts` and `more` are as in `variant`."""
    single = {"M": 1} if m == 1 else {}  # which Triton takes as a constant
    given = {**plan.constants, **single, **constants}
    if not plan.bits:
        absent += " scales offsets"
    # Tensor cores read tiles that are asked for in L2 before.
    fixed = {"warps": plan.warps, "stages": 1, "ahead": plan.stages == 0}
    return variant(kernel, dtype, given, f"M {counts}", rows, absent, **{**fixed, **more})
