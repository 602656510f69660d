"""Attention to some keys: flex_attention and masks of all pairs against a formula in float64, gradients too, and which
of them is chosen where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor

from weft.backends.torch.kernels.shared import launch
from weft.backends.torch.kernels.shared import online_softmax as kernels_attend
from weft.backends.torch.lib import windows
from weft.backends.torch.lib.windows import KeyVisibility, attend, in_blocks

from ....sampling import each

pytestmark = [  # of torch's own, where it plays Triton's part
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning"),
]

Rule = Callable[[Any, Any], Any]  # whether a query at one position sees a key at another
F32 = torch.float32

RULES: dict[str, Rule] = {  # examples; tests/frontends/dsl/test_attention.py compares every pattern with its definition
    "causal": lambda q, k: q >= k,
    "window": lambda q, k: (q - k < 40) & (q >= k),
    "window of one": lambda q, k: (q - k < 1) & (q >= k),
    "first kept": lambda q, k: ((q - k < 40) | (k < 3)) & (q >= k),
    "both ways": lambda q, k: abs(q - k) < 17,
    "dilated": lambda q, k: (q - k < 60) & ((q - k) % 3 == 0) & (q >= k),
    "strided": lambda q, k: ((abs(q - k) < 7) | ((q - k) % 7 == 0)) & (q >= k),
    "chunked": lambda q, k: (q // 50 == k // 50) & (q >= k),
    "fixed": lambda q, k: ((q // 9 == k // 9) | (k % 9 >= 8)) & (q >= k),
}


@contextmanager
def flexing(monkeypatch: pytest.MonkeyPatch, where: Any = windows, traced: bool = False) -> Iterator[list[Any]]:
    """flex_attention computes on a CPU too, by its definition in torch; what is asked for is noted.

    `traced`: it is compiled as on a GPU, as one graph, but for the kernels.
    """
    asked: list[Any] = []
    made: dict[Any, Any] = {}

    def noted(function: Callable[..., Any], x: Tensor) -> Any:
        asked.append(function)
        if traced and function not in made:
            made[function] = torch.compile(function, backend="aot_eager", fullgraph=True)
        return made.get(function, function)

    if traced:
        torch.compiler.reset()  # what other tests left
    with monkeypatch.context() as patch:
        patch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", not traced)
        patch.setattr(torch_flex, "_validate_device", lambda *_: None)  # no gradients on CPUs, says torch
        patch.setattr(where, "in_blocks", lambda *_: True)
        patch.setattr(where, "on_device", noted)
        yield asked


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: list[list[int]],
    keys: list[list[int]],
    rule: Rule,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention in float64 to the keys that `rule` says each query sees, asked one by one."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    seen = torch.tensor([[[[rule(p, key) for key in row] for p in ps]] for ps, row in zip(at, keys, strict=True)])
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = scores.exp() * seen
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    return torch.einsum("bhij,bhjd->bhid", weights / total, v)


def bound(terms: int) -> float:
    """Of f32 sums of so many products, of the largest number; softmax and its gradient make a few of them."""
    return float(16 * torch.finfo(F32).eps * terms**0.5)


def check(
    at: list[list[int]], keys: list[list[int]], rule: Rule, shape: tuple[int, ...], compute: Any, **scores: Any
) -> None:
    """`compute` of random operands, and the gradients of a random projection, are those of the formula."""
    torch.manual_seed(2)
    batch, heads, kv_heads, d, dv = shape
    n, m = len(at[0]), len(keys[0])
    sizes = ((heads, n, d), (kv_heads, m, d), (kv_heads, m, dv))
    exact = [torch.randn(batch, *size, dtype=torch.float64).float().double().requires_grad_() for size in sizes]
    if scores.pop("sinks", False):
        exact.append(torch.randn(heads, dtype=torch.float64).float().double().requires_grad_())
    ours = [x.detach().float().requires_grad_() for x in exact]
    want = formula(*exact[:3], at, keys, rule, **scores, sinks=exact[3] if len(exact) > 3 else None)
    got = compute(*ours[:3], **scores, sinks=ours[3] if len(ours) > 3 else None)
    assert got.dtype == F32
    down = torch.randn(want.shape, dtype=torch.float64)
    wanted = [want.detach(), *torch.autograd.grad((want * down).sum(), exact)]
    found = [got.detach(), *torch.autograd.grad((got * down).sum(), ours)]
    for one, other in zip(found, wanted, strict=True):
        error = float((one.double() - other).abs().max() / other.abs().max().clamp(min=0.1))  # some are 0
        assert error <= bound(m + d), f"{error:.2e} is more than {bound(m + d):.2e}"


def consecutive(n: int, first: int = 0) -> list[list[int]]:
    return [list(range(first, first + n))]


@pytest.mark.parametrize("way", ["flex", "mask"])
@pytest.mark.parametrize(
    ("rule", "length", "shape", "scores"),
    [
        # shape: batch, heads, kv_heads, d, dv
        *((rule, 150, (1, 2, 1, 8, 8), {}) for rule in RULES),
        ("window", 300, (2, 4, 2, 8, 6), {"scale": 0.7}),
        ("window", 257, (1, 2, 2, 8, 8), {"softcap": 2.0}),
        ("causal", 130, (2, 3, 1, 5, 7), {"softcap": 2.0, "sinks": True}),
        ("first kept", 200, (2, 6, 2, 8, 8), {"sinks": True}),
        ("window", 3, (2, 2, 1, 8, 8), {"sinks": True, "softcap": 1.0}),
        ("strided", 140, (1, 4, 2, 8, 8), {"sinks": True}),
    ],
)
def test_attention_agrees_with_the_formula_for_every_rule(
    way: str, rule: str, length: int, shape: tuple[int, ...], scores: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = consecutive(length)
    seen = KeyVisibility(torch.tensor(at), torch.tensor(at), RULES[rule])

    def compute(*qkv: Tensor, **given: Any) -> Tensor:
        if way == "mask":
            return attend(*qkv, seen, **given)
        with flexing(monkeypatch) as asked:
            made = attend(*qkv, seen, **given)
        assert len(asked) == 2  # the blocks, and the attention
        return made

    check(at, at, RULES[rule], shape, compute, **scores)


@pytest.mark.parametrize("way", ["flex", "mask"])
def test_rows_at_their_own_positions_over_a_cache_out_of_order(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a rolling cache that has turned over, empty slots, and rows that go on from different places."""
    held = [[10, 11, 5, 6, 7, 8, 9], [2, 3, 99, 99, 99, 0, 1]]
    at = [list(range(12, 142)), list(range(4, 134))]
    keys = [slots + new for slots, new in zip(held, at, strict=True)]
    seen = KeyVisibility(torch.tensor(at), torch.tensor(keys), RULES["window"])

    def compute(*qkv: Tensor, **given: Any) -> Tensor:
        if way == "mask":
            return attend(*qkv, seen, **given)
        with flexing(monkeypatch):
            return attend(*qkv, seen, **given)

    check(at, keys, RULES["window"], (2, 4, 2, 8, 8), compute, sinks=True)


