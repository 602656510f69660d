"""The description of a norm that is fused into a kernel: its kind and weights, and a torch version."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

KINDS = ("none", "rms", "layer")


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the last axis, with optional `gain` and `shift` [width] and ε `eps`. By `kind` it is

    - "rms": x / √(mean(x²) + ε) ⊙ gain (arXiv 1910.07467)
    - "layer": (x − μ)/√(σ² + ε) ⊙ gain + shift (arXiv 1607.06450)
    - "none": x
    """

    kind: str = "none"
    gain: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    eps: float = 1e-6

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., width], computed with torch."""
        if self.kind == "rms":
            return F.rms_norm(x, x.shape[-1:], self.gain, self.eps)
        return F.layer_norm(x, x.shape[-1:], self.gain, self.shift, self.eps) if self.kind == "layer" else x

    def check(self, width: int) -> None:
        """Check that `kind` is known, and that `gain` and `shift` are None, or of shape [width] and used by this kind.
        Raise ValueError otherwise."""
        if self.kind not in KINDS:
            raise ValueError(f"norm kind {self.kind!r} is not one of {', '.join(KINDS)}")
        for name, vector, kinds in (("gain", self.gain, KINDS[1:]), ("shift", self.shift, KINDS[2:])):
            if vector is not None and self.kind not in kinds:
                raise ValueError(f"a norm of kind {self.kind!r} has no {name}")
            if vector is not None and vector.shape != (width,):
                raise ValueError(f"{name} {list(vector.shape)} of the norm is not [{width}]")


NO_NORM = Norm()
