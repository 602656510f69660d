"""Tiny models with adapters that PEFT makes, every parameter drawn anew, and the logits that PEFT computes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports
    import peft

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
T5 = {"d_model": 32, "d_ff": 40, "d_kv": 8, "num_layers": 2, "num_heads": 4}
OPT = {"ffn_dim": 40, "word_embed_proj_dim": 32}
IDS = np.random.default_rng(5).integers(3, 61, 13).tolist()


def save_base(folder: Path, kind: str = "LlamaForCausalLM", **config: Any) -> Path:
    """Write a random model of the class `kind` of transformers into `folder`."""
    torch.manual_seed(0)
    of = getattr(transformers, kind)
    model = of(of.config_class(**({} if kind.startswith("GPT2") else COMMON | UNTIED) | config))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def adapt(
    base: Path, out: Path, kind: str = "AutoModelForCausalLM", seed: int = 1, more: int = 0, **lora: Any
) -> torch.nn.Module:
    """Write an adapter of the model in `base` with `more` tokens into `out`; every tensor of it is drawn anew. Returns
    PEFT's model."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT tells of tied weights, and of what it saves besides
        config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **lora})
        net: Any = getattr(transformers, kind).from_pretrained(base)
        if more:
            net.resize_token_embeddings(net.config.vocab_size + more, mean_resizing=False)
        model = peft.get_peft_model(net, config)
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.data *= 1 + 0.5 * torch.rand_like(parameter)
            elif parameter.requires_grad:
                parameter.data += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(out)
    return model.eval()


def logits(model: torch.nn.Module) -> np.ndarray:
    """Compute the logits of `model` for `IDS`, [tokens, vocab]."""
    with torch.inference_mode():
        found: np.ndarray = model(torch.tensor([IDS])).logits[0].double().numpy()
    return found


def merged(model: Any) -> np.ndarray:
    """Compute the logits of `model` for `IDS` after PEFT has merged its adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return logits(model.merge_and_unload())


def save_merged(model: Any, folder: Path) -> None:
    """Write the model that PEFT makes by merging the adapter of `model`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.merge_and_unload().save_pretrained(folder)


def reconfigure(adapter: Path, **changes: Any) -> None:
    """Change keys of the config of the adapter in `adapter`."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer for which w7 is token 7 into `folder`."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(COMMON["vocab_size"])}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
