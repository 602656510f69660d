"""A model: a graph with its weights, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from weft.ir.display import Displayable
from weft.ir.graph import Graph
from weft.ir.storage import Stamp, check_unchanged, scratch_folder
from weft.ir.storage.contents import sha256

if TYPE_CHECKING:
    from .models.families import Settings
    from .models.left_out import LeftOut


@dataclass(frozen=True)
class Model(Displayable):
    """A graph and where it comes from.

    `spec` and `seed` are what it was asked for by. `settings` are those of a family's table, as long as the graph
    computes what they describe. `tokenizer` writes the tokenizer's files into a folder. `unread` are
    checkpoint keys that nothing reads, `ignored` those known to be useless, and `idle` those of
    these that an export keeps, as transformers asks for them; `left_out` are all parts of the source that the graph has
    not, and `without` the names of those that were accepted although they change numbers. `files` are what it was read
    from, `stamps` tell whether they are still the same. `random_init`: the weights are the declared random
    initialization, not a checkpoint's. `pipeline` is what rewrote the graph since it was read, `provenance` the record
    that a model folder has of what was before. `notes` are what a user should know of how it was read. `adapters` are
    the folders of PEFT adapters that are merged into the weights; `files` has their files too. `family` is the one that
    a folder was read as, where that is not what its config says.
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
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    adapters: tuple[Path, ...] = ()
    family: str | None = None
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            self.graph.tokenize = partial(_tokenize, self.tokenizer)

    def notices(self, strict: bool = True) -> list[str]:
        """Return what a user should know of how it was read and of what is left out.

        Raises:
            WeftError: if `strict`, and a part is left out without which it computes something else, unless `without`
                accepts it.
        """
        from .models.left_out import accept

        left_out = accept(self.spec, self.left_out, self.without) if strict else self.left_out
        return [*self.notes, *(f"left out: {part}" for part in left_out)]

    def hashes(self, abandoned: Callable[[], bool] = lambda: False) -> dict[str, str]:
        """The SHA-256 of every file the model comes from, by name; reads them all, until `abandoned` says to stop."""
        return {self._label(path): sha256(path, abandoned) for path in self.files}

    def check_unchanged(self) -> None:
        """Check that the files are those that the graph was read from; to be asked when its weights have been read.

        Raises:
            WeftError: naming the first file that was written to, replaced or removed since.
        """
        check_unchanged(self.stamps)

    def origin(self, format: str) -> Path | None:
        """The checkpoint that the graph reads, if it is of that `format` (safetensors, gguf) and still there."""
        source = self.graph.meta.get("source")
        path = Path(source["path"]) if isinstance(source, Mapping) and source.get("format") == format else None
        return path if path is not None and path.exists() else None

    def _label(self, path: Path) -> str:
        """The name of one of the `files` in records: those of adapters share theirs."""
        at = next((i for i, folder in enumerate(self.adapters) if path.parent == folder), None)
        return path.name if at is None or not path.name.startswith("adapter_") else f"adapter{at}/{path.name}"


def _tokenize(write: Callable[[Path], None], texts: Sequence[str]) -> list[list[int]]:
    """The tokens of `texts` by the tokenizer whose files `write` writes into a folder."""
    from weft.backends.runtime.text.tokenizer import Tokenizer

    with scratch_folder() as folder:
        write(folder)
        tokenizer = Tokenizer(folder)
        return [tokenizer.encode(text) for text in texts]


class Architecture(Protocol):
    """An object that makes a graph: a `Decoder`, an `Encoder`, an `EncoderDecoder`, or one of your own."""

    def graph(self, *, seed: int = 0, name: str = "") -> Graph:
        """The graph called `name`, its parameters initialized with `seed`."""


SourceLike: TypeAlias = str | Path | Model | Graph | Architecture  # what `load_source` takes
