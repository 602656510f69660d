"""The folder of a run: its settings, tokens, log, checkpoint, and the best and the last model.

::

    run.json         settings, SHA-256 of the text, versions and results
    tokenizer/       the tokenizer, if the run trained it or was given it
    tokens.npy       the training text as ids; held_out.npy: the text of the validation
    log.csv          a row per step; loss.svg: the curve
    checkpoint.pt    the state after the last validation
    best/, last/     model folders: of the smallest loss in validation, and of the end
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes.readers import Array
from weft.ir.storage import check_replaceable, replace_file
from weft.ir.storage.documents import Record, format_error, write_json
from weft.passes.fitting.calibration import find_vocabulary_size

from ....formats.weft.model_folder import BEST, RUN

if TYPE_CHECKING:
    from weft.backends.torch.training.trainer import TrainingStep

TERMS = ("aux_loss", "labels", "hidden")  # of a loss, except the main one
COLUMNS = ("step", "phase", "tokens", "seconds", "loss", "validation", "rate", "gradient", "tokens_per_second", *TERMS)


_PARSERS: dict[str, Callable[[str], Any]] = {"step": int, "tokens": int, "phase": str}  # of cells; float for others


@dataclass(frozen=True)
class RunState:
    """The state of a run after a `step` of a `phase`; `number` counts the steps of all phases, each of `tokens`. done:
    share of the run that is done after `seconds`. validation: loss on held-out text in nats per token, None where none
    ran."""

    phase: str
    number: int
    tokens: int
    done: float
    seconds: float
    step: TrainingStep
    validation: float | None

    @property
    def speed(self) -> float:
        """Return the tokens per second of the step."""
        return self.tokens / self.step.seconds

    @property
    def remaining(self) -> float:
        """Return the estimated seconds to the end of the run."""
        return self.seconds * (1 - self.done) / self.done


@dataclass(frozen=True)
class Run:
    """The result of a run: its `folder`, which is a source, its number of steps, and the losses before training, of the
    best and of the last state; `measure` names the loss and its unit."""

    folder: Path
    steps: int
    before: float
    best: float
    last: float
    measure: str = "loss on held-out text, in nats per token"


@dataclass(frozen=True)
class RunFolder:
    """A run folder at `path`."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        """Return the path of the checkpoint."""
        return self.path / "checkpoint.pt"

    @property
    def best(self) -> Path:
        """Return the path of the model with the smallest loss in validation."""
        return self.path / BEST

    @property
    def last(self) -> Path:
        """Return the path of the model at the end of the run."""
        return self.path / "last"

    @property
    def tokenizer(self) -> Path:
        """Return the path of the run's own tokenizer."""
        return self.path / "tokenizer"

    def exists(self) -> bool:
        """Return whether a run began here."""
        return (self.path / RUN).is_file()

    def check_new(self) -> None:
        """Raise WeftError if there is something at the path, or it cannot be written."""
        if not self.path.exists():
            check_replaceable(self.path)
        else:
            raise WeftError(f"{self.path} exists: name another folder, or continue its run with --resume {self.path}")

    @contextmanager
    def remove_on_error(self) -> Iterator[None]:
        """Remove the new folder if the block raises an error before there is a checkpoint to continue from."""
        try:
            yield
        except Exception:
            if not self.checkpoint.is_file():
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def read(self) -> Record:
        """Return the contents of run.json.

        Raises:
            WeftError: if it is missing or invalid.
        """
        if not self.exists():
            raise WeftError(f"{self.path} is not the folder of a run: it has no {RUN}; begin one with `weft train -o`")
        return Record.read(self.path / RUN)

    def write(self, facts: Mapping[str, Any]) -> None:
        """Replace run.json by `facts`."""
        self.path.mkdir(parents=True, exist_ok=True)
        with replace_file(self.path / RUN) as partial:
            write_json(partial, dict(facts))

    def store_tokens(self, training: Array, held_out: Array) -> None:
        """Write the ids of the text to train on, and of the held-out text."""
        for name, ids in (("tokens", training), ("held_out", held_out)):
            with replace_file(self.path / f"{name}.npy") as partial, partial.open("wb") as file:
                np.save(file, ids)

    def open_tokens(self, graph: Graph, context: int) -> tuple[Array, Array]:
        """Return the ids of the text to train on, and of the held-out text, as memory maps.

        Raises:
            WeftError: if they are missing, damaged, shorter than windows of `context`, or not all tokens of `graph`.
        """
        files = [self.path / f"{name}.npy" for name in ("tokens", "held_out")]
        try:
            training, held_out = (np.lib.format.open_memmap(file, "r") for file in files)
            for ids, least in ((training, 2 * context), (held_out, context + 1)):
                if ids.ndim != 1 or ids.dtype.kind != "u" or len(ids) < least:
                    raise ValueError(f"{ids.dtype} {list(ids.shape)} are not {least} ids or more")
                if int(ids.max()) >= (vocab := find_vocabulary_size(graph)):
                    raise ValueError(f"token {ids.max()} is not below {vocab}")
        except (OSError, ValueError, SyntaxError) as e:
            raise WeftError(f"{self.path} has damaged tokens ({format_error(e)}): begin a new run") from e
        return training, held_out

    def read_log(self) -> list[dict[str, Any]]:
        """Return the rows of log.csv, all cells as floats except step, tokens and phase; empty cells are missing.

        Raises:
            WeftError: if it is damaged.
        """
        file = self.path / "log.csv"
        try:
            with file.open(newline="") as lines:
                rows = csv.DictReader(lines)
                if rows.fieldnames != list(COLUMNS):
                    raise ValueError("it has other columns")
                complete = [row for row in rows if None not in row.values()]  # a kill may cut the last one
                return [{n: _PARSERS.get(n, float)(cell) for n, cell in row.items() if cell} for row in complete]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, csv.Error) as e:
            raise WeftError(
                f"{file} is damaged ({format_error(e)}): remove it to continue without the earlier rows"
            ) from e


