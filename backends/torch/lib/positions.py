"""Positions: rotary embeddings and their frequencies, ALiBi."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rope_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """Return RoPE frequencies θ^(−2k/dim) for every pair k < dim/2, in radians per position (Su 2021)."""
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


def llama3_frequencies(
    frequencies: Tensor, theta: float, factor: float, low: float, high: float, context: int
) -> Tensor:
    """Return `frequencies`, divided by `factor` if they make less than `low` rotations in `context` tokens, unchanged
    if more than `high`, and interpolated between the two (Llama 3)."""
    turns = context * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def yarn_frequencies(
    frequencies: Tensor, theta: float, factor: float, fast: float, slow: float, context: int
) -> Tensor:
    """Return `frequencies`, unchanged if they make more than `fast` rotations in `context` tokens, divided by `factor`
    if less than `slow`, and in between interpolated linearly over the pair index (YaRN, Peng 2023)."""
    dim = 2 * len(frequencies)
    low, high = (dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = ((torch.arange(dim // 2, device=frequencies.device) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def rotary(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [batch, 1, seq, pairs] of the RoPE angles of `positions` [batch, seq]."""
    angles = positions[:, None, :, None] * frequencies.double()
    return angles.cos().float(), angles.sin().float()


def rotary_scaled(positions: Tensor, frequencies: Tensor, amplitude: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of `rotary`, each times `amplitude`, √(1/t) for the temperature t of attention in YaRN."""
    cos, sin = rotary(positions, frequencies)
    return amplitude * cos, amplitude * sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [batch, heads, seq, width] with pairs (k, k + pairs) rotated; elements after the pairs are unchanged."""
    a, b, rest = x.tensor_split((cos.shape[-1], 2 * cos.shape[-1]), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [batch, heads, seq, width] with pairs (2k, 2k + 1) rotated; elements after the pairs are unchanged."""
    turned, rest = x.tensor_split((2 * cos.shape[-1],), -1)
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((turned, rest), -1).to(x.dtype)


def alibi_slopes(heads: int, most: float, device: torch.device) -> Tensor:
    """Return ALiBi's slopes [heads] (Press 2022): 2^(−most·i/n) for heads i = 1 … n, n the largest power of two up to
    `heads`, then 2^(−most·i/2n) for i = 1, 3, 5, …"""
    n = 2 ** math.floor(math.log2(heads))
    steps = torch.cat((torch.arange(2, 2 * n + 1, 2, device=device), torch.arange(1, 2 * n + 1, 2, device=device)))
    return 2.0 ** (-most / (2 * n) * steps[:heads].double()).float()
