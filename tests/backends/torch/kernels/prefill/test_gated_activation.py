"""Gated units of many tokens against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from weft.backends.torch.kernels.norm_glu import norm_glu
from weft.backends.torch.kernels.prefill.gated_activation import gated_activation, refusal
from weft.backends.torch.kernels.shared.norm import Norm

from ..close import DTYPES
from ..oracles import FORMULAS, assert_near, draw

reference = partial(gated_activation, kernel=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "width", "activation", "limit", "shift"),
    [
        (1, 1, "silu", None, 0.0),
        (70, 1500, "silu", None, 0.0),
        (5, 1024, "gelu_tanh", None, 0.0),
        (9, 33, "gelu_quick", 0.7, 1.0),
        (4, 7, "relu2", None, 0.0),
    ],
)
def test_agrees_with_float64(
    device: torch.device,
    tokens: int,
    width: int,
    activation: str,
    limit: float | None,
    shift: float,
    dtype: torch.dtype,
) -> None:
    both = draw(tokens, 2 * width, seed=1, dtype=dtype, device=device, scale=2.0)
    gate, up = both.double().chunk(2, 1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    want = FORMULAS[activation](gate) * (up + shift)
    given = {"activation": activation, "limit": limit, "shift": shift}
    for compute in (gated_activation, reference):
        found = compute(both, **given)
        assert found.dtype == dtype
        assert_near(found, want, 2 * want.abs() + 1, 1, inner=dtype if compute is reference else torch.float32)
    assert refusal(both) is None
    apart = gated_activation(both.repeat_interleave(2, 1)[:, ::2], **given)
    torch.testing.assert_close(apart, reference(both, **given))


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="activation 'mish' is not one of identity, silu"):
        gated_activation(torch.zeros(2, 4), activation="mish")


def test_gated_units_of_many_tokens_use_the_kernel(device: torch.device) -> None:
    """Beyond 64 rows, where `norm_glu` has no kernel of its own."""
    x, weight = (draw(*shape, seed=2, dtype=torch.float32, device=device) for shape in ((2, 40, 12), (14, 12)))
    norm = Norm("rms", eps=1e-5)
    few = torch.cat([norm_glu(x[:, a : a + 20], weight, norm=norm) for a in (0, 20)], 1)
    torch.testing.assert_close(norm_glu(x, weight, norm=norm), few, rtol=1e-4, atol=1e-4)
