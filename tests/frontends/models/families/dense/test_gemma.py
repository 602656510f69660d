"""Gemma: norms that multiply by 1 + weight, scaled embeddings, local layers, softcaps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from weft.frontends.models.families import FAMILIES

from ..tables import counting, read, refusal, weight


@pytest.mark.parametrize(
    ("parameter", "name"), [("final_norm", "norm"), ("layers.0.attn_norm", "layers.0.input_layernorm")]
)
def test_norm_weights_are_stored_minus_one(parameter: str, name: str) -> None:
    stored = counting(32)
    np.testing.assert_array_equal(weight("gemma", f"{parameter}.weight", {f"model.{name}.weight": stored}), stored + 1)


def test_embeddings_are_scaled_by_the_root_of_the_width() -> None:
    s = read("gemma")
    assert s.embed_scale == pytest.approx(math.sqrt(32))
    assert (s.head_dim, s.kv_heads, s.tie) == (256, 16, True)


def test_gelu_of_the_oldest_configs_means_its_tanh_form() -> None:
    assert read("gemma", hidden_act="gelu").activation == "gelu_pytorch_tanh"
    assert read("gemma", hidden_act="relu").activation == "relu"


def test_gemma2_softcaps_scales_and_alternates_windows() -> None:
    s = read("gemma2", sliding_window=8)
    assert (s.arrangement, s.softcap, s.logit_softcap, s.scale) == ("sandwich", 50.0, 30.0, 1 / 16)
    assert s.window == (8, None, 8, None)
    assert read("gemma2", attn_logit_softcapping=None).softcap is None


def test_gemma3_is_global_in_every_sixth_layer_with_another_base() -> None:
    s = read("gemma3_text", num_hidden_layers=6, sliding_window=8)
    assert s.window == (8, 8, 8, 8, 8, None)
    assert [rope.theta for rope in s.rope] == [1e4] * 5 + [1e6]
    assert (s.softcap, s.logit_softcap, s.qk_norm) == (None, None, "head")


def test_bidirectional_attention_is_refused() -> None:
    assert "use_bidirectional_attention=True is not supported" in refusal("gemma", use_bidirectional_attention=True)


@pytest.mark.parametrize(("layers", "scale"), [(46, (64 // 4) ** -0.5), (26, 32**-0.5)])
def test_files_of_the_27b_model_scale_by_the_width_per_head(layers: int, scale: float) -> None:
    rule = FAMILIES["gemma2"].gguf.settings["scale"]
    file = {"embedding_length": 64, "attention.head_count": 4, "attention.key_length": 32, "block_count": layers}
    assert rule(file) == pytest.approx(scale)
