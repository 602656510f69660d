"""Specs of states: the tensors that a node keeps between forward passes (KV caches, recurrent states).

| growth | slots | a forward pass | for a new sequence | can drop tokens | copied when beams reorder |
|---|---|---|---|---|---|
| text | position p in slot p | writes the new tokens | not cleared: old slots are masked | yes | slots in use |
| append | one per past token | returns a longer cache | empty | yes | all slots |
| window | p in slot p mod capacity (if keep_first is 0) | overwrites old positions | not cleared | no | all slots |
| constant | none | replaces the state | reset to `initial`, mostly 0 | no | the full state |
| source | one per source token | only reads it | computed again | yes | with the source |

The source is the encoded input sequence that cross-attention reads.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..types import TensorType, dtypes, sizes
from ..types.sizes import Size

CODES = {8: dtypes.i8, 4: dtypes.i4}  # dtype of the codes in a quantized cache, by bits


class StateKind(enum.Enum):
    """The kind of a state: the meaning of its values."""

    KV = "kv"  # keys, or values, of an attention
    LATENT = "latent"  # keys that also serve as values
    INDEX = "index"  # keys by which a query chooses the keys that it attends to
    CONV = "conv"  # the last input rows of a convolution
    SSM = "ssm"  # the state of a state space
    RECURRENT = "recurrent"  # linear attention: the sum of outer products of keys and values
    NORM = "norm"  # linear attention: the sum of keys, for the denominator
    SCAN = "scan"  # the state of a user-defined recurrence
    CROSS = "cross"  # keys, or values, of an encoded source

    @property
    def accumulates(self) -> bool:
        """True if the state sums over all tokens. Such states are f32: bf16 and f16 would lose small terms."""
        return self in (StateKind.SSM, StateKind.RECURRENT, StateKind.NORM, StateKind.SCAN)


class Growth(enum.Enum):
    """The growth of a state with the sequence; the table in the module docstring has the consequences of each."""

    TEXT = "text"
    APPEND = "append"
    WINDOW = "window"
    CONSTANT = "constant"
    SOURCE = "source"

    @property
    def can_rewind(self) -> bool:
        """True if the last tokens of a batch row can be dropped from the state."""
        return self in (Growth.TEXT, Growth.APPEND, Growth.SOURCE)


@dataclass(frozen=True)
class StateSpec:
    """One state of a node: a tensor whose first axis is the batch.

    The `type` of a cache has `capacity` slots, a symbolic size, while the node lacks the past operand. `slots` is the
    axis of the slots. `window` is the number of tokens that a query attends to, its own included (None: all). `initial`
    is the value of all elements of a CONSTANT state at the start of a sequence.
    """

    part: str  # name among the states of the node, such as key
    kind: StateKind
    growth: Growth
    past_operand: str  # name of the operand with the past state
    present_output: str  # name of the output with the new state; "" if the op does not change the state
    type: TensorType
    slots: int | None = None  # the axis of the slots
    positions: str = ""  # name of the operand with the positions of the new tokens
    window: int | None = None
    initial: float = 0.0

    @property
    def row_shape(self) -> tuple[Size, ...]:
        """The shape of the state without the batch axis."""
        return self.type.shape[1:]

    @property
    def slot_shape(self) -> tuple[Size, ...]:
        """The shape of the state without the axes of batch and slots."""
        return tuple(s for axis, s in enumerate(self.type.shape) if axis not in (0, self.slots))


def build_fixed_size_spec(kind: StateKind, like: TensorType, *row: Size, part: str = "", suffix: str = "") -> StateSpec:
    """Return the spec of a CONSTANT state [batch, *row]: operand ``past`` + suffix, output ``present`` + suffix.

    The batch size is that of `like`, as is the dtype unless `kind` accumulates (f32). `part` defaults to the name of
    `kind`.
    """
    dtype = dtypes.f32 if kind.accumulates else like.dtype
    type = like.with_dtype(dtype).with_shape(like.shape[0], *row)
    return StateSpec(part or kind.value, kind, Growth.CONSTANT, f"past{suffix}", f"present{suffix}", type)


def list_cache_specs(
    k: TensorType,
    v: TensorType | None,
    past: TensorType | None,
    heads: int,
    *,
    rolling: bool = False,
    appends: bool = False,
    window: int | None = None,
    bits: int | None = None,
    kind: StateKind | None = None,
) -> tuple[StateSpec, ...]:
    """Return the specs of the KV caches [batch, heads, capacity, width] of causal attention: of keys, then of values.

    k and v [batch, seq, heads · width] are the types for new tokens (v None: no value cache). `past` is the type of the
    key cache operand, None if the node has none. Growth is WINDOW if `rolling`, APPEND if the call `appends` to `past`,
    else TEXT. With `bits` caches store integer codes. `kind` defaults to KV, or to LATENT without v.
    """
    kind = kind or (StateKind.LATENT if v is None else StateKind.KV)
    growth = Growth.WINDOW if rolling else Growth.APPEND if appends and past is not None else Growth.TEXT
    capacity = sizes.sym("capacity") if past is None else past.shape[2]

    def cache(part: str, fresh: TensorType) -> StateSpec:
        type = fresh.with_shape(fresh.shape[0], heads, capacity, sizes.floordiv(fresh.shape[2], heads))
        type = type if bits is None else type.with_dtype(CODES[bits])
        names = f"past_{part[0]}", f"present_{part[0]}"
        return StateSpec(part, kind, growth, *names, type, slots=2, positions="positions", window=window)

    return (cache("key", k),) if v is None else (cache("key", k), cache("value", v))


def list_cross_specs(k: TensorType, v: TensorType | None) -> tuple[StateSpec, ...]:
    """Return the specs of the two states of cross-attention, its operands k and v [batch, source, width], which are
    constant while decoding (v None: only k)."""
    parts = (("key", "k", k), ("value", "v", v))
    return tuple(
        StateSpec(part, StateKind.CROSS, Growth.SOURCE, operand, "", type, slots=1)
        for part, operand, type in parts
        if type is not None
    )
