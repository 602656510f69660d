"""Trainers of models: the module, its parameter groups and its windows, from a model and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array
from weft.passes.analysis.states import has_cache
from weft.passes.fitting.matrices import find_matrices

from ....model import Model
from ..initialization import initialize, learning_rates
from ..modules import map_state_keys
from ..modules import torch as build
from .settings import TrainingSettings

if TYPE_CHECKING:
    from accelerate import Accelerator

    from weft.backends.torch.training.batches import Windows
    from weft.backends.torch.training.trainer import Trainer


def check_trainable(model: Model) -> None:
    """Raise WeftError unless `model` is a decoder of token ids with logits for every token, and without caches."""
    graph = model.graph
    if (
        (kind := graph.meta.get("kind", "decoder")) != "decoder"
        or "logits" not in graph.outputs
        or "task" in graph.meta
    ):
        kind = "decoder without logits of tokens" if kind == "decoder" else kind
        raise WeftError(f"{model.spec} is a {kind}, and training here needs a decoder: it predicts the next token")
    if has_cache(graph):
        raise WeftError(f"{model.spec} has caches: train the model before the pass kv-cache, and run the pass after it")
    if graph.inputs.keys() - {"input_ids", "position_ids", "attention_mask"}:
        raise WeftError(f"{model.spec} reads {', '.join(graph.inputs)}, and training here gives it token ids only")


def initialize_by(model: Model, settings: TrainingSettings) -> tuple[Model, dict[str, float]]:
    """Return (`model` with initial weights of the settings' scheme, factors of the learning rate by parameter name).

    Raises:
        WeftError: if the scheme does not apply.
    """
    if settings.init is None:
        return model, {}
    model = initialize(model, settings.init, width=settings.width)
    return model, learning_rates(model, settings.width) if settings.init == "mup" else {}


def open_trainer(
    model: Model, ids: Array, held_out: Array, settings: TrainingSettings, accelerator: Accelerator
) -> tuple[Trainer, Windows]:
    """Return a trainer of `model` on `ids` [tokens], and the windows of `held_out` for validation.

    Raises:
        WeftError: if the scheme of initialization does not apply, or a batch has no equal share for every process.
    """
    import torch

    from weft.backends.torch.training.batches import Windows
    from weft.backends.torch.training.objectives import NextToken
    from weft.backends.torch.training.trainer import Trainer

    parts = accelerator.num_processes * settings.accumulate
    if settings.batch % parts:
        raise WeftError(f"a batch of {settings.batch} windows cannot be divided into {parts} equal parts")
    model, factors = initialize_by(model, settings)
    torch.manual_seed(settings.seed)
    net: Any = build(model)  # a generated module, which has this switch
    net.checkpointing = settings.checkpointing
    keys = map_state_keys(model.graph)
    decayed = {keys[param.name] for param in find_matrices(model.graph) if param.name in keys}
    context = settings.context or 0
    windows = Windows(ids, context + 1, context, settings.seed, shift=True)
    trainer = Trainer(accelerator, net, NextToken(), windows, settings.make_plan(), decayed, factors)
    if settings.compiled:
        trainer.net.compile()
    return trainer, Windows(held_out, context + 1, context)
