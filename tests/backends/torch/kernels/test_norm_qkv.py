"""Queries, keys and values of new tokens against float64: RoPE of both kinds, norms of heads, slots of every cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.backends.torch.kernels.norm_qkv import norm_qkv, refusal
from weft.backends.torch.kernels.shared import gemv
from weft.backends.torch.kernels.shared.norm import NO_NORM, Norm

from .oracles import assert_near, draw, far_caches, make_norm, norm64

reference = partial(norm_qkv, kernel=False)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """A projection and what follows it of `batch` tokens, `seq` to a text; `pairs` of each head are turned."""

    batch: int = 1
    seq: int = 1
    inputs: int = 60
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 8
    pairs: int = 4
    dtype: torch.dtype = BF16
    norm: str = "rms"
    head_norm: bool = False
    biased: bool = False
    interleaved: bool = False
    rolling: bool = False
    keep_first: int = 0
    positions: tuple[int, ...] = (3,)
    capacity: int = 6

    def arguments(self, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
        """Make arguments of `norm_qkv`, with fresh caches."""
        rows, made = (self.heads + 2 * self.kv_heads) * self.head_dim, {"dtype": self.dtype, "device": device}
        x = draw(self.batch, self.inputs, seed=1, **made)
        weight = draw(rows, self.inputs, seed=2, **made, scale=self.inputs**-0.5)
        shape = (self.batch // self.seq, self.kv_heads, self.capacity, self.head_dim)
        caches = [draw(*shape, seed=seed, **made) for seed in (3, 4)]
        positions = torch.tensor(self.positions, device=device).view(-1, self.seq)
        x = x.view(-1, self.seq, self.inputs) if self.seq > 1 else x
        bias = draw(rows, seed=5, **made) if self.biased else None
        angle = draw(self.batch, self.pairs, seed=6, dtype=torch.float64, device=device, scale=5.0)
        gains = [draw(self.head_dim, seed=seed, **made) for seed in (7, 8)]
        options = {
            "norm": make_norm(self.norm, self.inputs, self.dtype, device),
            "interleaved": self.interleaved,
            "rolling": self.rolling,
            "keep_first": self.keep_first,
        }
        if self.pairs:
            options |= {"cos": angle.cos().float(), "sin": angle.sin().float()}
        if self.head_norm:
            options |= {"q_norm": Norm("rms", gains[0], eps=1e-3), "k_norm": Norm("rms", gains[1], eps=1e-3)}
        return [x, weight, *caches, positions, bias], options

    def slot(self, position: int) -> int | None:
        """Return the cache slot of `position`."""
        if self.rolling and position >= self.keep_first:
            position = self.keep_first + (position - self.keep_first) % (self.capacity - self.keep_first)
        return position if 0 <= position < self.capacity else None

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [batch, heads, d] in float64 with one pair after the other turned."""
        y = x.clone()
        for i in range(self.pairs):
            first, second = (2 * i, 2 * i + 1) if self.interleaved else (i, i + self.pairs)
            a, b, c, s = x[..., first], x[..., second], cos[:, None, i].double(), sin[:, None, i].double()
            y[..., first], y[..., second] = a * c - b * s, b * c + a * s
        return y

    def exact(self, given: list[Any], options: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """q, k and v [batch, heads, d] in float64, and a bound of the sums of the terms of any of them."""
        x, weight, _, _, _, bias = given
        normed, offset = norm64(x, options["norm"]), 0 if bias is None else bias.double()
        normed = normed.view(self.batch, -1)
        projected = (normed @ weight.double().T + offset).view(self.batch, -1, self.head_dim)
        q, k, v = projected.split([self.heads, self.kv_heads, self.kv_heads], 1)
        size = ((normed.abs() + 1) @ weight.double().abs().T + abs(offset)).amax()
        if self.head_norm:
            size = 4 * size / min(heads.square().mean(-1).sqrt().min() for heads in (q, k))
            size = size * max(options[name].gain.double().abs().max() + 1 for name in ("q_norm", "k_norm")) * 3
        q, k = (norm64(heads, options.get(name, NO_NORM)) for heads, name in ((q, "q_norm"), (k, "k_norm")))
        if self.pairs:
            q, k = (self.turn(heads, options["cos"], options["sin"]) for heads in (q, k))
        return [q, k, v], 2 * size + 1


CASES = {
    "llama": Case(inputs=576),
    "without RoPE": Case(pairs=0, biased=True, norm="none"),
    "partial, interleaved": Case(batch=3, head_dim=12, pairs=2, interleaved=True, dtype=FP16, positions=(0, 5, 2)),
    "partial, halves": Case(batch=3, head_dim=10, pairs=3, norm="layer", biased=True, dtype=FP32, positions=(0, 5, 2)),
    "heads normed": Case(batch=2, heads=4, kv_heads=2, head_dim=16, pairs=8, head_norm=True, positions=(1, 4)),
    "heads normed, odd": Case(batch=8, head_dim=6, pairs=1, head_norm=True, dtype=FP32, positions=(*range(6), 0, 1)),
    "rolling": Case(batch=4, rolling=True, positions=(5, 6, 13, 600), dtype=FP32),
    "rolling, some stay": Case(batch=5, rolling=True, keep_first=2, positions=(1, 5, 6, 9, 600), dtype=FP32),
    "no such slot": Case(batch=3, positions=(-1, 6, 5), dtype=FP32),
    "rows for tensor cores": Case(batch=17, inputs=300, head_dim=24, pairs=8, positions=(*range(6), *range(11))),
    "rows for tensor cores, heads normed": Case(
        batch=33, inputs=130, heads=3, head_dim=64, pairs=32, head_norm=True, biased=True, positions=(4,) * 33
    ),
    "several tokens": Case(batch=6, seq=3, kv_heads=2, positions=(1, 2, 3, 0, 1, 2)),
    "several tokens, heads normed": Case(
        batch=8, seq=4, head_dim=16, pairs=8, head_norm=True, positions=(*range(4), *range(2, 6)), dtype=FP16
    ),
    "many tokens": Case(batch=72, seq=36, kv_heads=2, positions=(*range(36), *range(4, 40)), capacity=41),
    "many tokens, heads normed": Case(
        batch=70,
        seq=70,
        heads=4,
        kv_heads=2,
        head_dim=24,
        pairs=5,
        head_norm=True,
        biased=True,
        interleaved=True,
        positions=tuple(range(9, 79)),
        capacity=79,
        dtype=FP32,
    ),
    "many tokens that roll": Case(batch=65, positions=tuple(range(65)), rolling=True, pairs=0),
    "rolling, no such slot": Case(batch=2, rolling=True, positions=(-1, 6), dtype=FP32),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_agrees_with_float64(device: torch.device, case: Case) -> None:
    exact = FP32 if case.batch < gemv.DOT_ROWS else case.dtype  # tensor cores multiply rounded x ⊙ gain
    for compute, inner in ((norm_qkv, exact), (reference, case.dtype)):
        given, options = case.arguments(device)
        norms = {n: options.get(n, NO_NORM) for n in ("norm", "q_norm", "k_norm")}
        assert refusal(*given[:4], given[5], **norms) == (None if case.batch <= 64 else "not 1 to 64 rows")
        before = [cache.clone() for cache in given[2:4]]
        (q, *kv), size = case.exact(given, options)
        found = compute(*given, **options)
        assert found.dtype == case.dtype and found.shape == (*given[0].shape[:-1], case.heads, case.head_dim)
        assert_near(found.flatten(0, -3), q, size.expand_as(q), case.inputs, inner=inner)
        for cache, old, new in zip(given[2:4], before, kv, strict=True):
            written = torch.zeros(case.batch // case.seq, case.capacity, dtype=torch.bool)
            for row, position in enumerate(case.positions):
                if (slot := case.slot(position)) is not None:
                    written[row // case.seq, slot] = True
                    assert_near(
                        cache[row // case.seq, :, slot], new[row], size.expand_as(new[row]), case.inputs, inner=inner
                    )
            untouched = ~written[:, None, :, None].expand_as(cache).to(device)
            assert torch.equal(cache[untouched], old[untouched])


FLOATS = [
    *("llama", "heads normed", "partial, halves", "rolling, some stay", "no such slot", "rows for tensor cores"),
    *("several tokens", "many tokens", "many tokens, heads normed"),
]


@pytest.mark.parametrize("name", FLOATS)
def test_float8_caches(device: torch.device, name: str) -> None:
    """They hold the floats nearest to keys and values over the scales of their heads; what is larger is the largest."""
    case = CASES[name]
    for compute in (norm_qkv, reference):
        given, options = case.arguments(device)
        (_, *kv), size = case.exact(given, options)
        scales = [2.0 ** -torch.arange(1, case.kv_heads + 1, device=device).float() / 50 * n for n in (1, 3)]
        bytes_of = [torch.full(cache.shape, 7, dtype=torch.uint8, device=device) for cache in given[2:4]]
        scaled = {"k_scale": scales[0], "v_scale": scales[1]}
        found = compute(*given[:2], *bytes_of, *given[4:], **options, **scaled)
        assert torch.equal(found, compute(*given, **options))
        for cache, new, scale in zip(bytes_of, kv, scales, strict=True):
            largest = 448 * scale[:, None].double()
            for row, position in enumerate(case.positions):
                slot = case.slot(position)
                if slot is None:
                    continue
                made = cache[row // case.seq, :, slot].view(torch.float8_e4m3fn).double() * scale[:, None]
                want = new[row].clamp(-largest, largest)
                # Half a unit of the last of 3 bits, or of the smallest floats; and what the product was rounded by.
                near = 0.02 * size if case.dtype == BF16 else 1e-3 * size
                assert (abs(made - want) <= want.abs() / 16 + 2.0**-10 * scale[:, None] + near).all()
            written = {(row // case.seq, case.slot(position)) for row, position in enumerate(case.positions)}
            others = {(r, s) for r in range(len(cache)) for s in range(case.capacity)} - written
            assert all((cache[r, :, s] == 7).all() for r, s in others)


def test_caches_that_are_slices_of_larger_caches(device: torch.device) -> None:
    case = Case(batch=2, kv_heads=2, positions=(1, 2), dtype=FP32)
    given, options = case.arguments(device)
    larger = [torch.cat([cache, cache]).transpose(1, 2).contiguous().transpose(1, 2) for cache in given[2:4]]
    q = norm_qkv(*given, **options)
    assert torch.equal(q, norm_qkv(*given[:2], *(cache[1:3] for cache in larger), *given[4:], **options))
    for cache, strided in zip(given[2:4], larger, strict=True):
        assert torch.equal(strided[1, :, 1], cache[0, :, 1])
        assert torch.equal(strided[2, :, 2], cache[1, :, 2])


@pytest.mark.parametrize("axis", [1, 2])
def test_caches_with_offsets_above_32_bits(device: torch.device, tmp_path: Path, axis: int) -> None:
    case = Case(kv_heads=3, capacity=3, positions=(2,))
    given, options = case.arguments(device)
    far = far_caches(tmp_path / "cache", (3, 3, 8), axis, device)
    q = norm_qkv(*given, **options)
    assert torch.equal(q, norm_qkv(*given[:2], *far, *given[4:], **options))
    for cache, near in zip(far, given[2:4], strict=True):
        assert torch.equal(cache[:, :, 2], near[:, :, 2])


def test_ticket_counters_are_reset(device: torch.device) -> None:
    case = Case(head_norm=True)
    given, options = case.arguments(device)
    tickets = torch.zeros(3, dtype=torch.int32, device=device)
    first = norm_qkv(*given, **options, tickets=tickets)
    assert not tickets.any()
    assert torch.equal(first, norm_qkv(*given, **options, tickets=tickets))


def test_unsupported_operands_fall_back_to_torch(device: torch.device) -> None:
    given, options = Case(dtype=FP32).arguments(device)
    x, weight, k_cache, v_cache, _, bias = given
    layer, rms = Norm("layer", eps=1e-3), Norm("rms", eps=1e-3)
    with_gain = Norm("rms", torch.ones(8, device=device), eps=1e-3)
    reasons = {
        "the norms of heads are not RMS norms": {"q_norm": layer, "k_norm": layer},
        "same settings for queries and keys": {"q_norm": rms},
        "has a gain and that of keys has none": {"q_norm": with_gain, "k_norm": rms},
    }
    for reason, norms in reasons.items():
        assert reason in (refusal(x, weight, k_cache, v_cache, bias, **norms) or "")
        assert torch.equal(norm_qkv(*given, **options | norms), reference(*given, **options | norms))
    assert refusal(x, weight, k_cache.double(), v_cache) == "caches are torch.float64 and torch.float32"
    assert "the caches differ in strides" in (refusal(x, weight, k_cache, torch.cat([v_cache] * 2)[:, :, ::2]) or "")
    odd = Case(head_dim=5, pairs=2, dtype=FP32)
    given, options = odd.arguments(device)
    assert refusal(*given[:4]) == "an odd number of elements per head"
    (q, *_), size = odd.exact(given, options)
    assert_near(norm_qkv(*given, **options), q, size.expand_as(q), odd.inputs)


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    [
        (2, torch.zeros(1, 1, 6, 6), r"weight \[32, 60\] does not fit caches \[1, 1, 6, 6\] and \[1, 1, 6, 8\]"),
        (0, torch.zeros(2, 60), r"x \[2, 60\] and positions \[1, 1\] must be of the same tokens"),
        (4, torch.zeros(2, dtype=torch.int64), r"positions \[2\] must be of the same tokens"),
        (3, torch.zeros(1, 1, 6, 6), r"caches \[1, 1, 6, 8\] and \[1, 1, 6, 6\] .* differ"),
        (5, torch.zeros(31), r"bias \[31\] does not fit weight \[32, 60\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(index: int, wrong: torch.Tensor, message: str) -> None:
    given, options = Case(dtype=FP32).arguments(torch.device("cpu"))
    given[index] = wrong
    with pytest.raises(ValueError, match=message):
        norm_qkv(*given, **options)


def test_tokens_that_do_not_fit_are_refused() -> None:
    given, options = Case(batch=3, positions=(0, 1, 2), dtype=FP32).arguments(torch.device("cpu"))
    x, positions = given[0].view(1, 3, 60), given[4].view(1, 3)
    caches = [torch.zeros(2, 1, 6, 8) for _ in range(2)]
    with pytest.raises(ValueError, match="3 tokens are not the same number of tokens for each of the 2 rows"):
        norm_qkv(x, given[1], *caches, positions, **options)
    one = [cache[:1] for cache in caches]
    with pytest.raises(ValueError, match="3 tokens are not one token, as rolling caches take them, for each of the 1"):
        norm_qkv(x, given[1], *one, positions, **options | {"rolling": True})


def test_angles_that_do_not_fit_are_refused() -> None:
    given, options = Case(dtype=FP32).arguments(torch.device("cpu"))
    for cos, sin in ((torch.zeros(1, 5), torch.zeros(1, 5)), (torch.zeros(1, 4), None)):
        with pytest.raises(ValueError, match=r"cos .* and sin .* must both be \[1, n\], n ≤ 4"):
            norm_qkv(*given, **options | {"cos": cos, "sin": sin})
