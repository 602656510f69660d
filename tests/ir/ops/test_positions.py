"""Rotations and position biases against Transformers and their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from weft.ir import ops
from weft.ir.schema.cases import Case

from .attention_oracle import attend_relative

B, S, HEADS, D = 2, 10, 3, 8
RNG = np.random.default_rng(3)
X = RNG.standard_normal((B, S, HEADS * D))
AT = RNG.integers(0, 5000, (B, S))


def frequencies(dim: int, theta: float = 10_000.0) -> np.ndarray:
    return np.asarray(theta ** (-np.arange(0, dim, 2) / dim))


def by_head(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)


def test_half_split_is_llama() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    angles = torch.from_numpy(AT[..., None] * frequencies(D)).repeat(1, 1, 2)
    wanted, _ = apply_rotary_pos_emb(by_head(X), by_head(X), angles.cos(), angles.sin())
    found = ops.rope.reference(X, AT, frequencies(D), heads=HEADS)
    np.testing.assert_allclose(found, wanted.transpose(1, 2).flatten(2), rtol=1e-12, atol=1e-13)


def test_partial_is_gpt_neox() -> None:
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    angles = torch.from_numpy(AT[..., None] * frequencies(4)).repeat(1, 1, 2)
    wanted, _ = apply_rotary_pos_emb(by_head(X), by_head(X), angles.cos(), angles.sin())
    found = ops.rope.reference(X, AT, frequencies(4), heads=HEADS)
    np.testing.assert_allclose(found, wanted.transpose(1, 2).flatten(2), rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(found.reshape(B, S, HEADS, D)[..., 4:], X.reshape(B, S, HEADS, D)[..., 4:])


def test_interleaved_is_gptj() -> None:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    angles = torch.from_numpy(AT[..., None] * frequencies(D))
    wanted = apply_rotary_pos_emb(torch.from_numpy(X).unflatten(-1, (HEADS, -1)), angles.sin(), angles.cos())
    found = ops.rope.reference(X, AT, frequencies(D), heads=HEADS, interleaved=True)
    np.testing.assert_allclose(found, wanted.flatten(2), rtol=1e-12, atol=1e-13)


def test_layouts_are_permutations_of_each_other() -> None:
    order = np.arange(D).reshape(2, -1).T.reshape(-1)  # interleaved place of each half-split element
    mixed = X.reshape(B, S, HEADS, D)[..., order].reshape(X.shape)
    found = ops.rope.reference(mixed, AT, frequencies(D), heads=HEADS, interleaved=True).reshape(B, S, HEADS, D)
    wanted = ops.rope.reference(X, AT, frequencies(D), heads=HEADS).reshape(B, S, HEADS, D)[..., order]
    np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-14)


def test_scores_depend_on_distance_only() -> None:
    q, k = RNG.standard_normal((2, 1, 1, D))

    def score(i: int, j: int) -> float:
        turned = (ops.rope.reference(x, np.array([[n]]), frequencies(D), heads=1) for x, n in ((q, i), (k, j)))
        return float(np.vdot(*turned))

    assert math.isclose(score(17, 5), score(1012, 1000), rel_tol=1e-10)
    assert not math.isclose(score(17, 5), score(17, 6), rel_tol=1e-3)


def test_amplitude_scales_the_rotated_part() -> None:
    plain, loud = (ops.rope.reference(X, AT, frequencies(4), heads=HEADS, amplitude=a) for a in (1.0, 1.3))
    parts = [y.reshape(B, S, HEADS, D) for y in (plain, loud)]
    np.testing.assert_allclose(parts[1][..., :4], 1.3 * parts[0][..., :4], rtol=1e-13)
    np.testing.assert_array_equal(parts[1][..., 4:], parts[0][..., 4:])


BUCKETS = [(32, 128), (32, 256), (64, 128), (16, 20), (32, 1000), (8, 16), (32, 2048), (128, 512), (32, 64)]


@pytest.mark.parametrize(("count", "far"), BUCKETS)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets(count: int, far: int, bidirectional: bool) -> None:
    """Every distance falls into the bucket that T5 computes in float32, on both sides of every border."""
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = np.arange(-3 * far, 3 * far + 1)
    wanted = T5Attention._relative_position_bucket(torch.from_numpy(distances), bidirectional, count, far)
    table = np.arange(count, dtype=np.float64)[:, None]
    found = ops.relative_position_bias.reference(
        table, np.array([[3 * far]]), (distances + 3 * far)[None], bidirectional=bidirectional, max_distance=far
    )
    np.testing.assert_array_equal(found[0, 0, 0], wanted)


@pytest.mark.parametrize("decoder", [True, False])
def test_t5_bias(decoder: bool) -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=12, d_kv=4, num_heads=3, is_decoder=decoder)
    torch.manual_seed(0)
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double()
    wanted = module.compute_bias(200, 200).detach()
    at = np.arange(200)[None]
    table = module.relative_attention_bias.weight.detach().numpy()
    found = ops.relative_position_bias.reference(table, at, at, bidirectional=not decoder)
    np.testing.assert_array_equal(found, wanted)
    later = ops.relative_position_bias.reference(table, at[:, 150:], at, bidirectional=not decoder)
    np.testing.assert_array_equal(later, wanted[:, :, 150:])


def test_alibi_is_bloom() -> None:
    """Bloom adds slope · key position, which differs from −slope · (i − j) by a constant per row."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    from weft.ir.recipes.frequencies import AlibiSlopes
    from weft.ir.recipes.readers import EMPTY

    q, k, v = RNG.standard_normal((3, B, S, HEADS * D))
    theirs = build_alibi_tensor(torch.ones(B, S), HEADS, torch.float64).numpy().reshape(B, HEADS, 1, S)
    at = np.arange(S)[None]
    ours = ops.alibi.reference(AlibiSlopes(HEADS).evaluate(EMPTY).astype(np.float64), at, at)
    assert ours.shape == (1, HEADS, S, S)
    both = [ops.attention.reference(q, k, v, bias, heads=HEADS, kv_heads=HEADS, causal=True) for bias in (ours, theirs)]
    np.testing.assert_allclose(*both, rtol=1e-6, atol=1e-7)


