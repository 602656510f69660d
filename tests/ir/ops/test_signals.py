"""Convolutions and the Fourier transform against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from .oracles import Oracles, X, assert_equals_torch

RNG = np.random.default_rng(11)
ORACLES: Oracles = {
    "patch_embedding": [
        (
            (RNG.standard_normal((2, 3, 8, 12)), RNG.standard_normal((5, 3, 4, 4)), np.arange(5.0)),
            {},
            lambda x, w, b: F.conv2d(x, w, b, stride=4).flatten(2).transpose(1, 2),
        )
    ],
    "conv1d": [
        (
            (RNG.standard_normal((2, 9, 6)), RNG.standard_normal((4, 3, 4)), np.arange(4.0)),
            {"stride": 2, "padding": (2, 1), "groups": 2},
            lambda x, w, b: F.conv1d(F.pad(x.mT, (2, 1)), w, b, stride=2, groups=2).mT,
        )
    ],
    "fourier": [((X,), {}, lambda x: torch.fft.fft2(x).real)],
}


@pytest.mark.parametrize("name", ORACLES)
def test_reference_equals_torch(name: str) -> None:
    assert_equals_torch(name, ORACLES)
