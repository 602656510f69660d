"""Facts of a compiled folder, parsed from its manifest for the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.ir.schema.states import Growth


@dataclass(frozen=True)
class StateRecord:
    """A state of a graph: the `input` for the old state, the `output` with the new one, its growth, and the `initial`
    fill value of a state of constant size."""

    input: str
    output: str
    growth: Growth
    initial: float = 0.0


@dataclass(frozen=True)
class Sound:
    """The audio input of an encoder: the graph input `input`, a spectrogram of `bins` rows or (None) a waveform, of
    exactly `length` frames or samples, or of any length (None)."""

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

    prompts: Mapping[str, str] = field(default_factory=dict)  # prefixes of texts, by name
    default: str | None = None  # the name of the default prompt
    truncate_dim: int | None = None  # the number of features kept of a vector
    include_prompt: bool = True  # whether tokens of prompts are pooled
    modules: bool = False  # whether modules after the pooling compute the vector
    unit: bool = False  # whether their result has unit length
    pad: int | None = None  # the token for padding texts to the longest, which counts as a token of the text


@dataclass(frozen=True)
class Task:
    """The task `name` of a model's head.

    `problem` is single_label_classification, multi_label_classification or regression. The score of a text pair is the
    `activation` (sigmoid or identity) of the only label; with `template`, the folder's chat template builds the prompt
    of a pair, after the instruction `prompt`.
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
    head_dim: int | None = None  # of the caches, if the graph does not fix it
    carried: tuple[StateRecord, ...] = ()  # states; empty if the folder does not record them
    rolling: frozenset[int] = frozenset()  # the indices of rolling caches
    compares: bool = False  # tokens of a call compete with each other, so padding would change results
    compares_above: int = 0  # tokens of a text above which they compete
    pooling: str = "mean"  # the pooling that turns an encoder's output into one vector per text
    normalize: bool = False  # whether that vector is scaled to unit length
    embedding: Embedding = field(default_factory=Embedding)
    start: int = 0  # the first token of an encoder-decoder's answers
    max_source: int = 0  # the length of the longest source, in tokens
    sound: Sound | None = None  # the audio input of its encoder, if any
    forced: Mapping[str, Any] = field(default_factory=dict)  # the fields of `Forced` for answers
    defaults: Mapping[str, Any] = field(default_factory=dict)  # sampling settings of the source, and max_tokens
    outputs: tuple[str, ...] = ()  # the names of a PyTorch model's outputs, in order
    task: Task | None = None  # of an encoder with a head
    keeps_blocks: bool = False  # whether it multiplies by the quantized blocks of its source

    @property
    def model(self) -> Path:
        """Return the model file; for an encoder-decoder in two files, the decoder."""
        return self.files[0]
