"""Variants of the kernel file linear_residual.py."""

from __future__ import annotations

from typing import Any

from weft.backends.torch.kernels.linear_residual import linear_residual_kernel, outputs_per_step, split_columns
from weft.backends.torch.kernels.shared import gemv
from weft.backends.torch.kernels.shared.gemv import choose_tile

from .form import BF16, CODES, FLOATS, FP16, FP32, Variant, of_tile


def variants() -> list[Variant]:
    """Output and down projections of 8 B and of 135 M parameters, more rows, one that is split, norms, 4 bits."""
    shipped = []
    for m, n, k, dtype, norm, absent in (
        (1, 4096, 14336, BF16, "none", "gain shift bias"),
        (1, 576, 1536, BF16, "none", "gain shift bias"),
        (8, 2048, 2048, FP16, "none", "gain shift"),
        (1, 256, 14336, FP32, "none", "gain shift bias"),
        (1, 2304, 9216, BF16, "rms", "shift bias"),
        (4, 256, 4096, BF16, "layer", ""),
        (8, 4096, 14336, BF16, "none", "gain shift bias"),
        (64, 4096, 14336, BF16, "none", "gain shift bias"),
    ):
        plan = choose_tile(m, n, k, dtype)
        splits, _ = split_columns(n, k, plan)
        forms = {"NORM": norm, "SPLITS": splits, "BLOCK_H": outputs_per_step(n, plan)}
        absent += " partial tickets" * (splits == 1 and norm == "none")
        shipped.append(of_tile(plan, linear_residual_kernel, m, dtype, "N K each", forms, absent=absent))
    for m, bits, types in ((1, 4, CODES), (8, 4, CODES), (32, 4, CODES), (1, 8, FLOATS)):
        plan, absent = gemv.choose_code_tile(m, 4096, 14336, bits, 128), "offsets gain shift bias"
        forms = {"NORM": "none", "SPLITS": split_columns(4096, 14336, plan)[0], "BLOCK_H": outputs_per_step(4096, plan)}
        more: dict[str, Any] = {"absent": absent, "types": types}
        shipped.append(of_tile(plan, linear_residual_kernel, m, BF16, "N K each", forms, **more))
    return shipped