def test_alibi_formula() -> None:
    slopes, q, k = np.array([0.5, 0.25]), np.array([[7, 8]]), np.array([[0, 7, 9], [1, 2, 3]])
    plain, symmetric = (ops.alibi.reference(slopes, q, k, symmetric=s) for s in (False, True))
    for b in range(2):
        for h in range(2):
            for i in range(2):
                for j in range(3):
                    distance = int(q[0, i] - k[b, j])
                    assert plain[b, h, i, j] == -slopes[h] * distance
                    assert symmetric[b, h, i, j] == -slopes[h] * abs(distance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("values", [False, True])
def test_shaw(causal: bool, values: bool) -> None:
    """e_ij = q_i (k_j + a^K_ij)ᵀ / √d, z_i = Σ_j α_ij (v_j + a^V_ij), one number after the other."""
    reach, n, d = 2, 6, 4
    q, k, v = RNG.standard_normal((3, 1, n, d))
    wk, wv = RNG.standard_normal((2, 2 * reach + 1, d))
    found = ops.relative_attention.reference(q, k, v, wk, wv if values else None, heads=1, causal=causal)
    for i in range(n):
        seen = range(i + 1 if causal else n)
        clip = [min(max(j - i, -reach), reach) + reach for j in range(n)]
        e = [math.exp(float(q[0, i] @ (k[0, j] + wk[clip[j]])) / math.sqrt(d)) for j in seen]
        z = sum(w / sum(e) * (v[0, j] + (wv[clip[j]] if values else 0)) for w, j in zip(e, seen, strict=True))
        np.testing.assert_allclose(found[0, i], z, rtol=1e-12)


def test_shaw_with_zero_tables_is_attention() -> None:
    zero = np.zeros((5, D))
    found = ops.relative_attention.reference(X, X, X, zero, zero, heads=HEADS, causal=True)
    wanted = ops.attention.reference(X, X, X, heads=HEADS, kv_heads=HEADS, causal=True)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pieces", [(10,), (4, 1, 5), (1,) * 10])
def test_shaw_with_a_cache_is_one_run(pieces: tuple[int, ...]) -> None:
    tables = RNG.standard_normal((5, D)), RNG.standard_normal((5, D))
    q, k, v = (RNG.standard_normal((B, S, HEADS * D)) for _ in range(3))
    whole = ops.relative_attention.reference(q, k, v, *tables, heads=HEADS, causal=True)
    caches = [RNG.standard_normal((B, HEADS, S + 2, D)) for _ in "kv"]  # noise where nothing is yet
    start = 0
    for n in pieces:
        cut = slice(start, start + n)
        at = np.tile(np.arange(S)[cut], (B, 1))
        parts = (t[:, cut] for t in (q, k, v))
        y, *caches = ops.relative_attention.reference(*parts, *tables, *caches, at, heads=HEADS, causal=True)
        np.testing.assert_allclose(y, whole[:, cut], rtol=1e-12, atol=1e-13)
        start += n


@pytest.mark.parametrize("case", ops.relative_attention.cases, ids=str)
def test_cases_of_relative_attention_equal_it_in_numpy(case: Case) -> None:
    operands, attrs = case.draw(), ops.relative_attention.check_attrs(case.attrs)
    found, wanted = (f(*operands, **attrs) for f in (ops.relative_attention.reference, attend_relative))
    for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
