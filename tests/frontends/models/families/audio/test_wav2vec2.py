"""wav2vec 2.0 and HuBERT: convolutions of the waveform, weight normalization per tap, norms before or after."""

from __future__ import annotations

import numpy as np
import pytest

from weft.frontends.dsl import GroupNorm, LayerNorm

from ..tables import names, read, refusal, weight

STEM = {"conv_dim": [16, 16], "conv_kernel": [5, 3], "conv_stride": [2, 2]}
CONV = "wav2vec2.encoder.pos_conv_embed.conv"


@pytest.mark.parametrize(
    "spelling", [("weight_g", "weight_v"), ("parametrizations.weight.original0", "parametrizations.weight.original1")]
)
def test_positional_kernels_are_normalized_per_tap(spelling: tuple[str, str]) -> None:
    rng = np.random.default_rng(0)
    length, direction = rng.standard_normal((1, 1, 5)), rng.standard_normal((4, 3, 5))
    stored = {f"{CONV}.{name}": x for name, x in zip(spelling, (length, direction), strict=True)}
    wanted = length * direction / np.linalg.norm(direction, axis=(0, 1), keepdims=True)
    np.testing.assert_allclose(weight("wav2vec2", "positions.weight", stored), wanted, rtol=1e-5)


def test_group_norm_is_in_the_first_convolution_only() -> None:
    norms = [type(layer.norm) for layer in read("wav2vec2", **STEM).stem.convolutions]
    assert norms == [GroupNorm, type(None)]
    norms = [type(layer.norm) for layer in read("wav2vec2", **STEM, feat_extract_norm="layer").stem.convolutions]
    assert norms == [LayerNorm, LayerNorm]


def test_published_stem_has_seven_convolutions() -> None:
    layers = read("wav2vec2").stem.convolutions
    assert [layer.stride for layer in layers] == [5, 2, 2, 2, 2, 2, 2]


def test_stable_layer_norm_means_norms_before_sublayers() -> None:
    post, pre = read("wav2vec2"), read("wav2vec2", do_stable_layer_norm=True)
    assert (post.arrangement, post.embed_norm, pre.arrangement, pre.embed_norm) == ("post", True, "pre", False)
    for norm in ("embed_norm", "final_norm"):
        assert names("wav2vec2", f"{norm}.weight") == ["wav2vec2.encoder.layer_norm.weight"]


def test_refusals() -> None:
    assert "conv_dim, conv_kernel and conv_stride must be equally long, but have 1, 2 and 2 values" in refusal(
        "wav2vec2", **(STEM | {"conv_dim": [16]})
    )
    assert "add_adapter=True is not supported" in refusal("wav2vec2", add_adapter=True)
    assert "conv_pos_batch_norm=True is not supported" in refusal("hubert", conv_pos_batch_norm=True)
