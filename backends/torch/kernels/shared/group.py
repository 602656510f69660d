"""The processes that share a model, each with a part of its weights: what they exchange in a decode step.

Sums of parts are fp32, and residual, bias and norm follow them in one kernel, so that only the result is rounded. Where
all processes are GPUs of one machine that read each other's memory, a sum is one kernel, too, in which every GPU reads
the parts of all (one-shot all-reduce over symmetric memory); elsewhere it is an all-reduce of `torch.distributed`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from . import operands
from .launch import BF16, FP16, FP32, Variant, jit, options, start_next, tl, triton, uses_torch, variant, wait
from .norm import NO_NORM, Norm
from .operands import power_of_2

ONE_SHOT = 1 << 19  # bytes of a sum up to which every GPU reads the parts of all
BLOCK = 1024  # numbers of a program, where there is no norm


class Group:
    """The processes among which `module` is divided, on a mesh of one dimension; one process exchanges nothing."""

    def __init__(self, module: nn.Module) -> None:
        meshes = (w.device_mesh for w in module.parameters() if hasattr(w, "device_mesh"))
        mesh: Any = next(meshes, None)
        self.rank: int = 0 if mesh is None else mesh.get_local_rank()
        self.size: int = 1 if mesh is None else mesh.size()
        self._processes: Any = None if mesh is None else mesh.get_group()
        self._buffers: dict[Any, torch.Tensor | None] = {}

    def share(self, total: int) -> range:
        """Return which of `total` rows this process holds, as DTensor divides them: the last may be fewer."""
        each = -(-total // self.size)
        return range(min(self.rank * each, total), min(self.rank * each + each, total))

    def rows(self, ids: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Count `ids`, in 0 … `total` − 1, from the first row of this process, and tell which of them it has, bool; in
        the place of one that it has not is another row."""
        here = self.share(total)
        own = (ids - here.start).clamp(0, max(len(here) - 1, 0))
        return own, own + here.start == ids

    def chosen(self, chosen: torch.Tensor, weights: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The choice of `experts` as one among those of this process: see `own_choices`."""
        return (chosen, weights) if self.size == 1 else own_choices(chosen, weights, self.share(experts))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all processes, which call this at once."""
        if self.size == 1:
            return x
        x = x.contiguous()
        if (buffer := self._buffer(x)) is not None:
            name = self._processes.group_name
            summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", name)
            return summed
        x = x.clone()
        dist.all_reduce(x, group=self._processes)
        return x

    def embedded(self, x: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        """x [batch, 1, dim] of the process that has the token of a row; `mine` [batch, 1] says whose x is that."""
        return x if self.size == 1 else self.sum(x * mine[..., None])

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """The parts x [..., own] of all processes beside each other: [..., width]."""
        if self.size == 1:
            return x
        x = F.pad(x, (0, -(-width // self.size) - x.shape[-1])).contiguous()
        parts = x.new_empty(self.size * len(x), *x.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
        gather(parts, x, group=self._processes)
        whole: torch.Tensor = parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)[..., :width]
        return whole.contiguous()

    def _buffer(self, x: torch.Tensor) -> torch.Tensor | None:
        """Memory like x that all processes read; None where that is not to be had, or x is too large for its use."""
        if not x.is_cuda or x.nbytes > ONE_SHOT:
            return None
        key = x.shape, x.dtype
        if key not in self._buffers:
            self._buffers[key] = _symmetric(x, self._processes)
        return self._buffers[key]


def _symmetric(x: torch.Tensor, processes: Any) -> torch.Tensor | None:
    """Memory like x that all `processes` read, if they are of one machine, as torchrun tells; all call this at once."""
    if os.environ.get("LOCAL_WORLD_SIZE") != str(dist.get_world_size()):
        return None
    from torch.distributed import _symmetric_memory as symmetric

    try:
        buffer = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
        symmetric.rendezvous(buffer, processes)
    except RuntimeError:  # these GPUs do not reach each other
        buffer = None
    # One that cannot must not leave the others waiting.
    able = torch.tensor([buffer is not None], dtype=torch.int32, device=x.device)
    dist.all_reduce(able, dist.ReduceOp.MIN, group=processes)
    return buffer if able.item() else None


class Held:
    """A module with the part of every tensor that this process holds."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module

    def __getattr__(self, name: str) -> Any:
        return held(getattr(self._module, name))

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The module itself, which does its part of what all compute."""
        return self._module(*given, **named)

    def __getitem__(self, index: int) -> Any:
        return held(self._module[index])

    def __iter__(self) -> Iterator[Any]:
        return map(held, self._module)


def held(found: Any) -> Any:
    """A module, or a tensor of one, as this process holds it: that tensor itself, which `pack` makes a view."""
    return Held(found) if isinstance(found, nn.Module) else getattr(found, "_local_tensor", found)


@jit
def own_choices_kernel(chosen, weights, own, own_weights, start, count, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The K choices of one token."""
    start_next(PDL)
    k = tl.arange(0, BLOCK)
    at = tl.program_id(0) * K + k
    wait(PDL)
    expert = tl.load(chosen + at, mask=k < K, other=-1).to(tl.int32) - start
    here = (k < K) & (expert >= 0) & (expert < count)
    other = tl.max(tl.where(here, expert, 0), axis=0)
    tl.store(own + at, tl.where(here, expert, other).to(own.dtype.element_ty), mask=k < K)
    tl.store(own_weights + at, tl.load(weights + at, mask=here, other=0.0), mask=k < K)


def own_choices(
    chosen: torch.Tensor, weights: torch.Tensor, here: range, *, kernel: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The choice `chosen` of each token, i32 or i64 like weights [tokens, k], counted from the first of the experts
    that are `here`. In the place of others stands one that the token has chosen here, whose weights are read anyway, or
    the first, with weight 0. `kernel`: see `uses_torch`."""
    if uses_torch(kernel, operands.refusal, weights):
        own = chosen - here.start
        mine = (own >= 0) & (own < len(here))
        other = torch.where(mine, own, 0).amax(1, keepdim=True)
        return torch.where(mine, own, other), torch.where(mine, weights, 0)
    chosen, weights = chosen.contiguous(), weights.contiguous()
    (tokens, choices), own, own_weights = chosen.shape, torch.empty_like(chosen), torch.empty_like(weights)
    own_choices_kernel[(tokens,)](
        chosen, weights, own, own_weights, here.start, len(here), choices, BLOCK=power_of_2(choices),
        **options(weights, 1),
    )  # fmt: skip
    return own, own_weights


@jit
def add_parts_kernel(
    residual, parts, bias, gain, shift, y, N, scale, eps, NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """BLOCK of the N numbers of a row, or all of them where there is a norm."""
    start_next(PDL)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, at = n < N, tl.program_id(0) * N + n
    wait(PDL)
    out = tl.load(parts + at, mask=there, other=0.0).to(tl.float32)
    if bias is not None:
        out += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
    if NORM == "layer":
        out = tl.where(there, out - tl.sum(out, axis=0) / N, 0.0)
    if NORM != "none":
        out *= tl.rsqrt(tl.sum(out * out, axis=0) / N + eps)
    if gain is not None:
        out *= tl.load(gain + n, mask=there, other=0.0).to(tl.float32)
    if shift is not None:
        out += tl.load(shift + n, mask=there, other=0.0).to(tl.float32)
    before = tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, (before + scale * out).to(y.dtype.element_ty), mask=there)


def add_parts(
    part: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group,
    scale: float = 1.0,
    norm: Norm = NO_NORM,
    kernel: bool | None = None,
) -> torch.Tensor:
    """residual + scale · norm(Σ part + b), the sum over the processes of `group`: all [..., width], bias [width].

    A sum is fp32 at least, and the result, like the residual, is rounded once. `kernel`: see `uses_torch`.

    Raises:
        ValueError: the shapes do not fit.
    """
    if part.shape != residual.shape:
        raise ValueError(f"parts {[*part.shape]} are not like the residual {[*residual.shape]}")
    norm.check(part.shape[-1])
    total = group.sum(part.to(torch.promote_types(part.dtype, torch.float32)))
    if uses_torch(kernel, operands.refusal, total, residual, bias, norm.gain, norm.shift):
        gain, shift = (None if w is None else w.to(total.dtype) for w in (norm.gain, norm.shift))
        wide = Norm(norm.kind, gain, shift, norm.eps)
        return (residual + scale * wide(total if bias is None else total + bias)).to(residual.dtype)
    N, y = total.shape[-1], torch.empty_like(residual, memory_format=torch.contiguous_format)
    block = _block(N, norm)
    add_parts_kernel[(total.numel() // N, triton.cdiv(N, block))](
        residual.contiguous(), total, bias, norm.gain, norm.shift, y, N, scale, norm.eps,
        NORM=norm.kind, BLOCK=block, **options(residual, _warps(block)),
    )  # fmt: skip
    return y


def _block(width: int, norm: Norm) -> int:
    return BLOCK if norm.kind == "none" else power_of_2(width)


def _warps(block: int) -> int:
    return max(4, min(16, block // 512))


def variants() -> list[Variant]:
    """The streams of Llama of 8 B, of gpt-oss with its bias, of Gemma-2 with its norm, one with a LayerNorm; choices of
    8 experts of 128."""
    types, choices = {"parts": "*fp32"}, dict.fromkeys(("weights", "own_weights"), "*fp32")
    choices |= dict.fromkeys(("chosen", "own"), "*i32")
    return [
        variant(own_choices_kernel, FP32, {"BLOCK": 8}, "start count K", types=choices, vectors=False, warps=1),
        *(
            variant(
                add_parts_kernel,
                dtype,
                {"NORM": kind, "BLOCK": block},
                rows="N",
                absent=absent,
                types=types,
                warps=_warps(block),
            )
            for N, dtype, kind, absent in (
                (4096, BF16, "none", "bias gain shift"),
                (2880, FP16, "none", "gain shift"),
                (2304, BF16, "rms", "bias shift"),
                (1024, FP32, "layer", ""),
            )
            for block in [_block(N, Norm(kind))]
        ),
    ]
