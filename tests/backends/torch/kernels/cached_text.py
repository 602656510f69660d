"""Texts whose keys lie in a cache, and attention to them in float64, position by position: the oracle of decoding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

Array = np.ndarray


@dataclass
class Text:
    """Keys and values of all positions of texts, f64 [batch, kv_heads, length, d], exact in the dtype of the caches."""

    keys: Array
    values: Array

    @classmethod
    def random(cls, batch: int, kv_heads: int, length: int, d: int, dv: int, dtype: torch.dtype) -> Text:
        made = (torch.randn(batch, kv_heads, length, width).to(dtype).double().numpy() for width in (d, dv))
        return cls(*made)

    def caches(self, positions: list[int], capacity: int, keep: int, rolling: bool) -> tuple[Array, Array]:
        """The caches when row b has come to positions[b], one key after the other; what nobody wrote is NaN."""
        found = []
        for rows in (self.keys, self.values):
            cache = np.full((*rows.shape[:2], capacity, rows.shape[3]), np.nan)
            for b, newest in enumerate(positions):
                for p in range(newest + 1):
                    slot = p if not rolling or p < keep else keep + (p - keep) % (capacity - keep)
                    cache[b, :, slot] = rows[b, :, p]
            found.append(cache)
        return found[0], found[1]

    def attended(
        self,
        q: Array,
        positions: list[int],
        *,
        scale: float,
        window: int | None = None,
        keep_first: int = 0,
        softcap: float | None = None,
        chunk: int | None = None,
        dilation: int = 1,
        sinks: Array | None = None,
        slopes: Array | None = None,
    ) -> Array:
        """Compute the attention of q [batch, heads, d] at `positions`: [batch, heads, dv]."""
        y = np.zeros((*q.shape[:2], self.values.shape[3]))
        group = q.shape[1] // self.keys.shape[1]
        for b, newest in enumerate(positions):
            seen = [p for p in range(newest + 1) if window is None or newest - p < window or p < keep_first]
            seen = [p for p in seen if (newest - p) % dilation == 0 and (not chunk or p // chunk == newest // chunk)]
            for h in range(q.shape[1] if seen else 0):
                scores = self.keys[b, h // group, seen] @ q[b, h] * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                if slopes is not None:
                    scores = scores - slopes[h] * (newest - np.array(seen))
                rest = 0.0 if sinks is None else np.exp(sinks[h])
                y[b, h] = np.exp(scores) @ self.values[b, h // group, seen] / (np.exp(scores).sum() + rest)
        return y


def bound(dtype: torch.dtype, values: Array, reduced: int) -> float:
    """The error allowed to sums of `reduced` products: weights and results are rounded to dtype, sums to f32."""
    rounded = 0.0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    return float(np.abs(values).max() * (rounded + 8 * torch.finfo(torch.float32).eps * np.sqrt(reduced)))
