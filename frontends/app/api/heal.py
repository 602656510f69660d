"""`weft.heal`: scales, norms and biases of a quantized model, refitted to the original's predictions on a text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.backends.block_weights import is_quantized
from weft.backends.runtime.device import choose_place
from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array
from weft.passes.analysis.states import has_cache
from weft.passes.fitting.calibration import MIXTURE, read_tokens
from weft.passes.runner import Progress

from ...model import Model, SourceLike
from .source.sources import load_source

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, BATCH, CONTEXT, RATE = 32768, 4, 256, 5e-4
HOLD_OUT = 10  # one of 10 windows is held out for validation
MAX_HELD_OUT = 8  # windows: validation should not cost more than training
PROMPT = 8  # tokens of the text at the start of a sampled sequence
SAMPLE_BATCH = 64  # sequences sampled in one batch


@dataclass(frozen=True)
class Healing:
    """The healed `model`, and its KL divergence from the original in nats per token on held-out windows of the text.

    before, after: divergence of the quantized model, and of the result. scales, norms_and_biases: number of trained
    parameters. If training did not reduce the divergence, `model` is the input.
    """

    model: Model
    before: float
    after: float
    steps: int
    scales: int
    norms_and_biases: int

    @property
    def improved(self) -> bool:
        """Return whether the divergence has decreased."""
        return self.after < self.before


def heal(
    model: SourceLike,
    *,
    against: SourceLike,
    text: str | Path | None = None,
    tokens: int = TOKENS,
    samples: int = 0,
    seconds: float | None = None,
    rate: float = RATE,
    batch: int = BATCH,
    context: int = CONTEXT,
    bf16: bool = False,
    device: str = "auto",
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> Model:
    """Refit scales, norms and biases of the quantized `model` to the original `against`; codes stay unchanged.

    The model is trained by distillation: its next-token distributions should be the original's on a text. The result is
    validated on held-out windows of the text: if it is not closer to the original there, the input is returned
    unchanged. `heal_and_measure` also returns these measurements.

    Args:
        text: a text, or token ids (.npy, .json); if None, a mixture of prose, code and languages that comes with weft.
        tokens: number of training tokens, counting repetitions.
        samples: number of tokens of additional sequences, sampled from the original.
        seconds: time limit of the training, which then takes fewer steps.
        rate: peak step size of Adam, relative to the root mean square of each parameter.
        batch: windows per step.
        context: tokens per window.
        bf16: compute the matrix products of the training in bf16: half the time on many CPUs, and on GPUs.
        device: "auto", "cpu" or "cuda".
        seed: of the order of the windows, and of the samples.

    Raises:
        WeftError: if a number is out of range, the model is not quantized, the two are not decoders with the same
            tokens and without caches, the text is too short or cannot be read, or PyTorch is not installed.
    """
    return heal_and_measure(**locals()).model  # it has the same parameters


def heal_and_measure(
    model: SourceLike,
    *,
    against: SourceLike,
    text: str | Path | None = None,
    tokens: int = TOKENS,
    samples: int = 0,
    seconds: float | None = None,
    rate: float = RATE,
    batch: int = BATCH,
    context: int = CONTEXT,
    bf16: bool = False,
    device: str = "auto",
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> Healing:
    """Heal `model` and return it with the measurements; arguments and errors as in `heal`."""
    for name, number, minimum in (("tokens", tokens, 1), ("samples", samples, 0), ("batch", batch, 1)):
        if number < minimum:
            raise WeftError(f"{name} is {number}, but it must be at least {minimum}")
    if context < 2:
        raise WeftError(f"context is {context}, but a window has at least 2 tokens")
    for name, size in (("rate", rate), ("seconds", 1.0 if seconds is None else seconds)):
        if not 0 < size < float("inf"):
            raise WeftError(f"{name} is {size}, but it must be a positive number")
    place = choose_place(device, "torch")
    quantized, original = load_source(model), load_source(against)
    _check_models(quantized, original)
    windows = _read_windows(quantized, original, str(text or MIXTURE), tokens, context)

    import torch

    from weft.backends.torch.distillation.sampled_sequences import sample_continuations
    from weft.backends.torch.distillation.student import copy_as_floats, open_student
    from weft.backends.torch.distillation.training import distill

    from .modules import build_module_graphs, simplify_trainable
    from .modules import torch as module_of

    teacher = module_of(original, device=place.device).requires_grad_(False)
    trainable = copy_as_floats(quantized.graph)
    student = open_student(
        quantized.graph, trainable, build_module_graphs(simplify_trainable(trainable.graph)), place.device
    )
    if not student.trainable:
        raise WeftError(f"{quantized.description} has no scales, norms or biases that can be trained")
    texts = torch.from_numpy(windows).to(place.device)
    held_back = torch.arange(len(texts)) % HOLD_OUT == min(HOLD_OUT, len(texts)) // 2
    training = texts[~held_back]
    if samples:
        count = -(-samples // context)
        prompts = _cut_prompts(training, count, min(PROMPT, context - 1), seed)
        sampled = [
            sample_continuations(teacher, part, context, seed=seed + i, progress=progress)
            for i, part in enumerate(torch.split(prompts, SAMPLE_BATCH))
        ]
        training = torch.cat([training, *sampled])
    outcome = distill(
        student,
        teacher,
        training,
        texts[held_back][:MAX_HELD_OUT],
        steps=-(-tokens // (batch * context)),
        batch=batch,
        rate=rate,
        seconds=seconds,
        bf16=bf16,
        seed=seed,
        progress=progress,
    )
    healed = quantized
    if outcome.improved:
        pipeline = "; ".join(text for text in (quantized.pipeline, "heal") if text)
        healed = replace(quantized, graph=student.build_graph(), module=None, pipeline=pipeline, settings=None)
    return Healing(healed, outcome.before, outcome.after, outcome.steps, *student.count_trained())


def _check_models(quantized: Model, original: Model) -> None:
    """Raise WeftError unless `quantized` is quantized, and both are decoders of one vocabulary without caches."""
    for name, graph in ((model.description, model.graph) for model in (quantized, original)):
        if (kind := graph.meta.get("kind", "decoder")) != "decoder":
            raise WeftError(f"heal needs decoders, since it compares next-token predictions, and {name} is an {kind}")
        if "logits" not in graph.outputs:
            raise WeftError(f"heal compares logits, and {name} has no output called logits")
        if has_cache(graph):
            raise WeftError(
                f"heal needs a graph without caches, and {name} has some: run the pass kv-cache after healing"
            )
    if not any(map(is_quantized, quantized.graph.params.values())):
        raise WeftError(f"{quantized.description} has no scales to refit: quantize it with `weft opt -p quantize`")
    first, second = (int(model.graph.outputs["logits"].width) for model in (quantized, original))
    if first != second:
        raise WeftError(
            f"{quantized.description} has a vocabulary of {first} tokens, and {original.description} one of {second}: "
            "give the original of the quantized model as --against"
        )


def _cut_prompts(windows: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Return prompts [count, length], cut out of `windows` at random positions."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(windows), (count,), generator=generator)
    starts = torch.randint(windows.shape[1] - length + 1, (count, 1), generator=generator)
    columns = (starts + torch.arange(length)).to(windows.device)
    return windows[rows.to(windows.device)].gather(1, columns)


def _read_windows(quantized: Model, original: Model, text: str, tokens: int, context: int) -> Array:
    """Return windows [n, context] of a text, at most as many as `tokens` training tokens and the validation need.

    The tokenizer is the quantized model's, else the original's. Raise WeftError if neither has one, `context` exceeds a
    position table, or the text is too short or cannot be read.
    """
    graphs = [quantized.graph, original.graph]
    longest = min((n for g in graphs if (n := g.meta.get("max_positions"))), default=context)
    if context > longest:
        raise WeftError(f"context is {context}, but the model's maximum is {longest}: choose a smaller one")
    graph = next((g for g in graphs if g.tokenize is not None), graphs[0])
    # One stream of tokens: a window may contain the end of a document and the beginning of the next.
    limit = tokens * HOLD_OUT // (HOLD_OUT - 1) + context
    ids = np.concatenate([ids.reshape(-1) for ids in read_tokens(graph, text, limit)])
    if len(ids) < 2 * context:
        raise WeftError(
            f"{text} has {len(ids)} tokens, but heal needs at least {2 * context} (two windows of {context}): use a "
            "longer text or a smaller context"
        )
    return ids[: len(ids) // context * context].reshape(-1, context)
