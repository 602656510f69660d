"""Mixtures of experts in a decode step, one token at a time in NumPy."""

from __future__ import annotations

import numpy as np

from weft.ir.op import OPS

RNG = np.random.default_rng(4)


def test_experts_are_chosen_by_their_probability() -> None:
    logits = np.log(np.array([[[0.1, 0.4, 0.2, 0.3]]]))
    attrs = OPS["choose_experts"].check_attrs({"k": 2, "scale": 2.0, "renormalize": False})
    chosen, weights = OPS["choose_experts"].run_reference([logits], attrs)
    assert chosen.tolist() == [[[1, 3]]]
    np.testing.assert_allclose(weights, [[[0.8, 0.6]]])
    attrs["renormalize"] = True
    np.testing.assert_allclose(OPS["choose_experts"].run_reference([logits], attrs)[1], [[[8 / 7, 6 / 7]]])


def test_a_correction_changes_the_choice_but_no_weight() -> None:
    logits, bias = np.zeros((1, 1, 4)) + np.array([0.0, 1.0, 2.0, 3.0]), np.array([9.0, 0, 0, 0])
    attrs = OPS["choose_experts"].check_attrs({"k": 2, "scoring": "sigmoid", "renormalize": False})
    chosen, weights = OPS["choose_experts"].run_reference([logits, bias], attrs)
    assert sorted(chosen.reshape(-1).tolist()) == [0, 3]
    np.testing.assert_allclose(np.sort(weights.reshape(-1)), [0.5, 1 / (1 + np.exp(-3))])


def test_norm_route_chooses_by_the_projected_norm() -> None:
    x, weight, bias = RNG.standard_normal((2, 3, 5)), RNG.standard_normal((4, 5)), RNG.standard_normal(4)
    route, choose = OPS["norm_route"], OPS["choose_experts"]
    found = route.run_reference([x, weight, bias], route.check_attrs({"k": 2, "eps": 0.1}))
    normed = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 0.1)
    wanted = choose.run_reference([normed @ weight.T + bias], choose.check_attrs({"k": 2}))
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-12)


def test_mixture_adds_the_weighted_outputs_of_the_chosen_experts() -> None:
    x, residual = RNG.standard_normal((2, 3, 5)), RNG.standard_normal((2, 3, 5))
    up, down, gate = (RNG.standard_normal(s) for s in ((4, 6, 5), (4, 5, 6), (4, 6, 5)))
    chosen, weights = np.argsort(RNG.random((2, 3, 4)))[..., :2], RNG.random((2, 3, 2))
    operands = [x, chosen, weights, up, down, gate, None, None, None, residual]
    (found,) = OPS["mixture"].run_reference(operands, OPS["mixture"].check_attrs({"activation": "relu"}))
    for at in np.ndindex(2, 3):
        wanted = residual[at].copy()
        for e, w in zip(chosen[at], weights[at], strict=True):
            wanted += w * (down[e] @ (np.maximum(gate[e] @ x[at], 0) * (up[e] @ x[at])))
        np.testing.assert_allclose(found[at], wanted, rtol=1e-11, atol=1e-13)
