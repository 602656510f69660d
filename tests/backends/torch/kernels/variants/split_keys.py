"""Variants of the kernel file shared/split_keys.py."""

from __future__ import annotations

import torch

from weft.backends.torch.kernels.shared.split_keys import _merge_shape, merge_kernel

from .form import Variant, variant


def variants() -> list[Variant]:
    """The merge of widths that need a second launch."""
    shapes = [_merge_shape(16, 16, 512), _merge_shape(4, 4, 256), _merge_shape(71, 36, 64)]
    return [variant(merge_kernel, torch.bfloat16, shape, "splits") for shape in shapes]
