"""Facts of a compiled folder, parsed from its manifest for the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.ir.schema.states import Growth


@dataclass(frozen=True)
class StateRecord:
    """A state of a graph, such as a KV cache.

    - input, output: names of the graph input for the old state and of the output with the new one
    - growth: how its size depends on the number of tokens
    - initial: fill value at the start of a sequence, if its size is constant
    """

    input: str
    output: str
    growth: Growth
    initial: float = 0.0


@dataclass(frozen=True)
class Sound:
    """The audio input of an encoder.

    - input: name of the graph input
    - bins: mel bins of a spectrogram [bins, frames]; None: the input is a waveform [samples]
    - length: the number of frames or samples that it must have; None: any
    """

    input: str
    bins: int | None = None
    length: int | None = None

    def __str__(self) -> str:
        if self.bins is None:
            return f"a waveform [{self.length or 'samples'}]"
        return f"a spectrogram [{self.bins}, {self.length or 'frames'}], mel bins by frames"


@dataclass(frozen=True)
class Embedding:
    """The settings of a model for sentence embeddings."""

    prompts: Mapping[str, str] = field(default_factory=dict)  # prefixes of texts, by name
    default: str | None = None  # the name of the default prompt
    truncate_dim: int | None = None  # the number of features kept of a vector
    include_prompt: bool = True  # tokens of prompts are pooled
    modules: bool = False  # modules after the pooling compute the vector
    unit: bool = False  # the result of these modules has unit length
    pad: int | None = None  # the token for padding texts to the longest, which counts as a token of the text


@dataclass(frozen=True)
class Task:
    """The task of a model's head.

    - name, labels: name of the task, and names of the logits in order
    - problem: single_label_classification, multi_label_classification or regression
    - activation: sigmoid or identity; a model with one label scores a text pair by this function of its logit
    - template: the folder's chat template renders a text pair
    - prompt: an instruction before the query of a text pair; with `template`, its system message
    """

    name: str
    labels: tuple[str, ...] = ()
    problem: str = "single_label_classification"
    activation: str = "sigmoid"
    template: bool = False
    prompt: str = ""


@dataclass(frozen=True)
class FolderFacts:
    """The facts of a compiled folder that the runtime needs before it opens the model."""

    folder: Path
    files: tuple[Path, ...]  # the files of the model, named as its target does
    kind: str  # "decoder", "encoder" or "encoder-decoder"
    target: str
    vocab: int
    max_length: int
    eos: frozenset[int] = frozenset()
    head_dim: int | None = None  # features per head of the caches, if the graph does not fix them
    states: tuple[StateRecord, ...] = ()  # empty if the folder does not record them
    rolling: frozenset[int] = frozenset()  # indices of the rolling caches in the manifest's list of caches
    compares: bool = False  # tokens of a forward pass compete (for experts), so padding would change results
    compares_above: int = 0  # the number of tokens of a text above which they compete
    pooling: str = "mean"  # the pooling of an encoder's outputs to one vector per text
    normalize: bool = False  # whether that vector is scaled to unit length
    embedding: Embedding = field(default_factory=Embedding)
    start: int = 0  # the first token of an encoder-decoder's answers
    max_source: int = 0  # the length of the longest source, in tokens
    sound: Sound | None = None  # the audio input of its encoder, if any
    forced: Mapping[str, Any] = field(default_factory=dict)  # the fields of `TokenRules` for answers
    defaults: Mapping[str, Any] = field(default_factory=dict)  # sampling settings of the source, and max_tokens
    outputs: tuple[str, ...] = ()  # the names of a PyTorch model's outputs, in order
    task: Task | None = None  # the task of an encoder with a head
    keeps_blocks: bool = False  # whether it multiplies by the quantized blocks of its source
    rounds: bool = False  # whether products round activations to 8 bits
    adapters: Mapping[str, Path] = field(default_factory=dict)  # files of adapters to select at run time, by name

    @property
    def model(self) -> Path:
        """Return the path of the model file; for an encoder-decoder in two files, of the decoder."""
        return self.files[0]
