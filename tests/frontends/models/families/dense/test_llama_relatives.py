"""Relatives of Llama: rules for RoPE per layer, layouts of their checkpoints, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import RoPE, Temperature
from weft.frontends.models.families import FAMILIES
from weft.frontends.models.families.dense.llama_relatives import build_gguf_temperature, build_layer_ropes, rotate_local

from ..tables import counting, names, read, refusal, weight


def test_rotate_local_leaves_global_layers_without_rope() -> None:
    rope = RoPE(5.0)
    assert rotate_local(lambda c: rope, lambda c: (8, None, 8))({}) == (rope, None, rope)


def test_layer_ropes_have_their_own_bases() -> None:
    assert build_layer_ropes({"rope_theta": 7.0}).theta == 7.0
    ropes = build_layer_ropes({"rope_theta": 7.0, "layer_rope_theta": [1e4, 0, None, 5e5]})
    assert [rope and rope.theta for rope in ropes] == [1e4, None, None, 5e5]


def test_gguf_temperature_defaults_to_the_context_length() -> None:
    assert build_gguf_temperature({"context_length": 64}) is None
    found = build_gguf_temperature({"context_length": 64, "attention.temperature_scale": 0.1})
    assert found == Temperature(0.1, 64)
    original = {"context_length": 99, "rope.scaling.original_context_length": 64, "attention.temperature_scale": 0.1}
    assert build_gguf_temperature(original) == found


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_apertus_scalars_of_any_rank_have_one_element(shape: tuple[int, ...]) -> None:
    stored = {"model.layers.0.mlp.act_fn.alpha_p": np.full(shape, 3.0)}
    np.testing.assert_array_equal(weight("apertus", "layers.0.ffn.activation.alpha_p", stored), [3.0])


def test_apertus_files_repeat_a_single_activation_parameter() -> None:
    rule = FAMILIES["apertus"].gguf.settings["multipliers"]
    file = {"block_count": 2, "xielu.alpha_p": 0.5, "xielu.alpha_n": [1, 2], "xielu.beta": 3, "xielu.eps": 4}
    assert rule(file)["xielu.alpha_p"] == [0.5, 0.5]
    assert rule(file)["xielu.alpha_n"] == [1, 2]


def test_nanochat_swaps_the_halves_of_rotary_heads() -> None:
    stored = counting(32, 32)
    found = weight("nanochat", "layers.0.attn.q.weight", {"model.layers.0.self_attn.q_proj.weight": stored})
    np.testing.assert_array_equal(found, stored.reshape(4, 2, 4, 32)[:, ::-1].reshape(32, 32))
    assert (read("nanochat").logit_softcap, read("nanochat", final_logit_softcapping=0).logit_softcap) == (15.0, None)


def test_nemotron_norms_multiply_by_one_plus_weight() -> None:
    stored = counting(32)
    np.testing.assert_array_equal(weight("nemotron", "final_norm.weight", {"model.norm.weight": stored}), stored + 1)
    assert (read("nemotron").norm, read("nemotron").activation, read("nemotron").gated) == ("layer", "relu2", False)


def test_exaone4_rotates_local_layers_only() -> None:
    s = read("exaone4", sliding_window=8)
    assert s.window == (8, 8, 8, None)
    assert [rope is not None for rope in s.rope] == [True, True, True, False]


def test_hunyuan_alpha_multiplies_the_base() -> None:
    rope = {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 1e4}
    assert read("hunyuan_v1_dense", head_dim=8, rope_parameters=rope).rope.theta == pytest.approx(1e4 * 1000 ** (8 / 6))


def test_ministral3_temperature_grows_with_position() -> None:
    rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
    s = read("ministral3", rope_parameters=rope)
    assert s.temperature == Temperature(0.1, 16)
    assert "llama_4_scaling_beta" in refusal("ministral3", rope_parameters={"rope_type": "default"})


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("doge", {"max_position_embeddings": 64, "keep_window_size": 32}, "keep_window_size=32 must be at least"),
        ("doge", {"is_moe": True}, "is_moe=True is not supported"),
        ("iquestcoder", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    ],
)
def test_refusals(family: str, config: dict[str, Any], message: str) -> None:
    assert message in refusal(family, **config)


def test_hyperclovax_norms_after_sublayers_are_optional() -> None:
    assert (read("hyperclovax").arrangement, read("hyperclovax", use_post_norm=False).arrangement) == (
        "sandwich",
        "pre",
    )
    assert names("hyperclovax", "layers.0.ffn_post_norm.weight") == ["model.layers.0.post_norm2.weight"]
