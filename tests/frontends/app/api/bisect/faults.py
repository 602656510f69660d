"""Faults of exports: the models that have them, and what bisection should name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from weft.ir.graph import Graph
from weft.passes import run_passes

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = {**SIZES, "num_key_value_heads": 2}
BART = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**GROUPED, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "mamba": ("MambaForCausalLM", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "bert": ("BertModel", SIZES),
    "bart": (
        "BartForConditionalGeneration",
        {
            **BART,
            "vocab_size": 97,
            "d_model": 32,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
        },
    ),
}


def write_model(name: str, folder: Path) -> Any:
    """Write a model with random parameters of every kind; return it."""
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind).config_class(**settings, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config.decoder_start_token_id = 1
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (1.0 if p.ndim == 1 and key.endswith("weight") else 0.0))
    model.save_pretrained(folder)
    return model


@dataclass(frozen=True)
class Fault:
    """A fault of a model: `inject` changes a copy of one side ("graph", "onnx", "module"); `against` is the other.

    `names`: the values of the graph or modules, one of which bisection should name; `kinds`: the right kinds.
    """

    model: str
    what: str
    side: str
    against: str
    inject: Callable[[Any], None]
    names: tuple[str, ...]
    kinds: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.model} {self.what} in {self.side} against {self.against}"


def graph(
    model: str, what: str, inject: Callable[[Graph], None], names: str, kinds: Sequence[str], against: str = "onnx"
) -> Fault:
    """A fault of a graph; `names` are separated by spaces."""
    return Fault(model, what, "graph", against, inject, tuple(names.split()), tuple(kinds))


def onnx_file(model: str, what: str, inject: Any, names: str, kinds: Sequence[str], against: str = "graph") -> Fault:
    """A fault of an ONNX file; `names` are separated by spaces."""
    return Fault(model, what, "onnx", against, inject, tuple(names.split()), tuple(kinds))


def module(model: str, what: str, inject: Any, names: str, kinds: Sequence[str], against: str = "graph") -> Fault:
    """A fault of a module; `names` are separated by spaces."""
    return Fault(model, what, "module", against, inject, tuple(names.split()), tuple(kinds))


def inject_graph(fault: Fault, graph: Graph) -> Graph:
    """Return a copy of `graph` with the fault."""
    faulty = graph.clone()
    fault.inject(faulty)
    return run_passes(faulty, "dce")


def inject_module(fault: Fault, module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of `module` with the fault."""
    faulty = copy.deepcopy(module)
    fault.inject(faulty)
    return faulty
