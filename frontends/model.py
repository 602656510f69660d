"""The `Model`: a graph with its weights and a record of its source."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from weft.ir.display import Displayable
from weft.ir.graph import Graph
from weft.ir.storage import Stamp, check_unchanged, scratch_folder
from weft.ir.storage.contents import hash_file
from weft.passes.analysis.residual import find_layers_without_residual

if TYPE_CHECKING:
    from .models.families import Settings
    from .models.left_out import LeftOut


@dataclass(frozen=True)
class Model(Displayable):
    """A graph with its weights, and the source that it was read from.

    spec: name of the source as the user gave it. description: the source in words. seed: of random weights.
    module: the DSL module that built the graph; None after passes. settings: the settings from which a family's table
    built the graph; None without such a table, and after a pass that is not exact.
    files: files that were read, adapters included. stamps: their state before they were read.
    tokenizer: function that writes the tokenizer's files into a folder; `graph.tokenize` uses it. None: no tokenizer.
    unread: checkpoint keys that nothing reads, except `ignored`. ignored: unread keys that the family's table lists.
    idle: the `ignored` keys that an export keeps, because transformers asks for them.
    left_out: parts of the source that the graph lacks. without: names of such parts that the user accepted.
    random_init: the weights are random, not a checkpoint's.
    pipeline: passes applied since the graph was read; passes: their records. provenance: a model folder's record of
    earlier steps.
    notes: remarks for the user on reading the source. adapters: folders of the PEFT adapters merged into the weights.
    trained: settings, corpora and versions of the training of the weights; empty if weft did not train them.
    family: the family that a folder was read as, if it differs from that of its config.
    """

    graph: Graph
    spec: str
    description: str
    seed: int = 0
    module: Any = None
    settings: Settings | None = None
    tokenizer: Callable[[Path], None] | None = None
    unread: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    files: tuple[Path, ...] = ()
    stamps: Mapping[Path, Stamp] = field(default_factory=dict)
    random_init: bool = False
    pipeline: str = ""
    passes: tuple[Mapping[str, Any], ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    adapters: tuple[Path, ...] = ()
    family: str | None = None
    without: tuple[str, ...] = ()
    trained: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            self.graph.tokenize = partial(_tokenize, self.tokenizer)

    def notices(self, strict: bool = True) -> list[str]:
        """Return the notes, a line per part that is left out (with `strict`, except the parts in `without`), and a line
        if layers have no residual connection.

        Raises:
            WeftError: if `strict`, and a part that changes the outputs is not in `without`, or a name in `without` is
                unknown.
        """
        from .models.left_out import check_accepted

        left_out = check_accepted(self.spec, self.left_out, self.without) if strict else self.left_out
        return [*self.notes, *(f"left out: {part}" for part in left_out), *self.list_residual_notes()]

    def list_residual_notes(self) -> list[str]:
        """Return a line that names the layers of an architecture without a residual connection."""
        layers = find_layers_without_residual(self.graph) if self.module is not None else []
        names = ", ".join(layers[:3]) + f" and {len(layers) - 3} more" * (len(layers) > 3)
        fault = "the output contains the input only through weights; return x + f(x) unless this is intended"
        return [f"no residual connection in {names}: {fault}"] if layers else []

    def hashes(self, abandoned: Callable[[], bool] = lambda: False) -> dict[str, str]:
        """Return the SHA-256 of each file, keyed by `_label`; wrong ones if `abandoned()` becomes True meanwhile."""
        return {self._label(path): hash_file(path, abandoned) for path in self.files}

    def check_unchanged(self) -> None:
        """Raise WeftError if a file has changed since the graph was read; call this after reading the weights."""
        check_unchanged(self.stamps)

    def origin(self, format: str) -> Path | None:
        """Return the path of the graph's source if it has this `format` (safetensors, gguf) and exists, else None."""
        source = self.graph.meta.get("source")
        path = Path(source["path"]) if isinstance(source, Mapping) and source.get("format") == format else None
        return path if path is not None and path.exists() else None

    def trace(self, text: str | Sequence[int], what: str = "all", layers: Any = "all", **options: Any) -> Any:
        """Return values inside the model for `text`: attention weights, the residual stream, the logits of layers, …
        The same as `weft.trace_text`, with the model as its source."""
        # That module imports this one.
        return importlib.import_module("weft.frontends.app.api.observe.trace").trace_text(
            self, text, what, layers, **options
        )

    def _label(self, path: Path) -> str:
        """Return the name of the file `path`, with the prefix adapter{i}/ for files adapter_* of adapter i."""
        adapter = next((i for i, folder in enumerate(self.adapters) if path.parent == folder), None)
        return path.name if adapter is None or not path.name.startswith("adapter_") else f"adapter{adapter}/{path.name}"


def _tokenize(write: Callable[[Path], None], texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each of `texts`, encoded by the tokenizer that `write` writes into a folder."""
    from weft.backends.runtime.text.tokenizer import Tokenizer

    with scratch_folder() as folder:
        write(folder)
        tokenizer = Tokenizer(folder)
        return [tokenizer.encode(text) for text in texts]


class Architecture(Protocol):
    """An object that builds a graph: a model of the DSL such as `Decoder`, or an object of a class of your own."""

    def graph(self, *, seed: int = 0, name: str = "") -> Graph:
        """Return the graph called `name`, whose parameters are randomly initialized from `seed`."""


SourceLike: TypeAlias = str | Path | Model | Graph | Architecture  # the sources that `load_source` accepts
