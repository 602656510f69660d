"""Elementwise ops in PyTorch."""

from __future__ import annotations

import numpy as np
import torch

from weft.ir import lookup


def test_floordiv_and_mod_of_torch_round_down_below_zero() -> None:
    x, y = torch.tensor([-7, 7, -8, 0]), torch.tensor([[3], [-3]])
    np.testing.assert_array_equal((x // y).numpy(), lookup("floordiv").reference(x.numpy(), y.numpy()))
    np.testing.assert_array_equal((x % y).numpy(), lookup("mod").reference(x.numpy(), y.numpy()))
