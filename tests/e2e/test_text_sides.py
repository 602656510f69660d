"""Language models inside models of texts and images, against transformers: for texts, and for embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import weft
from weft.frontends import load_source
from weft.frontends.formats.hf.folder import WITH_IMAGES
from weft.ir import WeftError

from .families import GQA, LENGTH, VOCAB, error, randomized
from .images import IMAGE

TEXT = GQA | {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
CLIP, SIGLIP = (IMAGE | {"model_type": f"{name}_vision_model"} for name in ("clip", "siglip"))
SQUARE = IMAGE | {"image_size": [24, 24], "patch_size": [8, 8]}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llava": ("LlavaForConditionalGeneration", "llama", CLIP, {"tie_word_embeddings": False}),
    "llava_next": ("LlavaNextForConditionalGeneration", "mistral", CLIP, {}),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", "qwen2", SIGLIP, {}),
    "vipllava": ("VipLlavaForConditionalGeneration", "llama", CLIP, {"vision_feature_layers": [-2, -1]}),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral", IMAGE | {"model_type": "pixtral"}, {}),
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text", SIGLIP, {"mm_tokens_per_image": 9}),
    "internvl": ("InternVLForConditionalGeneration", "qwen2", SQUARE, {}),
}


def saved(name: str, folder: Path) -> Any:
    """The model called `name`, random, also written to `folder`."""
    model, text, vision, more = MODELS[name]
    kind: Any = getattr(transformers, model)
    configs = {"text_config": TEXT | {"model_type": text}, "vision_config": vision}
    config = kind.config_class(**configs, image_token_index=VOCAB - 1, **more)
    config._attn_implementation = "eager"
    made = randomized(kind(config))
    made.save_pretrained(folder, max_shard_size="100KB")
    return made


def test_every_model_is_there() -> None:
    assert sorted(MODELS) == sorted(WITH_IMAGES)


@pytest.mark.parametrize("target", ["ort-cpu", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_texts_equal_transformers(name: str, target: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "hf")
    ids = np.random.default_rng(1).integers(3, VOCAB - 1, (1, LENGTH))
    with torch.inference_mode():
        want = model(input_ids=torch.from_numpy(ids)).logits[0].numpy()
    assert load_source(tmp_path / "hf").unread == []
    passes = "default" if target == "torch" else "default,-last-token-logits"
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target, passes=passes)
    ours = weft.load(tmp_path / "out", trust=True)
    for chunk in (LENGTH, 5, 1):
        assert error(ours.logits(ids[0].tolist(), chunk=chunk), want) <= 1e-4


@pytest.mark.parametrize("name", ["llava", "internvl", "gemma3"])
def test_embeddings_equal_transformers(name: str, tmp_path: Path) -> None:
    """Embeddings take the places of tokens, as those of an image do."""
    model = saved(name, tmp_path / "hf")
    rows = torch.randn((2, LENGTH, TEXT["hidden_size"]), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = model(inputs_embeds=rows).logits.numpy()
        got = weft.torch(tmp_path / "hf", passes="default, take-embeddings{scaled=true}")(rows).numpy()
    assert error(got, want) <= 1e-4


def test_other_models_of_texts_and_images_are_refused(tmp_path: Path) -> None:
    """Their language models may read images in other ways, as PaliGemma's sees prefixes whole."""
    config = transformers.PaliGemmaConfig(text_config=TEXT | {"model_type": "gemma"}, vision_config=SIGLIP)
    config.save_pretrained(tmp_path / "hf")
    with pytest.raises(WeftError, match="model_type 'paligemma' is not known"):
        load_source(tmp_path / "hf")
