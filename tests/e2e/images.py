"""The tiny encoders of images of the table test, those of texts beside them, and pairs of both."""

from __future__ import annotations

from typing import Any

from .families import VOCAB, Row

IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 24,
    "patch_size": 8,
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
IMAGES: dict[str, Row] = {
    "vit": Row("ViTModel", IMAGE),
    "vit-plain": Row("ViTModel", IMAGE | {"qkv_bias": False, "num_channels": 1, "hidden_act": "relu"}),
    "deit": Row("DeiTModel", IMAGE),
    "vit_msn": Row("ViTMSNModel", IMAGE),
    "vit_mae": Row("ViTMAEModel", IMAGE | {"mask_ratio": 0.0}),
    "ijepa": Row("IJepaModel", IMAGE),
    "dinov2": Row("Dinov2Model", IMAGE),
    "dinov2-swiglu": Row("Dinov2Model", IMAGE | {"use_swiglu_ffn": True}),
    "dinov2-registers": Row("Dinov2WithRegistersModel", IMAGE | {"num_register_tokens": 3}),
    "clip-vision": Row("CLIPVisionModel", IMAGE),
    "siglip-vision": Row("SiglipVisionModel", IMAGE),
}
TEXTS: dict[str, Row] = {
    "clip-text": Row("CLIPTextModel", TEXT),
    "siglip-text": Row("SiglipTextModel", TEXT),
}
TOWERS = IMAGES | TEXTS


def pair(model: str, **text: int) -> Row:
    return Row(model, {"text_config": TEXT | text, "vision_config": IMAGE, "projection_dim": 20})


PAIRS: dict[str, Row] = {  # CLIP's vector is that of the first end of a text, or of the largest id where that is 2
    "clip": pair("CLIPModel", eos_token_id=7),
    "clip-largest": pair("CLIPModel"),
    "siglip": pair("SiglipModel", projection_size=20),
}
