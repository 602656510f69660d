"""The encoder of an encoder-decoder: it computes the cross-attention keys and values of sources (tokens or sound)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError
from weft.ir.types import sizes

from ...folder_facts import FolderFacts
from ..arrays import Ints
from ..text.tokenizer import IDS, MASK, build_encoder_inputs
from .bound_states import Buffer, Kind, find_kind
from .session import Session, convert_ort_errors


class EncodedSources:
    """The cross-attention keys and values of a batch, in `buffers`, keyed by the name of the decoder input. Batch row r
    attends to source `of[r]`. Buffers have an entry per batch row: rows with the same source have equal copies."""

    def __init__(self, session: Session, buffers: Mapping[str, Buffer], of: Ints) -> None:
        self._session, self._buffers, self.of = session, buffers, of

    def bind(self, binding: Any, first: int = 0, rows: int | None = None) -> None:
        """Bind `rows` batch rows (default: all) from row `first` on as inputs of the decoder."""
        for name, buffer in self._buffers.items():
            buffer.bind_input(binding, name, first, rows)

    @classmethod
    def concatenate(cls, readings: Sequence[EncodedSources]) -> EncodedSources:
        """Return one batch whose row r is the only row of `readings[r]`; tensors are zero-padded to equal lengths."""
        session, buffers = readings[0]._session, {}
        for name, buffer in readings[0]._buffers.items():
            parts = [reading._buffers[name].download() for reading in readings]
            longest = max(part.shape[1] for part in parts)
            ends = [[(0, 0), (0, longest - part.shape[1]), *[(0, 0)] * (part.ndim - 2)] for part in parts]
            values = np.concatenate([np.pad(part, end) for part, end in zip(parts, ends, strict=True)])
            buffers[name] = _new_buffer(session, values, (buffer.onnx_type, values.dtype.type)).drop_host()
        return cls(session, buffers, np.arange(len(readings)))

    def gather_rows(self, rows: Ints) -> EncodedSources:
        """Return a copy whose batch row r is row `rows[r]` of `self`, or `self` if every row would keep its source."""
        of = self.of[rows]
        if np.array_equal(of, self.of):
            return self
        buffers = {}
        for name, buffer in self._buffers.items():
            values = buffer.download()[rows]
            buffers[name] = _new_buffer(self._session, values, (buffer.onnx_type, values.dtype.type)).drop_host()
        return EncodedSources(self._session, buffers, of)


@dataclass(frozen=True)
class SourceEncoder:
    """An encoder graph in an open session.

    Inputs: `encoder_input_ids` or the input of `sound`, and if declared `encoder_attention_mask` [batch, source].
    Outputs: inputs of the decoder by the same names, such as `cross.{i}.key|value` [batch, source, width].

    Every row of the decoder begins with the token `start`. With `compares`, the tokens of a model call compete, for
    example for the capacity of experts. Raises WeftError if the graph lacks the first input or has others.
    """

    session: Session
    facts: FolderFacts

    @property
    def name(self) -> str:
        return str(self.facts.files[1])

    def __post_init__(self) -> None:
        inputs = [i.name for i in self.session.ort.get_inputs()]
        reads = IDS if self.facts.sound is None else self.facts.sound.input
        if reads not in inputs or not {*inputs} <= {reads, MASK}:
            raise WeftError(
                f"{self.name}: its inputs are {', '.join(inputs)}, so it is not the encoder of an encoder-decoder"
            )

    def select_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of `inputs` (keyed by decoder input) that the encoder provides: its outputs and mask."""
        available = {MASK, *(o.name for o in self.session.ort.get_outputs())}
        return {name: value for name, value in inputs.items() if name in available}

    def encode_sources(self, sources: Sequence[Any], shapes: Mapping[str, Any]) -> EncodedSources:
        """Run the encoder on `sources` (token ids or sounds), right-padded; return their keys, values and mask.
        `shapes` is the result of `select_inputs`: a description, with dtype and shape, of each decoder input to
        provide. If tokens compete (`compares`), each source runs separately. Raises WeftError if ONNX Runtime fails, or
        a sound has no frame or more than `max_length` frames."""
        if self.facts.compares and len(sources) > 1:
            return EncodedSources.concatenate([self.encode_sources([source], shapes) for source in sources])
        inputs = build_encoder_inputs(sources, self.facts.sound)
        batch, longest = inputs[MASK].shape
        with convert_ort_errors(self.name):
            # A binding holds addresses only: `feeds` keeps the buffers alive until the run ends.
            binding, feeds = self.session.ort.io_binding(), []
            for value in self.session.ort.get_inputs():
                feeds.append(_new_buffer(self.session, inputs[value.name], find_kind(self.name, value)))
                feeds[-1].bind_input(binding, value.name)
            buffers = {}
            for name, value in shapes.items():
                kind = find_kind(self.name, value)
                if name == MASK:
                    buffers[name] = _new_buffer(self.session, inputs[MASK], kind)
                else:
                    inner = [self._evaluate_size(n, longest) for n in value.shape[1:]]
                    buffers[name] = Buffer(self.session, (batch, *inner), kind).drop_host()
                    buffers[name].bind_output(binding, name)
            self.session.ort.run_with_iobinding(binding, self.session.new_run_options())
        return EncodedSources(self.session, buffers, np.arange(batch))

    def _evaluate_size(self, size: int | str, longest: int) -> int:
        """Return the `size` of an axis, an integer or a formula of the source length, for sources of `longest` tokens,
        samples or frames. Raises WeftError when a sound is too short or too long for the model."""
        if isinstance(size, int):
            return size
        formula = sizes.parse(size)
        count = sizes.evaluate(formula, dict.fromkeys(sizes.list_names(formula), longest))
        if self.facts.sound is not None and not 0 < count <= self.facts.max_source:
            remedy = "use a longer sound" if count <= 0 else "cut it, or compile with a larger --max-length"
            raise WeftError(
                f"a prompt of {longest} samples has {max(count, 0)} frames, but the model takes 1 to "
                f"{self.facts.max_source}: {remedy}"
            )
        return count


def _new_buffer(session: Session, values: NDArray[Any], kind: Kind) -> Buffer:
    buffer = Buffer(session, values.shape, kind)
    buffer.host[...] = values
    buffer.upload()
    return buffer
