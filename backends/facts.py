"""Facts of a compiled folder: what its manifest says, for what opens it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.ir.schema.states import Growth


@dataclass(frozen=True)
class Carried:
    """A state of a graph: the input that takes it, the output that makes it, how it grows, and the number that fills
    one of constant size before the first token."""

    input: str
    output: str
    growth: Growth
    initial: float = 0.0


@dataclass(frozen=True)
class Sound:
    """Sound that the encoder of an encoder-decoder reads: the `input` of its graph, a spectrogram of `bins` rows or
    (None) a waveform, of exactly `length` frames or samples, or of any number (None)."""

    input: str
    bins: int | None = None
    length: int | None = None

    def __str__(self) -> str:
        if self.bins is None:
            return f"a waveform [{self.length or 'samples'}]"
        return f"a spectrogram [{self.bins}, {self.length or 'frames'}], mel bins by frames"


@dataclass(frozen=True)
class Embedding:
    """The facts of sentence embeddings."""

    prompts: Mapping[str, str] = field(default_factory=dict)  # that may go before them, by name
    default: str | None = None  # the name of the one that does
    truncate_dim: int | None = None  # how many numbers of a vector are kept
    include_prompt: bool = True  # tokens of prompts are pooled
    modules: bool = False  # more than a pooling makes the vector
    unit: bool = False  # of unit length then
    pad: int | None = None  # the token that texts are padded with to the longest, which counts as one of theirs


@dataclass(frozen=True)
class Task:
    """The task `name` that a model's head was trained for.

    `problem` is single_label_classification, multi_label_classification or regression. The score of a pair of texts is
    the `activation` (sigmoid or identity) of the only label; with a `template` the folder's chat template makes the
    prompt of a pair, after the instruction `prompt`.
    """

    name: str
    labels: tuple[str, ...] = ()
    problem: str = "single_label_classification"
    activation: str = "sigmoid"
    template: bool = False
    prompt: str = ""


@dataclass(frozen=True)
class Facts:
    """Facts that the runtime needs before it opens a compiled model."""

    folder: Path
    files: tuple[Path, ...]  # of the model, as its target names them
    kind: str  # "decoder", "encoder" or "encoder-decoder"
    target: str
    vocab: int
    max_length: int
    eos: frozenset[int] = frozenset()
    head_dim: int | None = None  # of the caches, where the graph leaves it open
    carried: tuple[Carried, ...] = ()  # its states; none where the folder does not record them
    rolling: frozenset[int] = frozenset()  # the numbers of caches that roll
    compares: bool = False  # tokens of a call compete with each other, so that padding would too
    compares_above: int = 0  # where texts of more tokens than these do
    pooling: str = "mean"  # how an encoder makes one vector of a text
    normalize: bool = False  # and whether it has unit length
    embedding: Embedding = field(default_factory=Embedding)
    start: int = 0  # the token with which an encoder-decoder begins its answers
    max_source: int = 0  # the longest source it takes
    sound: Sound | None = None  # what it reads, if that is no text
    forced: Mapping[str, Any] = field(default_factory=dict)  # the fields of `Forced` of answers
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of sampling, that the source states; and max_tokens
    outputs: tuple[str, ...] = ()  # of a model of PyTorch, in order
    task: Task | None = None  # of an encoder with a head
    keeps_blocks: bool = False  # it multiplies by the quantized blocks of its source

    @property
    def model(self) -> Path:
        """The model, or of an encoder-decoder in two halves its decoder."""
        return self.files[0]
