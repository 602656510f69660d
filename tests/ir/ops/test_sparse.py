"""The index by which queries choose keys: query by query, as transformers computes it, and cut into calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.ir import Graph, TensorType, WeftError, ops
from weft.ir.op import StateKind
from weft.ir.schema.cases import Case
from weft.ir.types import dtypes

from .attention_oracle import index_keys

RNG = np.random.default_rng(11)
HEADS, D, TOP = 3, 5, 4
LENGTH = 14


def drawn(length: int = LENGTH) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, weights = (RNG.standard_normal((2, length, n)) for n in (HEADS * D, D, HEADS))
    return q, k, weights


def by_query(q: np.ndarray, k: np.ndarray, weights: np.ndarray, mask: np.ndarray, causal: bool) -> np.ndarray:
    """The formula: for each query, its keys in the order of their scores, then of their places."""
    batch, length, _ = q.shape
    bias = np.full((batch, 1, length, length), -np.inf)
    for b in range(batch):
        for t in range(length):
            scores = []
            for s in range(t + 1 if causal else length):
                if mask[b, s]:
                    heads = [max(q[b, t, h * D : h * D + D] @ k[b, s], 0.0) * weights[b, t, h] for h in range(HEADS)]
                    scores.append((-sum(heads), s))
            for _, s in sorted(scores)[:TOP]:
                bias[b, 0, t, s] = 0
    return bias


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", ["plain", "one head above", "none above"])
def test_every_query_by_itself(form: str, causal: bool) -> None:
    q, k, weights = drawn()
    if form == "one head above":  # whole numbers: many scores are equal, most of them 0
        q, k, weights = np.round(q), np.round(k / 2), np.array([[[1.0, 0.0, -1.0]]]) + 0 * weights
    elif form == "none above":
        q, k = np.abs(q), -np.abs(k)
    mask = np.stack([np.ones(LENGTH, bool), RNG.random(LENGTH) < 0.5])
    found = ops.lightning_index.reference(q, k, weights, mask, heads=HEADS, top_k=TOP, causal=causal)
    np.testing.assert_array_equal(found, by_query(q, k, weights, mask, causal))


def test_scaling_indexer_scores_changes_nothing() -> None:
    q, k, weights = drawn()
    attrs = {"heads": HEADS, "top_k": TOP, "causal": True}
    one, other = (ops.lightning_index.reference(q, k, by * weights, **attrs) for by in (1, D**-0.5 * HEADS**-0.5))
    np.testing.assert_array_equal(one, other)


def test_the_indexer_of_deepseek() -> None:
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    sizes = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 6, "qk_rope_head_dim": 8}
    module = DeepseekV32Indexer(DeepseekV32Config(hidden_size=24, q_lora_rank=20, **sizes), 0)
    torch.manual_seed(0)
    for p in module.parameters():
        torch.nn.init.normal_(p)
    x, latent = torch.randn(2, LENGTH, 24), torch.randn(2, LENGTH, 20)
    angles = torch.ones(2, LENGTH, 8), torch.zeros(2, LENGTH, 8)  # nothing turns
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, -1, -1)
    with torch.no_grad():
        places = module(x, latent, angles, seen, None).numpy()
        q, k, weights = module.wq_b(latent), module.k_norm(module.wk(x)), module.weights_proj(x)
    wanted = np.full((2, LENGTH, LENGTH), -np.inf)
    np.put_along_axis(wanted, places.astype(int), 0, -1)
    wanted[~seen.numpy()] = -np.inf  # it names some of what is not seen where there is too little else
    operands = (t.double().numpy() for t in (q, k, weights))
    found = ops.lightning_index.reference(*operands, heads=8, top_k=6, causal=True)
    np.testing.assert_array_equal(found[:, 0], wanted)
    assert np.isfinite(found[:, 0, -1]).sum() == 2 * 6


@pytest.mark.parametrize("cuts", [(1,) * LENGTH, (9, 5), (2, 1, 11)])
@pytest.mark.parametrize("late", [0, 3])
def test_calls_choose_what_one_pass_does(cuts: tuple[int, ...], late: int) -> None:
    q, k, weights = drawn()
    mask = np.broadcast_to(np.arange(LENGTH) >= late, (2, LENGTH))
    whole = ops.lightning_index.reference(q, k, weights, mask, heads=HEADS, top_k=TOP, causal=True)
    cache, start = RNG.standard_normal((2, 1, LENGTH + 2, D)), 0  # what is not written yet must not matter
    for n in cuts:
        stop = start + n
        call = (t[:, start:stop] for t in (q, k, weights))
        at = np.broadcast_to(np.arange(start, stop), (2, n))
        bias, cache = ops.lightning_index.reference(
            *call, mask[:, :stop], cache, at, heads=HEADS, top_k=TOP, causal=True
        )
        np.testing.assert_array_equal(bias[..., :LENGTH], whole[:, :, start:stop])
        assert np.isneginf(bias[..., LENGTH:]).all()
        start = stop


def test_causal_attention_caches_keys() -> None:
    types = [TensorType(dtypes.f32, (2, 8, n)) for n in (6, 2, 3)]
    (spec,) = ops.lightning_index.states_of(types, {"heads": 3, "top_k": 4, "causal": True})
    assert (spec.kind, spec.part, spec.slot_shape) == (StateKind.INDEX, "key", (1, 2))
    assert ops.lightning_index.states_of(types, {"heads": 3, "top_k": 4, "causal": False}) == ()


@pytest.mark.parametrize(
    ("shapes", "attrs", "message"),
    [
        (((2, 5, 7), (2, 5, 2), (2, 5, 3)), {}, r"q .* must be \[batch, seq, 3·d\]"),
        (((2, 5, 6), (2, 5, 3), (2, 5, 3)), {}, r"k .* must be \[batch, keys, 2\] as q"),
        (((2, 5, 6), (2, 5, 2), (2, 5, 4)), {}, r"weights .* must be \[batch, seq, 3\] as q"),
        (((2, 5, 6), (2, 5, 2), (2, 5, 3)), {"top_k": 0}, "top_k=0 must be positive"),
        (((2, 5, 6), (2, 5, 2), (2, 5, 3), (2, 6)), {}, r"key_mask .* must be \[batch, keys\] of k"),
        (((2, 5, 6), (2, 5, 2), (2, 5, 3), None, None, (2, 5)), {}, "positions need a cache, but past_k is absent"),
        (((2, 5, 6), (2, 5, 2), (2, 5, 3), None, (2, 2, 9, 2), (2, 5)), {}, r"past_k .* must be \[batch, 1, capacity"),
        (((2, 5, 6), (2, 5, 2), (2, 5, 3), None, (2, 1, 9, 2), (2, 4)), {}, r"positions .* must be \[batch, seq\]"),
        (((2, 5, 6), (2, 4, 2), (2, 5, 3), None, (2, 1, 9, 2), (2, 5)), {}, "a cache needs causal=true and k"),
    ],
)
def test_misfits(shapes: tuple[tuple[int, ...] | None, ...], attrs: dict[str, int], message: str) -> None:
    graph, whole = Graph("test"), {3, 5}  # places of operands that are whole numbers
    values = [
        None if shape is None else graph.add_input(f"x{i}", TensorType(dtypes.i64 if i in whole else dtypes.f32, shape))
        for i, shape in enumerate(shapes)
    ]
    with pytest.raises(WeftError, match=f"lightning_index: {message}"):
        ops.lightning_index(*values, **{"heads": 3, "top_k": 2, "causal": True} | attrs)


@pytest.mark.parametrize("case", ops.lightning_index.cases, ids=str)
def test_cases_of_lightning_index_equal_it_in_numpy(case: Case) -> None:
    operands, attrs = case.draw(), ops.lightning_index.check_attrs(case.attrs)
    found, wanted = (f(*operands, **attrs) for f in (ops.lightning_index.reference, index_keys))
    for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
