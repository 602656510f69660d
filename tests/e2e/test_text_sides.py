"""Language models inside models of texts and images or sound, against transformers: for texts, and for embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as CLASSES

import weft
from weft.frontends import load_source
from weft.frontends.models.tables.other_types import MULTIMODAL
from weft.ir import WeftError

from ..sampling import by_turns, each
from .families import GQA, LENGTH, ROWS, VOCAB, error, randomized
from .unknowns import TOWERS, check_left_out

TEXT = GQA | {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN = TEXT | {"rope_parameters": SECTIONS}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TEXTS = {  # where not those of the table of families, or not the default
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN | {"rope_parameters": SECTIONS | {"mrope_section": [1, 1, 2]}},
    "qwen3_vl_moe": QWEN | EXPERTS,
    "qwen3_5": {"rope_parameters": SECTIONS | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}},
    "llava_next": {"model_type": "mistral"},
}
MORE: dict[str, Any] = {"gemma3": {"mm_tokens_per_image": 9}, "vipllava": {"vision_feature_layers": [-2, -1]}}
SMALL = {  # of encoders of images and sound
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "out_hidden_size", "projection_dim"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 48),
    "head_dim": 8,
}


def small(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    """The settings of an encoder like `config`, tiny."""
    return {key: SMALL.get(key, value) for key, value in config.to_dict().items() if key != "transformers_version"}


def saved(name: str, folder: Path) -> Any:
    """The model of type `name`, random, also written to `folder`."""
    kind: Any = getattr(transformers, CLASSES[name])
    default: Any = kind.config_class()
    text = {"model_type": default.text_config.model_type} | TEXTS.get(name, {})
    text = next((row.config for row in ROWS.values() if row.family == text["model_type"]), TEXT) | text
    others = {
        key: small(value)
        for key, value in vars(default).items()
        if key != "text_config" and isinstance(value, transformers.PreTrainedConfig)
    }
    tokens = {key: VOCAB - 1 for key in vars(default) if key.endswith(("token_id", "token_index"))}
    config = kind.config_class(text_config=text, **others, **tokens, **MORE.get(name, {}))
    config._attn_implementation = "eager"
    made = randomized(kind(config))
    made.save_pretrained(folder, max_shard_size="100KB")
    return made


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        # Llama 4 as a whole answers no call without images in transformers 5.24: it looks for what it did not make.
        net = model.language_model if type(model).__name__ == "Llama4ForConditionalGeneration" else model
        return np.asarray(net(input_ids=torch.from_numpy(ids)).logits.numpy())


@pytest.mark.halved
@pytest.mark.parametrize(("name", "target"), each(3, by_turns(MULTIMODAL, ["ort-cpu", "torch"])))
def test_language_models_of_multimodal_folders_equal_transformers(name: str, target: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "hf")
    ids = np.random.default_rng(1).integers(3, VOCAB - 1, (1, LENGTH))
    want = logits_of(model, ids)[0]
    assert load_source(tmp_path / "hf").unread == []
    passes = "default" if target == "torch" else "default,-last-token-logits"
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target, passes=passes)
    ours = weft.load(tmp_path / "out", trust=True)
    for chunk in (LENGTH, 5, 1):
        assert error(ours.logits(ids[0].tolist(), chunk=chunk), want) <= 1e-4
    kinds = {part.kind for part in load_source(tmp_path / "hf").left_out if not part.changes}
    assert kinds & set(TOWERS) or name in ("gemma4", "janus")
    if name != "janus":  # whose head for images is of neither kind
        check_left_out(tmp_path / "hf")


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_first_qwen2_vl_folders_are_read(name: str, tmp_path: Path) -> None:
    """Whose settings of texts stand around those of images, and whose tensors have other names."""
    model, folder = saved(name, tmp_path), tmp_path
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    names = {"model.visual.": "visual.", "model.language_model.": "model."}
    for new, old in names.items():
        tensors = {(old + key.removeprefix(new) if key.startswith(new) else key): t for key, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    scaling = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    config = text | config | {"rope_scaling": scaling, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(config))
    ids = np.random.default_rng(1).integers(3, VOCAB - 1, (2, LENGTH))
    assert load_source(folder).unread == []
    assert error(weft.torch(folder)(torch.from_numpy(ids)).detach().numpy(), logits_of(model, ids)) <= 1e-4


@pytest.mark.parametrize("name", ["llava", "internvl", "gemma3"])
def test_embeddings_equal_transformers(name: str, tmp_path: Path) -> None:
    """Embeddings take the places of tokens, as those of an image do."""
    model = saved(name, tmp_path / "hf")
    rows = torch.randn((2, LENGTH, model.config.text_config.hidden_size), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = model(inputs_embeds=rows).logits.numpy()
        got = weft.torch(tmp_path / "hf", passes="default, take-embeddings{scaled=true}")(rows).numpy()
    assert error(got, want) <= 1e-4


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def test_image_positions_equal_transformers(name: str, tmp_path: Path) -> None:
    """Each token has a time, a row and a column; at once, and in calls that share a cache."""
    model = saved(name, tmp_path / "hf")
    random = torch.Generator().manual_seed(0)
    rows = torch.randn((2, LENGTH, model.config.text_config.hidden_size), generator=random)
    at = torch.randint(0, 2 * LENGTH, (2, LENGTH, 3), generator=random)
    net = weft.torch(tmp_path / "hf", passes="default, take-embeddings, multimodal-rope")
    with torch.inference_mode():
        want = model(inputs_embeds=rows, position_ids=at.permute(2, 0, 1)).logits.numpy()
        assert error(net(rows, at).numpy(), want) <= 1e-4
        cache = net.new_cache(2, LENGTH)
        calls = [slice(0, 7), slice(7, 8), slice(8, LENGTH)]
        found = [net(rows[:, call], at[:, call], cache=cache).numpy() for call in calls]
    assert error(np.concatenate(found, 1), want) <= 1e-4


@pytest.mark.parametrize("name", each(8, MULTIMODAL))
def test_language_model_is_exported_separately(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "hf")
    weft.export(tmp_path / "hf", tmp_path / "out")
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    ids = np.random.default_rng(1).integers(3, VOCAB - 1, (2, LENGTH))
    assert error(logits_of(alone, ids), logits_of(model, ids)) <= 1e-4


def test_unsupported_multimodal_models_are_refused(tmp_path: Path) -> None:
    """Their language models may read images in other ways, as PaliGemma's sees prefixes whole."""
    config = transformers.PaliGemmaConfig(text_config=TEXT | {"model_type": "gemma"})
    config.save_pretrained(tmp_path / "hf")
    with pytest.raises(WeftError, match="model_type 'paligemma' is not known"):
        load_source(tmp_path / "hf")
