"""A row of the table test, and what its model says in transformers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from .sizes import LENGTH, VOCAB


@dataclass(frozen=True)
class Row:
    """A tiny model: `model` is a class of transformers, `config` the arguments of its config.

    `attention` is transformers' implementation; its eager Falcon adds ALiBi twice. `configuration` names the class of
    the config where that of the model has another. `fixed` are buffers of numbers that follow from the config.
    """

    model: str
    config: dict[str, Any]
    attention: str = "eager"
    configuration: str = ""
    fixed: tuple[str, ...] = ()

    @property
    def config_class(self) -> Any:
        """The class of the config."""
        if self.configuration:
            return getattr(transformers, self.configuration)
        return getattr(transformers, self.model).config_class

    @property
    def family(self) -> str:
        """The model_type."""
        return str(self.config_class.model_type)

    @property
    def is_decoder(self) -> bool:
        """Check that the model predicts the next token."""
        return self.model.endswith(("ForCausalLM", "LMHeadModel"))

    @property
    def is_encoder(self) -> bool:
        """Check that the model gives every token a vector."""
        return self.model.endswith(("Model", "Encoder")) and not self.is_decoder

    @property
    def poolers(self) -> list[dict[str, bool]]:
        """The options that say whether there is a pooler, where the class knows any."""
        known = inspect.signature(getattr(transformers, self.model)).parameters
        return [{"add_pooling_layer": yes} for yes in (True, False)] if "add_pooling_layer" in known else [{}]

    def save(self, folder: Path, **options: Any) -> torch.nn.Module:
        """The model, its parameters drawn anew, also written to `folder` as a checkpoint in several files."""
        kind = getattr(transformers, self.model)
        config = self.config_class(**self.config)
        config._attn_implementation = self.attention
        torch.manual_seed(0)  # some classes draw initial vectors
        model = randomized(kind(config, **options), fixed=self.fixed)
        model.save_pretrained(folder, max_shard_size="100KB")
        return model


def randomized(model: torch.nn.Module, seed: int = 0, fixed: tuple[str, ...] = ()) -> torch.nn.Module:
    """`model`, its parameters and learned buffers drawn anew, but those called as `fixed` says."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.state_dict().items():
        if p.is_floating_point() and not name.endswith(fixed):
            noise = 0.2 * torch.randn(p.shape, generator=generator)
            p.copy_(p + noise if p.ndim == 1 else noise)
    return model.eval()


def reference(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """Logits [batch, seq, vocab] of token ids [batch, seq] in transformers."""
    with torch.inference_mode():
        return np.asarray(model(torch.from_numpy(ids), use_cache=False).logits.numpy())


def encoder_case(row: Row, model: torch.nn.Module) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """Three padded texts as inputs of an encoder, its outputs in transformers, and which tokens are no padding."""
    rng = np.random.default_rng(1)
    ids = rng.integers(3, VOCAB, (3, LENGTH))
    mask = (np.arange(LENGTH) < np.array([[LENGTH], [9], [1]])).astype(np.int64)
    ids = np.where(mask, ids, row.config["pad_token_id"])
    arguments = {"input_ids": ids, "attention_mask": mask}
    config: Any = model.config
    types = 3 if config.model_type == "xlnet" else getattr(config, "type_vocab_size", 0)  # the third is that of CLS
    if "token_type_ids" in inspect.signature(model.forward).parameters and types:
        arguments["token_type_ids"] = rng.integers(0, types, ids.shape)
    with torch.inference_mode():
        made = model(**{name: torch.from_numpy(array) for name, array in arguments.items()})
    want = {name: made[name] for name in ("last_hidden_state", "pooler_output") if made.get(name) is not None}
    return arguments, {name: value.numpy() for name, value in want.items()}, mask.astype(bool)


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, relative to the largest value (at least 1)."""
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / max(1.0, np.abs(want).max()))
