"""Runs: phases of training with validation, checkpoints, a log and the best model, in a run folder."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import Array
from weft.ir.storage.contents import hash_file
from weft.ir.storage.documents import Record

from ....formats.weft.manifest import list_versions
from ....formats.weft.model_folder import write_model
from ....model import Model
from ..source.sources import find_architecture_file
from .corpus import Corpus, Progress, read_sequence
from .run_folder import Log, Run, RunFolder, RunState
from .training_settings import TrainingSettings

if TYPE_CHECKING:
    from accelerate import Accelerator

    from weft.backends.torch.training.batches import Windows
    from weft.backends.torch.training.trainer import Trainer, TrainingStep

HELD_OUT = 20  # one token of 20 is held out for validation
MAX_HELD_OUT = 64  # windows of a validation, at even distances
VALIDATIONS = 10  # of a run, unless the settings say how often


@dataclass(frozen=True)
class Hooks:
    """Functions that are called during a run, and whether it writes TensorBoard's files. Raises WeftError if these
    cannot be written, because the package tensorboard is not installed."""

    report: Callable[[RunState], None] = lambda state: None
    progress: Progress = lambda stage, done, total: None
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.tensorboard and find_spec("tensorboard") is None:
            raise WeftError("--tensorboard needs the package tensorboard: pip install tensorboard")


def read_tokens(
    model: Model, corpora: Sequence[Corpus], held_out: Sequence[Corpus], settings: TrainingSettings, progress: Progress
) -> tuple[Array, Array]:
    """Return the token ids of `corpora` and of `held_out`; without it, of the last twentieth of each of `corpora`.

    Raises:
        WeftError: if a text cannot be read, or is too short for the settings' context.
    """
    context, training, rest = settings.context or 0, list[Array](), list[Array]()
    for corpus in corpora:
        ids = read_sequence(model, [corpus], progress)
        count = 0 if held_out else len(ids) // HELD_OUT + 1
        training.append(ids[: len(ids) - count])
        rest.append(ids[len(ids) - count :])
    if held_out:
        rest = [read_sequence(model, held_out, progress)]
    elif sum(map(len, rest)) <= context:  # a short text: the end of the last corpus, one window
        training[-1], end = np.split(training[-1], [max(0, len(training[-1]) - context)])
        rest.append(end)
    ids, validation = np.concatenate(training), np.concatenate(rest)
    if len(ids) < 2 * context + 1 or len(validation) <= context:
        total = f"{len(ids):,} tokens to train on and {len(validation):,} to validate on"
        raise WeftError(f"the text has {total}, not enough for windows of {context}: use a longer text or --context")
    return ids, validation


def check_resumed(
    record: Record, facts: Mapping[str, Any], settings: TrainingSettings, corpora: Sequence[Corpus]
) -> None:
    """Raise WeftError unless run.json, `record`, has the same `facts`, settings except lengths, and `corpora`."""
    recorded = {**record.record("settings").data, **record.data}
    requested: dict[str, Any] = {**dataclasses.asdict(settings), **facts}
    if corpora:
        requested["texts"] = [_hash_text(corpus) for corpus in corpora]
        recorded["texts"] = [text.get("sha256") for text in recorded["texts"]]
    for name, value in requested.items():
        value = list(value) if isinstance(value, tuple) else value
        if name == "contents" and value != recorded.get(name):
            raise WeftError(f"the source of {record.source} has changed: restore it, or begin a new run")
        if value != recorded.get(name) and name not in ("steps", "minutes"):
            raise WeftError(
                f"{record.source} has {name} {recorded.get(name)}, and this command {value}: give the same to continue"
            )


def begin_run(
    folder: RunFolder,
    model: Model,
    corpora: Sequence[Corpus],
    held_out: Sequence[Corpus],
    settings: TrainingSettings,
    facts: Mapping[str, Any],
    accelerator: Accelerator,
    progress: Progress,
) -> None:
    """Create `folder` in the first process: the tokens of `corpora` and `held_out` (without it, of the last twentieth
    of each), the tokenizer of `model`, and run.json with `facts` and the settings.

    Raises:
        WeftError: if a text cannot be read, or is too short for the settings' context.
    """
    with accelerator.main_process_first():
        if not accelerator.is_main_process:
            return
        ids, rest = read_tokens(model, corpora, held_out, settings, progress)
        folder.path.mkdir(parents=True)
        folder.store_tokens(ids, rest)
        if model.tokenizer is not None:
            folder.tokenizer.mkdir()
            model.tokenizer(folder.tokenizer)
        texts = (*corpora, *held_out)
        hashes = [{"path": str(text.path.absolute()), "sha256": _hash_text(text)} for text in texts]
        versions = list_versions("torch", "accelerate", "tokenizers")
        folder.write({**facts, "settings": dataclasses.asdict(settings), "texts": hashes, "versions": versions})


def _hash_text(corpus: Corpus) -> str:
    """Return the SHA-256 of a file, or of the names and hashes of the files in a folder."""
    if corpus.path.is_file():
        return hash_file(corpus.path)
    files = sorted(path for path in corpus.path.rglob("*") if path.is_file())
    return hashlib.sha256("".join(f"{hash_file(path)} {path.name}\n" for path in files).encode()).hexdigest()


def identify(*models: Model) -> dict[str, Any]:
    """Return the entry of run.json by which a changed source is noticed: the hashes of the operations of `models`, and
    of their files unless these are code."""
    contents = ["\n".join(map(str, model.graph.nodes)) for model in models]
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in contents]
    files = [model.hashes() for model in models if not find_architecture_file(model.spec)]
    return {"contents": [*hashes, *(digest for each in files for digest in each.values())]}


def run_phases(
    folder: RunFolder,
    phases: Mapping[str, Trainer],
    held_out: Windows,
    validate_every: int | None,
    build_model: Callable[[Mapping[str, Any]], Model],
    hooks: Hooks,
    *,
    limit: int = MAX_HELD_OUT,
    must_improve: bool = False,
    scale_rate: Callable[[float], float] = lambda loss: 1.0,
    save_more: Callable[[], None] = lambda: None,
) -> Run:
    """Run the trainers `phases`, by name, one after the other on one module, from the checkpoint of `folder` if it has
    one. The last phase's objective validates on `limit` windows of `held_out`.

    build_model: returns the model of a state_dict of the module. must_improve: only a state that is better than the
    initial one is written as the best. scale_rate: returns a factor of the learning rates for the loss before training.
    save_more: called in the first process after the best model is written.

    Raises:
        WeftError: if the checkpoint or the log is damaged, more steps are done than the plan has, or the loss is not
            finite.
    """
    from weft.backends.torch.training.checkpoint import gather_weights, load_checkpoint, save_checkpoint

    trainers, record = list(phases.values()), dict(folder.read().data)
    final, main = trainers[-1], trainers[-1].accelerator.is_main_process
    state: dict[str, Any] = {"phase": 0, "earlier": 0, "elapsed": [], "best": math.inf}
    if folder.checkpoint.is_file():
        state = load_checkpoint(trainers, folder.checkpoint)
        if (current := trainers[state["phase"]]).step > current.plan.steps:
            raise WeftError(
                f"{folder.path} has {state['earlier'] + current.step:,} steps already: give a larger --steps"
            )
    elif "results" in record:
        raise WeftError(f"{folder.checkpoint} is missing: restore it, or begin a new run")
    else:
        hooks.progress("validating", 0, 1)
        state["before"] = state["last"] = final.validate(held_out, limit)
        state["best"] = state["before"] if must_improve else math.inf
    for each in trainers:
        each.plan = replace(each.plan, rate=each.plan.rate * scale_rate(state["before"]))
    log = Log(folder, state["earlier"] + trainers[state["phase"]].step, hooks.tensorboard) if main else None

    def write(path: Path, steps: int, loss: float) -> None:
        weights = gather_weights(final)
        if main:
            model = build_model(weights)
            write_model(replace(model, trained={**record, "steps": steps, "loss": loss}), path)

    validations = math.floor(_measure(trainers) * VALIDATIONS)
    for number, (name, trainer) in enumerate(phases.items()):
        if number < state["phase"]:
            continue
        if number > state["phase"]:
            done = trainers[number - 1]
            state |= {"phase": number, "earlier": state["earlier"] + done.step}
            state["elapsed"] = [*state["elapsed"], done.elapsed]
        for step in _run(trainer):
            total, validation = state["earlier"] + step.number, None
            due = (
                step.number % validate_every == 0
                if validate_every
                else _measure(trainers) * VALIDATIONS >= validations + 1
            )
            if due or trainer.done >= 1:
                validations = math.floor(_measure(trainers) * VALIDATIONS)
                validation = state["last"] = final.validate(held_out, limit)
                if validation < state["best"]:
                    state["best"] = validation
                    write(folder.best, total, validation)
                    if main:
                        save_more()
            if log is not None:
                seconds = sum(each.elapsed for each in trainers)
                tokens = trainer.plan.batch * trainer.data.stride
                report = RunState(name, total, tokens, _measure(trainers), seconds, step, validation)
                log.write(report)
                hooks.report(report)
            if validation is not None:  # after its row in the log, as later rows are removed where a run continues
                save_checkpoint(trainer, folder.checkpoint, state)
    write(folder.last, state["earlier"] + trainers[-1].step, state["last"])
    result = Run(folder.path, state["earlier"] + trainers[-1].step, state["before"], state["best"], state["last"])
    if main:
        folder.write(
            record
            | {"results": {"steps": result.steps, "before": result.before, "best": result.best, "last": result.last}}
        )
    return result


def _run(trainer: Trainer) -> Iterator[TrainingStep]:
    try:
        yield from trainer.train()
    except FloatingPointError as e:
        raise WeftError(f"{e}: use a smaller --rate") from e


def _measure(trainers: Sequence[Trainer]) -> float:
    """Return the share of a run that is done: of the time its phases have, else of their steps."""
    seconds = [trainer.plan.seconds for trainer in trainers]
    parts = [trainer.plan.steps if time is None else time for trainer, time in zip(trainers, seconds, strict=True)]
    return sum(part * min(t.done, 1) for part, t in zip(parts, trainers, strict=True)) / sum(parts)
