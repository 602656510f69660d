"""A tiny architecture; tiny Hugging Face models, every parameter randomized, and their own code run in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import command

LENGTH = 24  # of the test sequences
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}

Save = Callable[..., tuple[Any, Path]]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """save(model_type, class, shard="50MB", **config) makes a random model and its folder."""

    def make(model_type: str, kind: str = "AutoModelForCausalLM", shard: str = "50MB", **config: Any) -> Any:
        import torch
        import transformers

        torch.manual_seed(0)
        base = GPT2 if model_type == "gpt2" else TINY
        made = transformers.AutoConfig.for_model(model_type, **{**base, **config})
        model = getattr(transformers, kind)
        model = (model.from_config if kind.startswith("Auto") else model)(made).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                norm = p.ndim == 1 and name.endswith("weight")
                p.copy_(torch.randn_like(p) * 0.3 + (1.0 if norm else 0.0))
        folder = tmp_path / "model"
        model.save_pretrained(folder, max_shard_size=shard)
        return model, folder

    return make


class _Float64Torch:
    """torch, with float32 meaning float64: models cast norms, softmax and angles to float32 by that name."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return torch.float64 if name == "float32" else getattr(torch, name)


@pytest.fixture
def exactly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, np.ndarray]]:
    """exactly(model, **inputs): the outputs of the model's own code, all of it in float64."""

    def run(model: Any, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        import torch

        frequencies = {n: b.clone() for n, b in model.named_buffers() if n.endswith("inv_freq")}
        model = model.double()
        with monkeypatch.context() as patch:
            for module in {type(m).__module__ for m in model.modules()} | {type(model).__module__}:
                if module.startswith("transformers.models.") and hasattr(sys.modules[module], "torch"):
                    patch.setattr(sys.modules[module], "torch", _Float64Torch())
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            with torch.no_grad():
                found = model(**{name: torch.tensor(x) for name, x in inputs.items()})
        outputs = {k: v.numpy() for k, v in found.items() if isinstance(v, torch.Tensor)}
        assert all(v.dtype == np.float64 for v in outputs.values())
        return outputs | {n: f.numpy() for n, f in frequencies.items()}

    return run


@pytest.fixture
def ids(rng: np.random.Generator) -> np.ndarray:
    """Two rows of token ids."""
    return rng.integers(0, 97, (2, LENGTH))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """An architecture file."""
    path = tmp_path / "tiny.py"
    path.write_text(command.TINY)
    return path
