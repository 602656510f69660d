"""XLNet: heads stored as separate axes, distances that may be clamped."""

from __future__ import annotations

import numpy as np

from ..tables import counting, read, refusal, weight

XLNET = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}


def test_projections_merge_heads() -> None:
    stored = counting(32, 4, 8)
    tensors = {f"transformer.layer.0.rel_attn.{x}": stored for x in "qo"}
    np.testing.assert_array_equal(weight("xlnet", "layers.0.attn.q.weight", tensors, **XLNET), stored.reshape(32, 32).T)
    np.testing.assert_array_equal(weight("xlnet", "layers.0.attn.o.weight", tensors, **XLNET), stored.reshape(32, 32))


def test_biases_and_segments_are_flattened() -> None:
    at = "transformer.layer.1.rel_attn"
    found = weight("xlnet", "layers.1.attn.segments", {f"{at}.seg_embed": counting(2, 4, 8)}, **XLNET)
    np.testing.assert_array_equal(found, counting(2, 32))
    found = weight("xlnet", "layers.1.attn.content_bias", {f"{at}.r_w_bias": counting(4, 8)}, **XLNET)
    np.testing.assert_array_equal(found, counting(32))


def test_distances_are_clamped_if_stated() -> None:
    free, clamped = read("xlnet", **XLNET).relative, read("xlnet", **XLNET, clamp_len=16).relative
    assert free == read("xlnet", **XLNET, clamp_len=-1).relative
    assert free != clamped and 16 in vars(clamped).values()


def test_attention_to_earlier_tokens_only_is_refused() -> None:
    assert "attn_type='uni' is not supported" in refusal("xlnet", **XLNET, attn_type="uni")
