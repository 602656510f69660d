"""The encoder of an encoder-decoder: it computes the keys and values of cross-attention from sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.ir.errors import WeftError
from weft.ir.types import sizes

from ...folder_facts import Sound
from ..arrays import Ints
from ..text.encoder_inputs import IDS, MASK, encoder_inputs
from .buffers import Buffer, Kind, kind_of
from .session import Session, convert_errors


class EncodedSources:
    """The encoded sources of a batch: cross-attention keys and values. Batch row r attends to source `of[r]`."""

    def __init__(self, session: Session, buffers: Mapping[str, Buffer], of: Ints) -> None:
        self._session, self._buffers, self.of = session, buffers, of

    def bind(self, binding: Any, first: int = 0, rows: int | None = None) -> None:
        """Bind `rows` batch rows (default: all) from `first` on as inputs of the decoder."""
        for name, buffer in self._buffers.items():
            buffer.bind_input(binding, name, first, rows)

    @classmethod
    def join(cls, readings: Sequence[EncodedSources]) -> EncodedSources:
        """Return `readings`, each of one batch row, joined into one batch and zero-padded to the longest source."""
        session, buffers = readings[0]._session, {}
        for name, buffer in readings[0]._buffers.items():
            parts = [reading._buffers[name].pull() for reading in readings]
            longest = max(part.shape[1] for part in parts)
            ends = [[(0, 0), (0, longest - part.shape[1]), *[(0, 0)] * (part.ndim - 2)] for part in parts]
            values = np.concatenate([np.pad(part, end) for part, end in zip(parts, ends, strict=True)])
            buffers[name] = _new_buffer(session, values, (buffer.onnx_type, values.dtype.type)).drop_host()
        return cls(session, buffers, np.arange(len(readings)))

    def gather(self, rows: Ints) -> EncodedSources:
        """Return a copy whose batch row r is row `rows[r]` of `self`; `self` if no row changes its source."""
        of = self.of[rows]
        if np.array_equal(of, self.of):
            return self
        buffers = {}
        for name, buffer in self._buffers.items():
            values = buffer.pull()[rows]
            buffers[name] = _new_buffer(self._session, values, (buffer.onnx_type, values.dtype.type)).drop_host()
        return EncodedSources(self._session, buffers, of)


@dataclass(frozen=True)
class SourceEncoder:
    """An encoder graph in an open session.

    Inputs: `encoder_input_ids` or the input of `sound`, and `encoder_attention_mask` [batch, source]. Outputs: inputs
    of the decoder by the same names, such as `cross.{i}.key|value` [batch, source, width].

    Every row of the decoder begins with the token `start`. `compares`: tokens of a call compete, such as for the
    capacity of experts. Raises WeftError if the graph has other inputs.
    """

    session: Session
    start: int
    max_length: int  # of a source, in tokens or frames
    name: str = "encoder.onnx"
    compares: bool = False
    sound: Sound | None = None

    def __post_init__(self) -> None:
        inputs = [i.name for i in self.session.ort.get_inputs()]
        reads = IDS if self.sound is None else self.sound.input
        if reads not in inputs or not {*inputs} <= {reads, MASK}:
            raise WeftError(
                f"{self.name}: its inputs are {', '.join(inputs)}, so it is not the encoder of an encoder-decoder"
            )

    def gives(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of `inputs` (of a decoder graph, by name) that this encoder provides, mask included."""
        available = {MASK, *(o.name for o in self.session.ort.get_outputs())}
        return {name: value for name, value in inputs.items() if name in available}

    def read(self, sources: Sequence[Any], shapes: Mapping[str, Any]) -> EncodedSources:
        """Run the encoder on the right-padded `sources` and return the encoded batch.

        `shapes` are the decoder inputs that it provides, see `gives`. If tokens compete, each source runs separately.

        Raises:
            WeftError: if ONNX Runtime fails, or a sound has no frame or more frames than the position table.
        """
        if self.compares and len(sources) > 1:
            return EncodedSources.join([self.read([source], shapes) for source in sources])
        inputs = encoder_inputs(sources, self.sound)
        batch, longest = inputs[MASK].shape
        with convert_errors(self.name):
            # A binding holds addresses only: `feeds` keeps the buffers alive until the run ends.
            binding, feeds = self.session.ort.io_binding(), []
            for value in self.session.ort.get_inputs():
                feeds.append(_new_buffer(self.session, inputs[value.name], kind_of(self.name, value)))
                feeds[-1].bind_input(binding, value.name)
            buffers = {}
            for name, value in shapes.items():
                kind = kind_of(self.name, value)
                if name == MASK:
                    buffers[name] = _new_buffer(self.session, inputs[MASK], kind)
                else:
                    inner = [self._size(n, longest) for n in value.shape[1:]]
                    buffers[name] = Buffer(self.session, (batch, *inner), kind).drop_host()
                    buffers[name].bind_output(binding, name)
            self.session.ort.run_with_iobinding(binding, self.session.run_options())
        return EncodedSources(self.session, buffers, np.arange(batch))

    def _size(self, size: int | str, longest: int) -> int:
        """Evaluate the `size` of an axis, a formula of the graph, for sources of `longest` tokens or samples.

        Raises WeftError when a sound is too short or too long for the model.
        """
        if isinstance(size, int):
            return size
        formula = sizes.parse(size)
        count = sizes.evaluate(formula, dict.fromkeys(sizes.list_names(formula), longest))
        if self.sound is not None and not 0 < count <= self.max_length:
            remedy = "give a longer one" if count <= 0 else "cut it, or compile with another --max-length"
            raise WeftError(
                f"a prompt of {longest} samples makes {max(count, 0)} frames, but the model reads 1 to "
                f"{self.max_length}: {remedy}"
            )
        return count


def _new_buffer(session: Session, values: NDArray[Any], kind: Kind) -> Buffer:
    buffer = Buffer(session, values.shape, kind)
    buffer.host[...] = values
    buffer.push()
    return buffer
