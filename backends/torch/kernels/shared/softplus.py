"""ln(1 + eˣ), by which state-space layers make a positive step of any number."""

from __future__ import annotations

from .launch import jit, tl


@jit
def softplus(x):
    """ln(1 + eˣ) of x, fp32 of any shape, to fp32's precision also where it is small.

    It is max(x, 0) + ln(1 + e) with e = e^−|x| ≤ 1, and ln(1 + e) = 2 artanh(s), s = e / (2 + e) ≤ 1/3: eight terms of
    its series leave 3⁻¹⁸. The logarithm of the hardware is not precise near 1.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2 + e)
    square = s * s
    series = 1 / 13 + square * (1 / 15 + square / 17)
    series = 1 / 7 + square * (1 / 9 + square * (1 / 11 + square * series))
    return tl.maximum(x, 0.0) + 2 * s * (1 + square * (1 / 3 + square * (1 / 5 + square * series)))
