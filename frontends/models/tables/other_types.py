"""Model types without a table of their own: multimodal models, pairs of encoders, and refused types.

Of a multimodal model weft reads the language model, of a pair (CLIP) one encoder.
"""

from __future__ import annotations

from typing import Any

# Types whose language model reads token sequences as it does in a text-only checkpoint.
MULTIMODAL = (
    *("deepseek_vl", "deepseek_vl_hybrid", "exaone4_5", "fuyu", "gemma3", "gemma4", "glmasr", "got_ocr2"),
    *("hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "janus", "lfm2_vl", "lighton_ocr", "llama4"),
    *("llava", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"),
    *("mistral3", "moss_transcribe_diarize", "nemotron_h_omni", "ovis2", "qwen2_5_vl", "qwen2_audio", "qwen2_vl"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_asr", "qwen3_vl", "qwen3_vl_moe", "shieldgemma2", "smolvlm", "vibevoice_asr"),
    *("video_llama_3", "video_llava", "vipllava", "voxtral"),
)
LANGUAGE_MODELS = ("language_model", "text_model")  # names of the language model's module
# Language models that are read as another family: (family, defaults of their configs, keys with a fixed value).
SAME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", {"rms_norm_eps": 1e-5, "rope_theta": 1e6}, {}),
    "qwen2_5_vl_text": ("qwen2", {"rms_norm_eps": 1e-5, "rope_theta": 1e6}, {}),
    "qwen3_vl_text": ("qwen3", {"rope_theta": 5e5}, {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"rope_theta": 5e5}, {"norm_topk_prob": True}),
}
# Types of pairs of a text and an image encoder: for the family of each encoder, the defaults of its config, and the
# transformers class that is this encoder alone.
_DEPTH = {"num_hidden_layers": 12, "num_attention_heads": 12}
_BASE: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, **_DEPTH}
_SMALL: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, **_DEPTH, "num_attention_heads": 8}
PAIRS: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
    "clip": {
        "clip_text_model": (
            {**_SMALL, "vocab_size": 49408, "max_position_embeddings": 77},
            "CLIPTextModelWithProjection",
        ),
        "clip_vision_model": (_BASE, "CLIPVisionModelWithProjection"),
    },
    "siglip": {
        "siglip_text_model": ({**_BASE, "vocab_size": 32000, "max_position_embeddings": 64}, "SiglipTextModel"),
        "siglip_vision_model": (_BASE, "SiglipVisionModel"),
    },
}

REFUSED = {
    "deepseek_v4": "weft has no attention whose keys are each computed from several tokens",
    "nllb-moe": "weft cannot be tested against transformers 5.23, which sends every token to experts 0 and 1",
    "prophetnet": "weft has no module for its n-gram streams",
    "roc_bert": "its tokens have shapes and sounds, which would need additional inputs",
}
