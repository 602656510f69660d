"""`weft.train`: an architecture or a checkpoint, trained on a text."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.backends.block_weights import is_quantized
from weft.ir.errors import WeftError
from weft.ir.storage.documents import Record, expand_home

from ....export.peft_adapter import write_adapter
from ....formats.weft.manifest import make_absolute
from ....model import Model, SourceLike
from ..modules import state_dict, with_weights
from ..source.sources import find_architecture_file, load_source
from .corpus import Corpus, Progress, attach_tokenizer
from .run_folder import Run, RunFolder, RunState
from .runs import Hooks, begin_run, check_resumed, identify, run_phases
from .trainers import check_trainable, choose_device, find_low_rank, initialize_by, open_training
from .training_settings import TrainingSettings

if TYPE_CHECKING:
    from accelerate import Accelerator


def train(
    source: SourceLike,
    text: str | Path | Sequence[str | Path],
    out: str | Path,
    settings: TrainingSettings = TrainingSettings(),  # noqa: B008 (it is frozen)
    *,
    tokenizer: str | None = None,
    validation: str | Path | None = None,
    field: str = "text",
    save_as: SourceLike | None = None,
    device: str = "auto",
    tensorboard: bool = False,
    report: Callable[[RunState], None] = lambda state: None,
    progress: Progress = lambda stage, done, total: None,
) -> Run:
    """Train `source` to predict the next token of `text` (decoders) or masked tokens (encoders with the head fill-mask;
    Devlin 2018, arXiv 1810.04805), and write the run folder `out`.

    The folder is a source for every function and command: the model with the smallest loss on the held-out text.
    Processes that torchrun started share the run (FSDP2).

    Args:
        text: files of plain text, JSON lines, or token ids (.npy, .json), or folders of the library datasets.
        tokenizer: as in `attach_tokenizer`.
        validation: a held-out text of the same kinds; by default the last twentieth of `text`.
        field: name of the text in records of JSON lines and datasets.
        save_as: another source that gets the trained weights, if generation needs another graph than training.
        device: "auto", "cpu" or "cuda".
        tensorboard: also write TensorBoard's event files.
        report: called after every step, in the first process.

    Raises:
        WeftError: if `out` exists, the source predicts no tokens from token ids, a text cannot be read or is too short,
            or the loss is not finite.
    """
    folder, hooks = RunFolder(expand_home(out)), Hooks(report, progress, tensorboard)
    folder.check_new()
    place = choose_device(device)
    paths = [text] if isinstance(text, str | Path) else text
    training = [Corpus(expand_home(path), field) for path in paths]
    held_out = [] if validation is None else [Corpus(expand_home(validation), field)]
    from weft.backends.torch.training.trainer import open_accelerator

    accelerator = open_accelerator(place, settings.bf16, settings.accumulate)
    check_trainable(model := load_source(source))
    model = attach_tokenizer(model, tokenizer, training)
    if settings.lora:
        find_low_rank(model.graph)
    if settings.lora and save_as is not None:
        raise WeftError(
            "with lora, only matrices of low rank train, which do not fit another model: leave out --save-as"
        )
    for line in model.list_residual_notes() if accelerator.is_main_process else ():
        logging.getLogger("weft").warning("%s", line)
    identity = identify(model)
    model = _read_floats(model)
    saved = None if save_as is None else attach_tokenizer(load_source(save_as), tokenizer, training)
    settings = settings.resolve(model)
    initialize_by(model, settings)  # errors come before anything is written
    if saved is not None:
        with_weights(saved.graph, state_dict(model))
    facts = {"source": make_absolute(model.spec), "save_as": None if saved is None else make_absolute(saved.spec)}
    with folder.remove_on_error():
        begin_run(folder, model, training, held_out, settings, facts | identity, accelerator, progress)
        return _start(folder, model, saved, settings, accelerator, hooks)


def _read_floats(model: Model) -> Model:
    """Return `model` with floats in place of quantized weights, after a warning."""
    if not any(is_quantized(param) for param in model.graph.params.values()):
        return model
    from weft.backends.torch.distillation.student import ParameterChoice, copy_as_floats

    logging.getLogger("weft").warning("%s is quantized, and trains as floats: distil keeps its codes", model.spec)
    return replace(model, graph=copy_as_floats(model.graph, ParameterChoice()).graph)


def resume(
    out: str | Path,
    source: SourceLike | None = None,
    *,
    save_as: SourceLike | None = None,
    steps: int | None = None,
    device: str = "auto",
    tensorboard: bool = False,
    report: Callable[[RunState], None] = lambda state: None,
    progress: Progress = lambda stage, done, total: None,
) -> Run:
    """Continue the run in the folder `out` from its last checkpoint, bit by bit as if it had not stopped.

    Args:
        source, save_as: the sources that the run began with. They may be left out unless they are architecture files: a
            folder does not choose which code runs.
        steps: a new number of steps in total.

    Raises:
        WeftError: if the folder is not a run's or is damaged, an architecture file is not named, or as in `train`.
    """
    folder, hooks = RunFolder(expand_home(out)), Hooks(report, progress, tensorboard)
    record = folder.read()
    settings = TrainingSettings.read(record.record("settings").data, str(record.source))
    settings = settings if steps is None else replace(settings, steps=steps)
    sources = [_choose_source(record, key, choice) for key, choice in (("source", source), ("save_as", save_as))]
    from weft.backends.torch.training.trainer import open_accelerator

    accelerator = open_accelerator(choose_device(device), settings.bf16, settings.accumulate)
    tokenizer = str(folder.tokenizer) if folder.tokenizer.is_dir() else None
    model, saved = (None if s is None else attach_tokenizer(load_source(s), tokenizer, []) for s in sources)
    assert model is not None
    check_resumed(record, identify(model), settings, [])
    if steps is not None and steps > record.record("settings").integer("steps") and accelerator.is_main_process:
        folder.write({**record.data, "settings": dataclasses.asdict(settings)})
    return _start(folder, _read_floats(model), saved, settings, accelerator, hooks)


def _choose_source(record: Record, key: str, given: SourceLike | None) -> SourceLike | None:
    """Return `given`, or else the source that run.json names; raise WeftError if that one is code."""
    spec: str | None = record.get(key, str | None)
    if given is None and spec is not None and find_architecture_file(spec):
        option = {"source": "as the model", "save_as": "with --save-as"}[key]
        raise WeftError(f"{record.source} names code, {spec}: to run it, name it yourself {option}, with --resume")
    return spec if given is None else given


def _start(
    folder: RunFolder,
    model: Model,
    saved: Model | None,
    settings: TrainingSettings,
    accelerator: Accelerator,
    hooks: Hooks,
) -> Run:
    """Train `model` from the checkpoint of `folder`, or from its beginning, to the end."""
    tokens = folder.open_tokens(model.graph, settings.context or 0)
    training = open_training(model, *tokens, settings, accelerator)
    student, base = training.student, model.origin("safetensors")

    def build_model(weights: Mapping[str, Any]) -> Model:
        graph = training.build_graph(weights) if saved is None else with_weights(saved.graph, weights)
        return replace(saved or model, graph=graph, module=None, random_init=False)

    def save_adapter() -> None:
        if student is not None and base is not None:
            write_adapter(folder.path / "adapter", base, model.graph, student.list_products(), settings.lora or 0)

    phases = {"training": training.trainer}
    return run_phases(
        folder, phases, training.held_out, settings.validate_every, build_model, hooks, save_more=save_adapter
    )
