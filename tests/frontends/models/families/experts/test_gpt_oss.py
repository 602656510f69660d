"""gpt-oss: gate and up interleaved, windows in even layers, clamped experts."""

from __future__ import annotations

import numpy as np

from ..tables import counting, names, read, weight

MOE = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}


def test_even_layers_are_local() -> None:
    assert read("gpt_oss", **MOE, sliding_window=8).window == (8, None, 8, None)
    assert read("gpt_oss", **MOE).window == (128, None, 128, None)
    assert read("gpt_oss", **MOE).sinks is True


def test_experts_are_clamped_shifted_and_biased() -> None:
    moe = read("gpt_oss", **MOE).moe
    assert (moe.limit, moe.shift, moe.bias, moe.activation, moe.router.bias) == (7.0, 1.0, True, "swish(1.702)", True)
    assert read("gpt_oss", **MOE, swiglu_limit=5.0).moe.limit == 5.0


def test_gate_and_up_are_interleaved_columns() -> None:
    stored, at = counting(2, 32, 96), "model.layers.0.mlp.experts"
    for i, x in enumerate(("gate", "up")):
        found = weight("gpt_oss", f"layers.0.ffn.experts.{x}", {f"{at}.gate_up_proj": stored}, **MOE)
        np.testing.assert_array_equal(found, stored[..., i::2].swapaxes(1, 2))
        found = weight("gpt_oss", f"layers.0.ffn.experts.{x}_bias", {f"{at}.gate_up_proj_bias": stored[:, 0]}, **MOE)
        np.testing.assert_array_equal(found, stored[:, 0, i::2])
    found = weight("gpt_oss", "layers.0.ffn.experts.down", {f"{at}.down_proj": counting(2, 48, 32)}, **MOE)
    np.testing.assert_array_equal(found, counting(2, 48, 32).swapaxes(1, 2))


def test_rope_is_yarn_without_truncation_unless_stated() -> None:
    rope = read("gpt_oss", **MOE).rope
    assert (rope.theta, rope.scaling, rope.factor, rope.truncate) == (150_000.0, "yarn", 32.0, False)
    plain = {"rope_type": "default", "rope_theta": 5e3}
    assert (read("gpt_oss", **MOE, rope_parameters=plain).rope.theta) == 5e3
    assert names("gpt_oss", "layers.2.attn.sinks", **MOE) == ["model.layers.2.self_attn.sinks"]