class Log:
    """Writes a row per step into log.csv, and into TensorBoard's files if asked to."""

    def __init__(self, folder: RunFolder, step: int, tensorboard: bool = False) -> None:
        """Begin, or continue after `step`: later rows of an interrupted run are removed.

        Raises:
            WeftError: if the log is damaged.
        """
        self.folder, self.board = folder, None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder.path / "tensorboard"))
        self.rows = [row for row in folder.read_log() if row.get("step", step + 1) <= step]
        with replace_file(folder.path / "log.csv") as partial, partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)

    def write(self, state: RunState) -> None:
        """Append the row of a `state`; draw the curve where a validation ran."""
        step, row = state.step, {"step": state.number, "phase": state.phase, "tokens": state.number * state.tokens}
        row |= {
            "seconds": state.seconds,
            "rate": step.rate,
            "gradient": step.gradient,
            "tokens_per_second": state.speed,
        }
        row |= step.losses
        row |= {} if state.validation is None else {"validation": state.validation}
        self.rows.append(row)
        with (self.folder.path / "log.csv").open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)
        if self.board is not None:
            for name, value in row.items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, state.number)
            self.board.flush()
        if state.validation is not None:
            self.draw()

    def draw(self) -> None:
        """Draw the losses of training and validation over the tokens as loss.svg, if matplotlib is installed."""
        if not find_spec("matplotlib"):
            return
        from weft.backends.viz.formats.chart import Curve, render_curves

        points = {name: [(r["tokens"], r[name]) for r in self.rows if name in r] for name in ("loss", "validation")}
        size = max(1, len(points["loss"]) // 200)  # steps per point, their mean: single steps vary too much
        means = [tuple(np.mean(points["loss"][i : i + size], 0)) for i in range(0, len(points["loss"]), size)]
        curves = [Curve("training", means), Curve("validation", points["validation"])]
        title = f"Loss of {self.folder.path.resolve().name}"
        with replace_file(self.folder.path / "loss.svg") as partial:
            partial.write_bytes(render_curves(".svg", title, "nats per token", {"tokens": curves}))
