"""SqueezeBERT, ConvBERT, Nyströmformer: grouped layers as block-diagonal matrices, stored convolutions."""

from __future__ import annotations

import numpy as np

from ..tables import counting, read, refusal, weight


def block_diagonal(*blocks: np.ndarray) -> np.ndarray:
    """Return the matrix with `blocks` on its diagonal and zeros elsewhere."""
    height, width = blocks[0].shape
    out = np.zeros((height * len(blocks), width * len(blocks)))
    for i, block in enumerate(blocks):
        out[i * height : (i + 1) * height, i * width : (i + 1) * width] = block
    return out


def test_squeezebert_grouped_convolutions_are_block_diagonal() -> None:
    stored = counting(48, 32 // 2, 1) + 1
    name = "transformer.encoder.layers.0.intermediate.conv1d.weight"
    found = weight("squeezebert", "layers.0.ffn.up.weight", {name: stored}, intermediate_groups=2)
    np.testing.assert_array_equal(found, block_diagonal(stored[:24, :, 0], stored[24:, :, 0]))


def test_squeezebert_biases_have_no_groups() -> None:
    name = "transformer.encoder.layers.0.attention.query.bias"
    np.testing.assert_array_equal(weight("squeezebert", "layers.0.attn.q.bias", {name: counting(32)}), counting(32))
    assert read("squeezebert").multipliers["q_groups"] == 4
    assert read("squeezebert").multipliers["post_attention_groups"] == 1


def test_convbert_grouped_linear_layers_are_block_diagonal() -> None:
    stored = counting(2, 24, 16) + 1  # [groups, in, out]
    name = "convbert.encoder.layer.0.output.dense.weight"
    found = weight("convbert", "layers.0.ffn.down.weight", {name: stored}, num_groups=2)
    np.testing.assert_array_equal(found, block_diagonal(stored[0].T, stored[1].T))
    plain = counting(32, 48)
    np.testing.assert_array_equal(weight("convbert", "layers.0.ffn.down.weight", {name: plain}), plain)


def test_convbert_has_half_the_heads_and_a_kernel() -> None:
    mixer = read("convbert", head_ratio=2, conv_kernel_size=5).mixer
    assert {2, 5} <= set(vars(mixer).values())
    name = "convbert.encoder.layer.0.attention.self.key_conv_attn_layer.depthwise.weight"
    found = weight("convbert", "layers.0.attn.depthwise.weight", {name: counting(32, 1, 5)})
    np.testing.assert_array_equal(found, counting(32, 5))


def test_nystromformer_needs_full_attention() -> None:
    s = read("nystromformer", conv_kernel_size=9)
    assert (s.value_conv, s.position_offset, s.activation) == (9, 2, "gelu_new")
    assert "num_landmarks=32 must equal segment_means_seq_len=64" in refusal("nystromformer", num_landmarks=32)
    name = "nystromformer.encoder.layer.0.attention.self.conv.weight"
    found = weight("nystromformer", "layers.0.attn.conv.weight", {name: counting(4, 1, 9, 1)})
    np.testing.assert_array_equal(found, counting(4, 9))
