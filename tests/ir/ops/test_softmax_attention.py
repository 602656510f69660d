"""Attention against torch's scaled_dot_product_attention, Transformers and masks written out as formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.ir import Graph, TensorType, WeftError, interpret, ops
from weft.ir.schema.cases import Case
from weft.ir.schema.states import CODES
from weft.ir.testing import expand_bodies
from weft.ir.types import dtypes

from ...masks import SETTINGS, sees
from .attention_oracle import attend_arrays

B, S, D = 2, 24, 4
RNG = np.random.default_rng(5)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def attend(*operands: Any, **attrs: Any) -> np.ndarray:
    return np.asarray(ops.attention.reference(*operands, **attrs))


def by_head(x: np.ndarray, heads: int) -> torch.Tensor:
    return torch.from_numpy(x).unflatten(-1, (heads, -1)).transpose(1, 2)


def flat(x: torch.Tensor) -> np.ndarray:
    return np.asarray(x.transpose(1, 2).flatten(2).numpy())


def sdpa(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, kv_heads: int, **options: Any) -> np.ndarray:
    return flat(
        F.scaled_dot_product_attention(
            by_head(q, heads), by_head(k, kv_heads), by_head(v, kv_heads), enable_gqa=True, **options
        )
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_heads(heads: int, kv_heads: int, causal: bool) -> None:
    """MHA, GQA, MQA; head sizes of keys and values may differ."""
    q, k, v = draw(B, S, heads * D), draw(B, S, kv_heads * D), draw(B, S, kv_heads * 3)
    found = attend(q, k, v, heads=heads, kv_heads=kv_heads, causal=causal)
    np.testing.assert_allclose(found, sdpa(q, k, v, heads, kv_heads, is_causal=causal), rtol=1e-11, atol=1e-13)


def test_cross_attention_bias_mask_and_scale() -> None:
    q, k, v = draw(B, 5, 4 * D), draw(B, 9, 2 * D), draw(B, 9, 2 * D)
    bias, mask = draw(1, 4, 5, 9), np.array([[1] * 9, [1] * 6 + [0] * 3])
    found = attend(q, k, v, bias, mask, heads=4, kv_heads=2, scale=0.3)
    added = torch.from_numpy(np.where(mask[:, None, None] != 0, bias, -np.inf))
    np.testing.assert_allclose(found, sdpa(q, k, v, 4, 2, attn_mask=added, scale=0.3), rtol=1e-11, atol=1e-13)


def test_query_without_visible_keys_is_zero() -> None:
    q = draw(1, 3, D)
    found = attend(q, q, q, None, np.array([[0, 0, 1]]), heads=1, kv_heads=1, causal=True)
    assert (found[0, :2] == 0).all()
    np.testing.assert_allclose(found[0, 2], q[0, 2])


MASKS: dict[str, tuple[dict[str, Any], Callable[[int, int], bool]]] = {
    name: (attrs, partial(sees, **attrs))
    for name, attrs in {
        **{name: {**settings, "causal": True} for name, settings in SETTINGS.items()},
        **{"window": {"window": 8, "causal": True}, "chunks": {"pattern": "chunked", "stride": 7, "causal": True}},
        "window both ways": {"window": 5},
    }.items()
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    attrs, sees = MASKS[name]
    q, k, v = draw(B, S, 4 * D), draw(B, S, 2 * D), draw(B, S, 2 * D)
    mask = torch.tensor([[sees(i, j) for j in range(S)] for i in range(S)])
    found = attend(q, k, v, heads=4, kv_heads=2, **attrs)
    np.testing.assert_allclose(found, sdpa(q, k, v, 4, 2, attn_mask=mask), rtol=1e-11, atol=1e-13)


def test_masks_are_those_of_transformers() -> None:
    from transformers.masking_utils import chunked_overlay, sliding_window_overlay

    q, k = torch.arange(S)[:, None], torch.arange(S)[None]
    for name, overlay in (
        ("window", sliding_window_overlay(8)),
        ("chunks", chunked_overlay(7, torch.zeros(1, dtype=int))),
    ):
        wanted = overlay(0, 0, q, k) & (k <= q)
        sees = MASKS[name][1]
        assert wanted.tolist() == [[sees(i, j) for j in range(S)] for i in range(S)]


def additive(sees: Callable[[int, int], bool]) -> torch.Tensor:
    rows = [[0.0 if sees(i, j) else float("-inf") for j in range(S)] for i in range(S)]
    return torch.tensor(rows, dtype=torch.float64)[None, None]


def test_softcap_is_gemma2() -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    q, k, v = draw(B, S, 4 * D) * 3, draw(B, S, 2 * D), draw(B, S, 2 * D)
    module = SimpleNamespace(num_key_value_groups=2, training=False, head_dim=D)
    heads = [by_head(x, n) for x, n in ((q, 4), (k, 2), (v, 2))]
    mask = additive(lambda i, j: j <= i)
    wanted, _ = eager_attention_forward(module, *heads, mask, scaling=0.4, softcap=2.0)
    found = attend(q, k, v, heads=4, kv_heads=2, causal=True, scale=0.4, softcap=2.0)
    np.testing.assert_allclose(found, wanted.flatten(2), atol=2e-6)  # it takes the softmax in float32


def test_sinks_are_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    q, k, v, sinks = draw(B, S, 4 * D), draw(B, S, 2 * D), draw(B, S, 2 * D), draw(4)
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=torch.from_numpy(sinks))
    heads = [by_head(x, n) for x, n in ((q, 4), (k, 2), (v, 2))]
    wanted, _ = eager_attention_forward(module, *heads, additive(MASKS["window"][1]), scaling=D**-0.5)
    found = attend(q, k, v, None, None, sinks, heads=4, kv_heads=2, causal=True, window=8)
    np.testing.assert_allclose(found, wanted.flatten(2), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("pieces", [(24,), (1,) * 24, (10, 14), (3, 8, 1, 1, 11), (13, 4, 7)])
@pytest.mark.parametrize(
    ("attrs", "rolling"),
    [
        ({}, False),
        ({"window": 8}, False),
        ({"window": 8}, True),
        ({"window": 4, "keep_first": 3}, False),
        ({"window": 4, "keep_first": 3}, True),
        ({"window": 8, "keep_first": 1}, True),
        ({"pattern": "chunked", "stride": 7}, False),
        ({"pattern": "strided", "stride": 5, "softcap": 3.0}, False),
        ({"window": 9, "pattern": "dilated", "stride": 2}, True),
    ],
)
def test_pieces_with_a_cache_are_one_pass(pieces: tuple[int, ...], attrs: dict[str, Any], rolling: bool) -> None:
    """Prefill in chunks and decoding, over left-padded rows, with bias and sinks: equal to one full pass."""
    heads, kv_heads = 4, 2
    q, k, v = draw(B, S, heads * D), draw(B, S, kv_heads * D), draw(B, S, kv_heads * D)
    bias, sinks = draw(1, heads, S, S), draw(heads)
    mask = np.arange(S) >= np.array([[0], [4]])  # the second row starts with 4 paddings
    whole = attend(q, k, v, bias, mask, sinks, heads=heads, kv_heads=kv_heads, causal=True, **attrs)
    capacity = 9 if rolling else 30
    past = [np.full((B, kv_heads, capacity, D), np.nan if not rolling else 9.0) for _ in "kv"]
    past = [np.nan_to_num(p, nan=7.0) for p in past]  # stale numbers in free slots must not matter
    start, found = 0, []
    for n in pieces:
        cut = slice(start, start + n)
        at = np.arange(start, start + n)[None].repeat(B, 0)
        y, *past = ops.attention.reference(
            *(q[:, cut], k[:, cut], v[:, cut], bias[:, :, cut, : start + n], mask[:, : start + n], sinks, *past, at),
            heads=heads,
            kv_heads=kv_heads,
            causal=True,
            rolling=rolling,
            **attrs,
        )
        found.append(y)
        start += n
    np.testing.assert_allclose(np.concatenate(found, 1), whole, rtol=1e-10, atol=1e-12)
    first = attrs.get("keep_first", 0)
    at = np.array([*range(first), *range(S - 9 + first, S)]) if rolling else np.arange(S)
    keys = k.reshape(B, S, kv_heads, D).transpose(0, 2, 1, 3)
    for row, shown in enumerate(mask):
        held = [j for j in at if shown[j]]
        slots = [j if j < first else first + (j - first) % (capacity - first) for j in held]
        np.testing.assert_array_equal(past[0][row, :, slots], keys[row, :, held])


def test_batch_rows_may_be_at_different_positions() -> None:
    heads, kv_heads, lengths = 2, 2, (5, 9)
    q, k, v = (draw(B, 12, heads * D) for _ in "qkv")
    past = [np.zeros((B, kv_heads, 12, D)) for _ in "kv"]
    for cache, x in zip(past, (k, v), strict=True):
        for b, n in enumerate(lengths):
            cache[b, :, :n] = x[b, :n].reshape(n, kv_heads, D).transpose(1, 0, 2)
    at = np.array([[n, n + 1] for n in lengths])
    rows = [np.stack([x[b, at[b]] for b in range(B)]) for x in (q, k, v)]
    y, *_ = ops.attention.reference(*rows, None, None, None, *past, at, heads=heads, kv_heads=kv_heads, causal=True)
    whole = attend(q, k, v, heads=heads, kv_heads=kv_heads, causal=True)
    np.testing.assert_allclose(y, np.stack([whole[b, at[b]] for b in range(B)]), rtol=1e-11, atol=1e-13)


def test_identical_heads_group_losslessly() -> None:
    """MHA whose KV heads of a group are equal is GQA on their mean (Ainslie 2023)."""
    q, k, v = draw(B, S, 4 * D), draw(B, S, 2 * D), draw(B, S, 2 * D)
    wide = [np.repeat(x.reshape(B, S, 2, D), 2, 2).reshape(B, S, 4 * D) for x in (k, v)]
    grouped = attend(q, k, v, heads=4, kv_heads=2, causal=True)
    np.testing.assert_allclose(attend(q, *wide, heads=4, kv_heads=4, causal=True), grouped, rtol=1e-12, atol=1e-14)


def test_windows_reach_layers_times_window() -> None:
    """A change at position 0 reaches position layers·(window − 1) and no further."""
    window, layers = 4, 3
    x = 0.3 * draw(1, S, D)  # small scores: no weight underflows
    moved = x.copy()
    moved[:, 0] += 1
    for _ in range(layers):
        x, moved = (y + attend(y, y, y, heads=1, kv_heads=1, causal=True, window=window) for y in (x, moved))
    reached = np.flatnonzero(np.abs(x - moved).max((0, 2)) > 0)
    assert reached.max() == layers * (window - 1)


def latent_graph(which: str, **attrs: Any) -> Callable[..., np.ndarray]:
    """A numpy function of multi-head latent attention, expanded or absorbed."""
    from weft.ir import Graph, TensorType, interpret, verify
    from weft.ir.ops import latent
    from weft.ir.types import dtypes

    def run(*arrays: np.ndarray) -> np.ndarray:
        graph = Graph(which)
        values = [graph.add_input(f"x{i}", TensorType(dtypes.f32, a.shape)) for i, a in enumerate(arrays)]
        graph.add_output(
            "y", {"expanded": latent.emit_expanded, "absorbed": latent.emit_absorbed}[which](*values, **attrs)
        )
        verify(graph)
        return interpret(graph, {f"x{i}": a for i, a in enumerate(arrays)})["y"]

    return run


def test_latent_attention_is_deepseek_v3() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    heads, nope, turned, dv, rank, width = 4, 6, 4, 5, 8, 16
    config = DeepseekV3Config(
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=turned,
        v_head_dim=dv,
        rope_interleave=True,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    module = DeepseekV3Attention(config, 0).double().eval()
    torch.nn.init.normal_(module.kv_a_layernorm.weight)
    x, at = draw(B, S, width), np.arange(S)[None].repeat(B, 0)
    frequencies = 10_000.0 ** (-np.arange(0, turned, 2) / turned)
    angles = torch.from_numpy(at[..., None] * frequencies).repeat(1, 1, 2)
    mask = additive(lambda i, j: j <= i)
    with torch.no_grad():
        wanted, _ = module(torch.from_numpy(x), (angles.cos(), angles.sin()), mask)
    p = {name: w.detach().numpy() for name, w in module.named_parameters()}
    q = (x @ p["q_proj.weight"].T).reshape(B, S, heads, nope + turned)
    q_nope, q_turned = q[..., :nope].reshape(B, S, -1), q[..., nope:].reshape(B, S, -1)
    compressed = x @ p["kv_a_proj_with_mqa.weight"].T
    c = ops.rms_norm.reference(compressed[..., :rank], p["kv_a_layernorm.weight"], eps=config.rms_norm_eps)
    ups = p["kv_b_proj.weight"].reshape(heads, nope + dv, rank)
    up_k, up_v = ups[:, :nope].reshape(-1, rank), ups[:, nope:].reshape(-1, rank)
    q_turned = ops.rope.reference(q_turned, at, frequencies, heads=heads, interleaved=True)
    k_turned = ops.rope.reference(compressed[..., rank:], at, frequencies, heads=1, interleaved=True)
    for which in ("expanded", "absorbed"):
        y = latent_graph(which, heads=heads)(q_nope, q_turned, c, k_turned, up_k, up_v)
        np.testing.assert_allclose(y @ p["o_proj.weight"].T, wanted, atol=2e-6)  # it takes the softmax in float32
    both = [
        latent_graph(w, heads=heads, scale=0.2)(q_nope, q_turned, c, k_turned, up_k, up_v)
        for w in ("expanded", "absorbed")
    ]
    np.testing.assert_allclose(*both, rtol=1e-10, atol=1e-12)


# -- caches of codes

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 6},
    "rolling": {"window": 16, "rolling": True},
    "latent": {"value_dim": 5},
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("scales", ["channels", "one"])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_cache_equals_cache_of_rounded_values(bits: int, scales: str, name: str) -> None:
    """By a loop over all numbers; the body in simpler ops says the same."""
    attrs, limit, latent = FORMS[name], 1 << bits - 1, name == "latent"
    q, k, v, at = draw(2, 3, 32), draw(2, 3, 16), draw(2, 3, 16), np.array([[5, 6, 7], [9, 10, 11]])
    k_scale, v_scale = (RNG.uniform(1, 3, 16 if scales == "channels" else 1) / limit for _ in range(2))
    past_k, past_v = RNG.integers(-limit, limit, (2, 2, 2, 20, 8))

    def code(x: float, scale: float) -> int:
        return max(-limit, min(limit - 1, round(x / scale)))  # Python rounds half to even

    def rounded(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        flat = [code(n, scale[i % scale.size]) for row in x.reshape(-1, 16) for i, n in enumerate(row)]
        return np.reshape(flat, x.shape)

    wide = {"k": k_scale.repeat(16 // k_scale.size), "v": v_scale.repeat(16 // v_scale.size)}
    given = {"heads": 4, "kv_heads": 2, "causal": True, **attrs}
    pasts = past_k, None if latent else past_v
    operands = (q, k, None if latent else v, None, None, None, *pasts, at, k_scale, None if latent else v_scale)
    y, *present = ops.attention.reference(*operands, **given, cache_bits=bits)
    by_head = {name: scale.reshape(1, 2, 1, 8) for name, scale in wide.items()}
    numbers = rounded(k, k_scale) * wide["k"], None if latent else rounded(v, v_scale) * wide["v"]
    held = past_k * by_head["k"], None if latent else past_v * by_head["v"]
    wanted, *kept = ops.attention.reference(q, *numbers, None, None, None, *held, at, **given)
    np.testing.assert_allclose(y, wanted, rtol=1e-12)
    for codes, full, scale in zip(present, kept, by_head.values(), strict=False):
        np.testing.assert_allclose(codes * scale, full, rtol=1e-12)
        assert codes.min() >= -limit
        assert codes.max() < limit
    graph, feeds = Graph("one"), {}
    values = []
    for operand, array in zip(ops.attention.operands, operands, strict=False):
        kind = {"past_k": CODES[bits], "past_v": CODES[bits], "positions": dtypes.i64}.get(operand.name, dtypes.f64)
        values.append(None if array is None else graph.add_input(operand.name, TensorType(kind, array.shape)))
        feeds |= {} if array is None else {operand.name: array}
    for i, value in enumerate(ops.attention.emit(*values, **given, cache_bits=bits)):
        graph.add_output(f"y{i}", value)
    for one, again in zip((y, *present), interpret(expand_bodies(graph), feeds).values(), strict=True):
        np.testing.assert_allclose(again, one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("attrs", "scales", "sentence"),
    [
        ({"cache_bits": 3}, (16, 16), "cache_bits=3: codes have 8 or 4 bits"),
        ({}, (16, 16), "k_scale and v_scale are given without cache_bits="),
        ({"cache_bits": 8}, (16, None), "v_scale None must be"),
        ({"cache_bits": 8}, (2, 16), r"k_scale f32\[2\] must be \[1\] or \[16\]"),
        ({"cache_bits": 8, "causal": False}, (16, 16), "cache_bits= needs causal=true"),
    ],
)
def test_scales_that_do_not_fit(attrs: dict[str, Any], scales: tuple[int | None, ...], sentence: str) -> None:
    graph = Graph("one")
    q = graph.add_input("q", TensorType(dtypes.f32, (1, 3, 16)))
    given = [
        None if n is None else graph.add_input(f"s{n}{i}", TensorType(dtypes.f32, (n,))) for i, n in enumerate(scales)
    ]
    with pytest.raises(WeftError, match=sentence):
        ops.attention(q, q, q, *[None] * 6, *given, **{"heads": 2, "kv_heads": 2, "causal": True, **attrs})


@pytest.mark.parametrize("case", ops.attention.cases, ids=str)
def test_cases_equal_attention_in_numpy(case: Case) -> None:
    operands, attrs = case.draw(), ops.attention.check_attrs(case.attrs)
    found, wanted = (f(*operands, **attrs) for f in (ops.attention.reference, attend_arrays))
    for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
