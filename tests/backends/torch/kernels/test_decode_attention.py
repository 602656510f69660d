"""Decode attention against attention in float64, position by position, and against the op it implements."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.torch.kernels.decode_attention import decode_attention, refusal
from weft.backends.torch.kernels.shared.float8 import as_bytes, from_bytes
from weft.ir import ops

from .cached_text import Text, bound
from .oracles import draw, far_caches

reference = partial(decode_attention, kernel=False)

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _tensors(dtype: torch.dtype, device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(a).to(device, dtype) for a in arrays]


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "d", "dv", "capacity", "positions", "options"),
    [
        pytest.param(F32, 4, 2, 16, 16, 40, [0, 17, -1, 39], {}, id="lengths"),
        pytest.param(B16, 4, 1, 80, 48, 300, [299, 130], {"splits": 3}, id="bf16-mqa-odd-widths"),
        pytest.param(F16, 3, 3, 33, 33, 200, [150], {}, id="f16-mha-odd-widths"),
        pytest.param(F32, 71, 1, 16, 16, 640, [630], {"splits": 5}, id="two-blocks-of-heads-merged-in-two-steps"),
        pytest.param(B16, 2, 1, 576, 512, 70, [64, 15], {}, id="latent-widths"),
        pytest.param(F32, 4, 2, 16, 24, 400, [399, 140], {"window": 200, "softcap": 2.0}, id="window-softcap"),
        pytest.param(
            F32, 4, 2, 16, 16, 300, [3, 280, 1], {"window": 9, "keep_first": 3, "scale": 0.4}, id="keep-first"
        ),
        pytest.param(F32, 4, 2, 16, 16, 20, [300, 7, 19, 20], {"window": 20, "rolling": True}, id="rolling"),
        pytest.param(
            F32, 2, 2, 16, 16, 160, [700, 40, 161], {"window": 150, "keep_first": 5, "rolling": True}, id="rolling-keep"
        ),
        pytest.param(F32, 6, 2, 16, 16, 300, [299, -1, 2], {"sinks": True, "splits": 4}, id="sinks"),
        pytest.param(F32, 6, 2, 16, 16, 300, [288, 60], {"slopes": True, "splits": 2}, id="alibi"),
        pytest.param(F32, 4, 2, 16, 16, 400, [299, 0, -1, 300, 399], {"chunk": 150, "splits": 2}, id="chunked"),
        pytest.param(
            F16, 3, 1, 33, 20, 90, [89, 6, 7], {"chunk": 7, "window": 5, "slopes": True}, id="chunk-in-window"
        ),
        pytest.param(B16, 4, 4, 24, 24, 400, [398, 1, 0, -1], {"dilation": 3, "splits": 2}, id="dilated"),
        pytest.param(
            F32,
            2,
            1,
            16,
            16,
            40,
            [500, 39, 40, 6],
            {"dilation": 4, "window": 40, "rolling": True, "sinks": True},
            id="dilated-rolling",
        ),
        pytest.param(F32, 2, 1, 16, 16, 60, [59, 36], {"dilation": 2, "chunk": 9, "window": 8}, id="all-patterns"),
        pytest.param(B16, 4, 2, 64, 64, 20, [900], {"window": 12, "keep_first": 4, "rolling": True, "sinks": True}),
    ],
)
def test_attention_agrees_with_float64_position_by_position(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    d: int,
    dv: int,
    capacity: int,
    positions: list[int],
    options: dict[str, Any],
    device: torch.device,
) -> None:
    torch.manual_seed(3)
    text = Text.random(len(positions), kv_heads, max(positions) + 1, d, dv, dtype)
    q, sinks = torch.randn(len(positions), heads, d).to(dtype), torch.randn(heads).to(dtype)
    slopes = 2.0 ** -torch.arange(1, heads + 1).to(dtype)
    given = {"scale": d**-0.5, **options}
    extra = {name: t for name, t in (("sinks", sinks), ("slopes", slopes)) if given.pop(name, False)}
    splits, rolling = given.pop("splits", None), given.pop("rolling", False)
    wanted = text.attended(
        q.double().numpy(), positions, **given, **{name: t.double().numpy() for name, t in extra.items()}
    )
    caches = text.caches(positions, capacity, given.get("keep_first", 0), rolling)
    k, v = _tensors(dtype, device, *caches)
    at = torch.tensor(positions, device=device)
    given |= {"rolling": rolling, **{name: t.to(device) for name, t in extra.items()}}
    allowed = bound(dtype, text.values, d + max(positions) + 1)
    plain = reference(q.to(device), k.nan_to_num(), v.nan_to_num(), at, **given)
    for y in (decode_attention(q.to(device), k, v, at, splits=splits, **given), plain):
        assert y.dtype == dtype
        assert np.abs(y.double().cpu().numpy() - wanted).max() < allowed


@pytest.mark.parametrize("dtype", [B16, F16, F32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "dv", "positions", "options"),
    [
        (4, 2, 16, 24, [299, -1, 130], {"splits": 3}),
        (3, 1, 33, 20, [89, 6, 7], {"chunk": 7, "sinks": True}),
        (4, 4, 64, 64, [700, 40, 161], {"window": 150, "keep_first": 5, "rolling": True, "softcap": 2.0}),
    ],
)
def test_float8_caches(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    d: int,
    dv: int,
    positions: list[int],
    options: dict[str, Any],
    device: torch.device,
) -> None:
    """The keys and values are scale · float, with a scale for each head."""
    torch.manual_seed(3)
    k_scale, v_scale = (torch.rand(kv_heads, device=device) / 50 + 0.01 for _ in range(2))
    text = Text.random(len(positions), kv_heads, max(positions) + 1, d, dv, F32)
    coded = [as_bytes(torch.from_numpy(x), s.cpu()) for x, s in ((text.keys, k_scale), (text.values, v_scale))]
    text = Text(
        *(from_bytes(x, s.cpu(), torch.float64).numpy() for x, s in zip(coded, (k_scale, v_scale), strict=True))
    )
    q, sinks = torch.randn(len(positions), heads, d).to(dtype), torch.randn(heads).to(dtype)
    given = {"scale": d**-0.5, **options}
    extra = {name: t for name, t in (("sinks", sinks),) if given.pop(name, False)}
    splits, rolling = given.pop("splits", None), given.pop("rolling", False)
    wanted = text.attended(q.double().numpy(), positions, **given, **{n: t.double().numpy() for n, t in extra.items()})
    caches = text.caches(positions, 160 if rolling else max(positions) + 2, given.get("keep_first", 0), rolling)
    k, v = (as_bytes(torch.from_numpy(c).to(device), s) for c, s in zip(caches, (k_scale, v_scale), strict=True))
    at = torch.tensor(positions, device=device)
    given |= {"rolling": rolling, "k_scale": k_scale, "v_scale": v_scale, **{n: t.to(device) for n, t in extra.items()}}
    allowed = bound(dtype, text.values, d + max(positions) + 1)
    plain = reference(q.to(device), k.where(k & 127 != 127, 0), v.where(v & 127 != 127, 0), at, **given)
    for y in (decode_attention(q.to(device), k, v, at, splits=splits, kernel=True, **given), plain):
        assert y.dtype == dtype
        assert np.abs(y.double().cpu().numpy() - wanted).max() < allowed


def test_scales_that_do_not_fit_are_refused(device: torch.device) -> None:
    q, k, at = torch.ones(1, 4, 8), torch.ones(1, 2, 6, 8, dtype=torch.uint8), torch.tensor([3])
    for changed, words in (
        ({"v_scale": None}, r"scales \[2\] torch.float32 are not float32 \[2\] for keys and for values"),
        ({"k_scale": torch.ones(4)}, r"scales \[4\] torch.float32 and \[2\] torch.float32 are not"),
        ({"k": k.float(), "v": k.float()}, "caches with scales must be uint8, not torch.float32 and torch.float32"),
    ):
        with pytest.raises(ValueError, match=words):
            decode_attention(
                q, **{"k": k, "v": k, "k_scale": torch.ones(2), "v_scale": torch.ones(2), **changed}, positions=at
            )


@pytest.mark.parametrize("rolling", [False, True])
def test_decode_attention_agrees_with_the_op(rolling: bool, device: torch.device) -> None:
    torch.manual_seed(4)
    capacity, window, keep, heads, kv_heads, d = 24, 12, 3, 4, 2, 16
    newest = np.array([[5], [23]])
    q, k, v = (torch.randn(2, 1, count * d).double().numpy() for count in (heads, kv_heads, kv_heads))
    past = [torch.randn(2, kv_heads, capacity, d).double().numpy() for _ in "kv"]
    masks = {"window": window, "keep_first": keep, "rolling": rolling, "softcap": 5.0}
    y, *present = ops.attention.reference(
        q, k, v, None, None, None, *past, newest, heads=heads, kv_heads=kv_heads, causal=True, **masks
    )
    query, *caches = _tensors(F32, device, q.reshape(2, heads, d), *present)
    mine = decode_attention(query, *caches, torch.from_numpy(newest).to(device), **masks)
    assert np.abs(mine.double().cpu().numpy() - y.reshape(2, heads, d)).max() < bound(F32, present[1], d + window)


@pytest.mark.parametrize(("pattern", "name"), [("chunked", "chunk"), ("dilated", "dilation")])
def test_patterns_are_those_of_the_op(pattern: str, name: str, device: torch.device) -> None:
    torch.manual_seed(8)
    heads, kv_heads, d, newest = 4, 2, 16, np.array([[0], [4], [23]])
    q, k, v = (torch.randn(3, 1, count * d).double().numpy() for count in (heads, kv_heads, kv_heads))
    past = [torch.randn(3, kv_heads, 24, d).double().numpy() for _ in "kv"]
    masks = {"heads": heads, "kv_heads": kv_heads, "causal": True, "pattern": pattern, "stride": 5}
    y, *present = ops.attention.reference(q, k, v, None, None, None, *past, newest, **masks)
    query, *caches = _tensors(F32, device, q.reshape(3, heads, d), *present)
    for attend in (decode_attention, reference):
        mine = attend(query, *caches, torch.from_numpy(newest).to(device), **{name: 5})
        assert np.abs(mine.double().cpu().numpy() - y.reshape(3, heads, d)).max() < bound(F32, present[1], d + 24)


def test_splits_reset_their_tickets_and_repeat_the_result(device: torch.device) -> None:
    torch.manual_seed(5)
    q, k, v = (torch.randn(shape, device=device) for shape in ((1, 2, 16), (1, 1, 400, 16), (1, 1, 400, 16)))
    at, tickets = torch.tensor([399], device=device), torch.zeros(3, dtype=torch.int32, device=device)
    first = decode_attention(q, k, v, at, tickets=tickets, splits=4)
    assert tickets.tolist() == [0, 0, 0]
    assert torch.equal(decode_attention(q, k, v, at, tickets=tickets, splits=4), first)
    at.fill_(9)  # a replay at a length that one split holds
    y = decode_attention(q, k, v, at, tickets=tickets, splits=4)
    assert torch.allclose(y, reference(q, k, v, at), atol=1e-5, rtol=0)
    assert tickets.tolist() == [0, 0, 0]


def test_caches_may_have_any_strides(device: torch.device) -> None:
    torch.manual_seed(6)
    q, packed = torch.randn(2, 4, 16, device=device), torch.randn(2, 30, 2, 2, 16, device=device)  # tokens first
    k, v = packed[:, :, 0].transpose(1, 2), packed[:, :, 1].transpose(1, 2)
    at = torch.tensor([[29], [11]], device=device)
    y = decode_attention(q, k, v, at)
    assert torch.equal(y, decode_attention(q, k.contiguous(), v.contiguous(), at))
    assert torch.allclose(y, reference(q, k, v, at), atol=1e-5, rtol=0)


def test_gradients_are_computed_by_torch(device: torch.device) -> None:
    torch.manual_seed(7)
    q = torch.randn(1, 2, 8, device=device, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 1, 6, 8, device=device, dtype=torch.float64, requires_grad=True) for _ in "kv")
    at = torch.tensor([3], device=device)
    assert torch.autograd.gradcheck(lambda *t: decode_attention(*t, at, window=3, keep_first=1, softcap=3.0), (q, k, v))


def test_refusals_give_a_reason() -> None:
    assert refusal(128, 128, B16) is None
    assert refusal(128, 128, torch.float64) == "no kernel for torch.float64"
    assert "more than shared memory holds" in str(refusal(2048, 512, B16))
    q, cache, at = torch.zeros(1, 4, 8), torch.zeros(1, 2, 10, 8), torch.zeros(1, dtype=torch.int64)
    for wrong, options, why in (
        ((q[0], cache, cache, at), {}, r"are not \[batch, heads, d\] and its caches"),
        ((q[:, :3], cache, cache, at), {}, "3 query heads are not a multiple of 2 KV heads"),
        ((q.half(), cache, cache, at), {}, "differ in dtype"),
        ((q, cache, cache, at.repeat(2)), {}, "must be one per row"),
        ((q, cache, cache, at), {"rolling": True, "window": 9, "keep_first": 10}, "does not hold window=9"),
        (
            (q, cache, cache, at),
            {"window": 9, "keep_first": 1, "chunk": 4},
            "cannot be combined with chunk=4",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            decode_attention(*wrong, **options)


def test_rolling_caches_shorter_than_the_window_show_all_keys(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(2, heads, *rest, generator=generator).to(device)
        for heads, *rest in ((4, 8), (2, 10, 8), (2, 10, 8))
    )
    for position in (3, 9, 25):
        at = torch.tensor([position, position // 2], device=device)
        short = decode_attention(q, k, v, at, window=64, keep_first=2, rolling=True)
        torch.testing.assert_close(short, decode_attention(q, k, v, at, window=8, keep_first=2, rolling=True))
        torch.testing.assert_close(short, reference(q, k, v, at, window=64, keep_first=2, rolling=True))


@pytest.mark.parametrize("axis", [1, 2])
def test_caches_with_offsets_above_32_bits(device: torch.device, tmp_path: Path, axis: int) -> None:
    q = draw(1, 6, 16, seed=1, dtype=B16, device=device)
    near = [draw(1, 3, 5, 16, seed=seed, dtype=B16, device=device) for seed in (2, 3)]
    far = far_caches(tmp_path / "cache", (3, 5, 16), axis, device)
    for cache, values in zip(far, near, strict=True):
        cache.copy_(values)
    positions = torch.tensor([4], device=device)
    assert torch.equal(decode_attention(q, *far, positions), decode_attention(q, *near, positions))


CAPACITY = 12


def caches(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw keys and values [rows, 2, CAPACITY, 8], the same in every row."""
    k, v = torch.randn(2, 1, 2, CAPACITY, 8, generator=torch.Generator().manual_seed(0))
    return k.repeat(rows, 1, 1, 1), v.repeat(rows, 1, 1, 1)


@pytest.mark.parametrize("position", [-1, 0, 5, CAPACITY - 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0},
        {"window": 3, "keep_first": 1},
        {"window": CAPACITY, "rolling": True},
        {"chunk": 4},
        {"dilation": 2},
        {"sinks": torch.tensor([0.3, -0.2, 0.1, 2.0])},
        {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    ],
    ids=str,
)
def test_one_sequence_on_a_cpu_is_attended_as_in_a_batch(position: int, options: dict[str, Any]) -> None:
    q = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(2))
    one = reference(q, *caches(1), torch.tensor([position]), **options)
    # The other sequence is at the end of the cache, so that none of its keys can be left out.
    two = reference(q.repeat(2, 1, 1), *caches(2), torch.tensor([position, CAPACITY - 1]), **options)
    torch.testing.assert_close(one[0], two[0], rtol=1e-5, atol=1e-6)
    assert (position < 0) == (not one.any())
