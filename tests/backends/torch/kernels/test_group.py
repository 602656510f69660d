"""Sums over processes against float64: two of them, the other one of which has sent its part."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.kernels.linear_residual import linear_residual
from weft.backends.torch.kernels.moe_decode import moe_decode
from weft.backends.torch.kernels.shared.group import Group, add_parts, own_choices

from .oracles import assert_near, draw, make_norm, norm64

pytestmark = pytest.mark.usefixtures("few_processors")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Two(Group):
    """The first of two processes; `others` is the part of the other."""

    def __init__(self, others: torch.Tensor) -> None:
        super().__init__(torch.nn.Module())
        self.size, self.others = 2, others

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self.others.dtype == FP32
        return x + self.others


@pytest.mark.parametrize(("rows", "width", "inputs", "dtype"), [(1, 70, 96, BF16), (3, 1030, 40, FP16)])
@pytest.mark.parametrize("kind", ["none", "rms", "layer"])
@pytest.mark.parametrize("kernel", [True, False])
def test_the_columns_of_two_processes(
    device: torch.device, rows: int, width: int, inputs: int, dtype: torch.dtype, kind: str, kernel: bool
) -> None:
    """Each multiplies its half of x; residual and bias count once, and only the result is rounded."""
    x = draw(rows, inputs, seed=1, dtype=dtype, device=device)
    weight = draw(width, inputs, seed=2, dtype=dtype, device=device, scale=inputs**-0.5)
    residual = 64 * draw(rows, width, seed=6, dtype=dtype, device=device)
    bias, norm = draw(width, seed=5, dtype=dtype, device=device), make_norm(kind, width, dtype, device)
    half = inputs // 2
    others = x[:, half:].float() @ weight[:, half:].float().T
    # What torch multiplies is rounded before it is sent.
    inner = FP32 if kernel else dtype
    found = linear_residual(
        *(x[:, :half], weight[:, :half].contiguous(), residual, bias),
        scale=0.7,
        norm=norm,
        group=Two(others),
        kernel=kernel,
    )
    product = x.double() @ weight.double().T + bias.double()
    exact = residual.double() + 0.7 * norm64(product, norm)
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    if kind != "none":
        centred = product - product.mean(-1, keepdim=True) if kind == "layer" else product
        deviation = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        size = 4 * (1 + (centred / deviation).abs().amax(-1, keepdim=True)) * size.amax(-1, keepdim=True) / deviation
        size = size * (1 + (0 if norm.gain is None else norm.gain.double().abs()))
    assert found.dtype == dtype
    size = size + torch.finfo(FP32).eps / torch.finfo(inner).eps * residual.double().abs()
    assert_near(found, exact, size + 1, inputs, inner=inner)


@pytest.mark.parametrize(("kernel", "kind"), [(True, torch.int32), (True, torch.int64), (False, torch.int64)])
def test_choices_of_experts_here(device: torch.device, kernel: bool, kind: torch.dtype) -> None:
    """In the place of experts that others hold stands one that is read anyway, or the first."""
    chosen = torch.tensor([[7, 2, 4], [0, 1, 7], [5, 4, 6]], dtype=kind, device=device)
    weights = draw(3, 3, seed=1, dtype=FP32, device=device)
    own, own_weights = own_choices(chosen, weights, range(4, 7), kernel=kernel)
    assert own.dtype == kind and own.tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 2]]
    here = torch.tensor([[0, 0, 1], [0, 0, 0], [1, 1, 1]], device=device)
    assert torch.equal(own_weights, weights * here)
    chosen[0, 1] = 6
    assert own_choices(chosen, weights, range(4, 7), kernel=kernel)[0][0].tolist() == [2, 2, 0]


@pytest.mark.parametrize("tokens", [2, 5])
def test_two_halves_of_the_experts_add_up(device: torch.device, tokens: int) -> None:
    """By the kernels of single tokens, and by those of more."""
    up, down = (draw(6, 32, 32, seed=s, dtype=FP32, device=device, scale=0.2) for s in (1, 2))
    x = draw(tokens, 32, seed=3, dtype=FP32, device=device)
    chosen = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:3] for i in range(tokens)])
    chosen, weights = chosen.to(device), draw(tokens, 3, seed=4, dtype=FP32, device=device)

    def of(here: range) -> torch.Tensor:
        own = own_choices(chosen, weights, here)
        return moe_decode(x, *own, up[here.start : here.stop], down[here.start : here.stop])

    both = add_parts(of(range(3)), x, group=Two(of(range(3, 6))))
    exact = moe_decode(x.double(), chosen, weights.double(), up.double(), down.double(), residual=x.double())
    torch.testing.assert_close(both.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize(("total", "size"), [(61, 2), (61, 4), (8, 4), (9, 4)])
def test_rows_are_shared_as_tensors_are(total: int, size: int) -> None:
    """DTensor cuts as `torch.chunk` does."""
    group, ids = Two(torch.zeros(1)), torch.arange(total)[:, None]
    group.size, count = size, torch.zeros(total, 1, dtype=torch.int64)
    parts = [*ids.chunk(size), *[ids[:0]] * size][:size]
    for group.rank, part in enumerate(parts):
        assert list(group.share(total)) == part[:, 0].tolist()
        own, mine = group.rows(ids, total)
        count += mine
        assert not len(part) or torch.equal(part[own[mine], 0], ids[mine])
    assert bool((count == 1).all())


def test_parts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"parts \[1, 3\] are not like the residual \[1, 4\]"):
        add_parts(torch.zeros(1, 3), torch.zeros(1, 4), group=Two(torch.zeros(1, 3)))
