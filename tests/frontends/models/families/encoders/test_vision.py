"""Image encoders and their text encoders: tokens before the patches, layer scales, SwiGLU, pooling."""

from __future__ import annotations

import numpy as np
import pytest

from ..tables import counting, names, read, refusal, weight

IMAGE = {"image_size": 8, "patch_size": 4}


def test_vit_sizes_and_pooler() -> None:
    s = read("vit", **IMAGE)
    assert (s.kind, s.vocab, s.image, s.patch, s.channels, s.prefix_tokens) == ("image-encoder", None, 8, 4, 3, 1)
    assert s.image_pooler == "none"
    assert read("vit", **IMAGE, keys=["vit.pooler.dense.weight"]).image_pooler == "dense"


def test_images_must_be_square() -> None:
    assert read("vit", image_size=[8, 8]).image == 8
    assert "image_size=[8, 4] is not supported: images must be square" in refusal("vit", image_size=[8, 4])


def test_deit_stacks_its_two_tokens() -> None:
    tokens = {f"deit.embeddings.{n}_token": np.full((1, 1, 32), i) for i, n in enumerate(("cls", "distillation"))}
    found = weight("deit", "prefix", tokens, **IMAGE)
    np.testing.assert_array_equal(found, np.repeat([[0.0], [1.0]], 32, 1))
    assert read("deit", **IMAGE).prefix_tokens == 2 and read("ijepa", **IMAGE).prefix_tokens == 0


def test_positions_cover_tokens_and_patches() -> None:
    found = weight("vit", "positions.weight", {"vit.embeddings.position_embeddings": counting(1, 5, 32)}, **IMAGE)
    np.testing.assert_array_equal(found, counting(5, 32))


def test_dinov2_layer_scale_multiplies_rows() -> None:
    at, stored, scale = "dinov2.encoder.layer.0", counting(32, 32), counting(32)
    tensors = {f"{at}.attention.output.dense.weight": stored, f"{at}.layer_scale1.lambda1": scale}
    np.testing.assert_array_equal(weight("dinov2", "layers.0.attn.o.weight", tensors), stored * scale[:, None])


def test_dinov2_swiglu_width_is_two_thirds_rounded_up_to_eight() -> None:
    s = read("dinov2", use_swiglu_ffn=True)
    assert (s.ffn, s.gated, s.activation) == (88, True, "silu")  # 2/3 · 128 = 85
    assert (read("dinov2").ffn, read("dinov2").gated) == (128, False)
    packed = counting(176, 32)
    stored = {"dinov2.encoder.layer.0.mlp.weights_in.weight": packed}
    np.testing.assert_array_equal(weight("dinov2", "layers.0.ffn.up.weight", stored, use_swiglu_ffn=True), packed[88:])


def test_registers() -> None:
    stored = {"dinov2_with_registers.embeddings.register_tokens": counting(1, 4, 32)}
    np.testing.assert_array_equal(weight("dinov2_with_registers", "registers", stored), counting(4, 32))


def test_clip_projects_only_in_classes_with_projection() -> None:
    assert read("clip_vision_model", **IMAGE).projection is None
    projected = {"architectures": ["CLIPVisionModelWithProjection"], "projection_dim": 24}
    assert read("clip_vision_model", **IMAGE, **projected).projection == 24
    assert read("clip_text_model").sentence is None


@pytest.mark.parametrize(("eos", "token"), [(7, 7), (2, None)])
def test_clip_text_pools_the_end_token(eos: int, token: int | None) -> None:
    pooling = read("clip_text_model", architectures=["CLIPTextModelWithProjection"], eos_token_id=eos).sentence
    assert pooling is not None and pooling.token == token
    assert read("clip_text_model").causal is True and read("siglip_text_model").causal is None


def test_siglip_pools_by_attention_if_stored() -> None:
    assert read("siglip_vision_model", keys=["vision_model.head.probe"]).image_pooler == "attention"
    packed = counting(96, 32)
    found = weight(
        "siglip_vision_model", "pooler.attn.k.weight", {"vision_model.head.attention.in_proj_weight": packed}
    )
    np.testing.assert_array_equal(found, packed[32:64])
    assert names("siglip_text_model", "sentence.after_0.linear.weight") == ["text_model.head.weight"]