@pytest.mark.long
def test_flex_attention_is_traced_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths vary, and a second soft cap is no number that varies."""
    torch.manual_seed(3)
    cases, found = each(2, ((130, 2.0), (130, 3.0), (150, 3.0))), list[tuple[Tensor, ...]]()
    operands = [[torch.randn(1, h, length, 8, requires_grad=True) for h in (2, 1, 1)] for length, _ in cases]
    sinks = torch.randn(2, requires_grad=True)

    def computed() -> None:
        for (length, softcap), qkv in zip(cases, operands, strict=True):
            at = torch.arange(length)[None]
            y = attend(*qkv, KeyVisibility(at, at, RULES["window"]), softcap=softcap, sinks=sinks)
            found.append((y, *torch.autograd.grad(y.square().sum(), (*qkv, sinks))))

    computed()
    with flexing(monkeypatch, traced=True) as asked:
        computed()
    assert len(asked) == 2 * len(cases)
    for ours, theirs in zip(found[len(cases) :], found[: len(cases)], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert float((one - other).detach().abs().max() / other.detach().abs().max()) <= bound(150)


def test_blocks_outside_of_a_window_are_skipped() -> None:
    at = torch.arange(1000)[None]
    blocks = KeyVisibility(at, at, lambda q, k: (q - k < 100) & (q >= k)).blocks
    assert blocks.to_dense()[0, 0].tolist() == [[int(i - 1 <= j <= i) for j in range(8)] for i in range(8)]
    each = KeyVisibility(at[:, :300].expand(3, -1), at[:, :300], lambda q, k: q >= k).blocks
    assert each.shape == (3, 1, 300, 300)


def test_masks_and_blocks_are_computed_once() -> None:
    at, asked = torch.arange(9)[None], list[int]()

    def rule(q: Tensor, k: Tensor) -> Tensor:
        asked.append(1)
        return q >= k

    seen = KeyVisibility(at, at, rule)
    assert seen.mask is seen.mask and len(asked) == 1
    assert seen.blocks is seen.blocks


@pytest.mark.parametrize(
    ("window", "lengths", "masked"), [(5, (5, 5), False), (5, (6, 6), True), (5, (2, 4), True), (None, (2, 2), True)]
)
def test_a_sequence_within_one_window_needs_no_mask(window: int | None, lengths: tuple[int, int], masked: bool) -> None:
    """`window` stands for causality alone only where no pattern is left out of it."""
    at = torch.arange(lengths[1])[None]
    seen = KeyVisibility(at[:, lengths[1] - lengths[0] :], at, lambda q, k: (q - k < 5) & (q >= k))
    q, k, v = (torch.randn(1, 2, n, 4) for n in (lengths[0], lengths[1], lengths[1]))
    attend(q, k, v, seen, window=window)
    assert (seen._mask is not None) == masked


# -- which way is chosen


def operands(**changed: Any) -> tuple[Any, Any, Any, None]:
    """Stand-ins of q, k and v on a GPU, in training."""
    settings = {"is_cuda": True, "shape": (1, 2, 128, 64), "dtype": torch.bfloat16, "requires_grad": True} | changed
    one = SimpleNamespace(**settings, get_device=lambda: 0)
    return one, one, one, None


CHOSEN = {
    "training": ({}, True),
    "heads of 256": ({"shape": (1, 2, 300, 256)}, True),
    "without gradients": ({"requires_grad": False}, False),
    "on a CPU": ({"is_cuda": False}, False),
    "within a block": ({"shape": (1, 2, 127, 64)}, False),
    "narrow heads": ({"shape": (1, 2, 128, 8)}, False),
    "latent heads": ({"shape": (1, 2, 128, 576)}, False),
    "float64": ({"dtype": torch.float64}, False),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_flex_attention_is_for_training_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, wanted = CHOSEN[name]
    monkeypatch.setattr(kernels_attend, "capability", lambda _: (9, 0))
    with launch.assume_capability((9, 0)):
        assert in_blocks(*operands(**changed)) == wanted
        with torch.no_grad():
            assert not in_blocks(*operands(**changed))


@pytest.mark.parametrize(("capability", "widest"), [((7, 5), 0), ((8, 0), 256), ((8, 6), 128), ((12, 0), 128)])
def test_flex_attention_wants_heads_that_fit_the_gpu(
    capability: tuple[int, int], widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_attend, "capability", lambda _: capability)
    with launch.assume_capability(capability):
        fits = [d for d in (64, 128, 256) if in_blocks(*operands(shape=(1, 2, 128, d)))]
    assert max(fits, default=0) == widest


def test_the_window_kernel_is_not_called_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(windows, "window_attention")
    at = torch.arange(9)[None]
    attend(*(torch.randn(1, 2, 9, 16) for _ in "qkv"), KeyVisibility(at, at, RULES["window"], 0), window=40)
