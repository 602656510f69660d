"""Convolutions, norms and positions of encoders of images and audio."""

from __future__ import annotations

import numpy as np
import pytest

from weft.frontends.dsl import MLP, Block, Convolution, ConvolvedBlock, GroupNorm, PositionalConvolution

from .formulas.elementary import ACTIVATIONS, Array, Weights, layer_norm, rms_norm
from .formulas.feed_forward import feed_forward
from .harness import RUNNERS, Row, check


def conv1d(x: Array, w: Weights, name: str, pads: tuple[int, int] = (0, 0), stride: int = 1, groups: int = 1) -> Array:
    """Return Σ_i W_i x_{stride · t + i − before} + b, with W block-diagonal in `groups` blocks."""
    weight, x = w[f"{name}.weight"], np.pad(x, (pads, (0, 0)))
    taps, frames = weight.shape[2], []
    for t in range(0, len(x) - taps + 1, stride):
        blocks = zip(np.split(weight, groups), np.split(x[t : t + taps], groups, 1), strict=True)
        frames.append(np.concatenate([np.einsum("oit,ti->o", block, part) for block, part in blocks]))
    return np.array(frames) + w[f"{name}.bias"]


def group_norm(x: Array, w: Weights, groups: int, eps: float = 1e-5) -> Array:
    """Return (x − μ)/√(σ² + ε) ⊙ γ + β, with μ and σ over all frames and the channels of a group (Wu & He 2018)."""
    runs = x.reshape(len(x), groups, -1).transpose(1, 0, 2).reshape(groups, -1)
    normed = layer_norm(runs, eps=eps).reshape(groups, len(x), -1).transpose(1, 0, 2).reshape(x.shape)
    return normed * w["norm.weight"] + w["norm.bias"]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("norm_last", [False, True])
def test_convolution_with_group_norm(norm_last: bool, groups: int | None, runner: str) -> None:
    act = ACTIVATIONS["gelu"]

    def formula(x: Array, w: Weights) -> Array:
        y = conv1d(x, w, "conv", (1, 1), 2)
        return group_norm(act(y), w, groups or 6) if norm_last else act(group_norm(y, w, groups or 6))

    module = Convolution(6, 3, stride=2, padding=1, norm=GroupNorm(groups), norm_last=norm_last)
    check(Row(module, formula), runner)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("kernel", "pads"), [(4, (2, 1)), (5, (2, 2))])
def test_positional_convolution(kernel: int, pads: tuple[int, int], runner: str) -> None:
    def formula(x: Array, w: Weights) -> Array:
        return x + ACTIVATIONS["gelu"](conv1d(x, w, "positional_convolution", pads, groups=4))

    check(Row(PositionalConvolution(kernel, 4), formula), runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_convolved_block(runner: str) -> None:
    def formula(x: Array, w: Weights) -> Array:
        y = x + feed_forward(MLP(7), "ffn.")(rms_norm(x, w["ffn_norm.weight"]), w)
        y = y + np.tanh(conv1d(x, w, "conv", (1, 1), groups=2))
        return layer_norm(y, w["conv_norm.weight"], w["conv_norm.bias"], 1e-5)

    check(Row(ConvolvedBlock(Block(None, MLP(7)), 3, 2), formula), runner)
