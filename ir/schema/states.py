"""States: the tensors that a node keeps between calls, as one record that passes, backends, runtimes and pictures read.

| growth | slots | a call | at the start of a sequence | rewinds | rows of beams |
|---|---|---|---|---|---|
| text | position p in slot p | writes its tokens | stays: no row looks beyond its length | yes | slots in use |
| window | position p in slot p mod capacity | overwrites old ones | stays | no | all slots |
| constant | none | replaces all of it | `initial`, mostly zeros | no | all of it |
| source | tokens of an encoded source | reads it | computed again | yes | follow their source |
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
    RECURRENT = "recurrent"  # the sum of keys times values of linear attention
    NORM = "norm"  # the sum of keys that its result is divided by
    SCAN = "scan"  # the state of a user-defined recurrence
    CROSS = "cross"  # keys, or values, of an encoded source

    @property
    def accumulates(self) -> bool:
        """Return whether the state sums over all tokens: such sums are f32, as 8 or 11 bits lose thousands of terms."""
        return self in (StateKind.SSM, StateKind.RECURRENT, StateKind.NORM, StateKind.SCAN)


class Growth(enum.Enum):
    """The growth of a state, which determines how it is indexed, reset and gathered: see the table of the module."""

    TEXT = "text"
    WINDOW = "window"
    CONSTANT = "constant"
    SOURCE = "source"

    @property
    def rewinds(self) -> bool:
        """Return whether a batch row can drop its last tokens."""
        return self in (Growth.TEXT, Growth.SOURCE)


@dataclass(frozen=True)
class StateSpec:
    """One state of a call of an op: a tensor whose first axis is the batch.

    `type` is the type of the state; for a cache that the node does not take yet, the type it would have with `capacity`
    slots. `window` is the number of tokens that an attention looks back, whether or not its cache rolls; `initial`
    fills a state of constant size at the start of a sequence.
    """

    part: str  # its name among the states of a node
    kind: StateKind
    growth: Growth
    taken: str  # the operand that receives the past state
    made: str  # the output with the new state; "" if calls do not change it
    type: TensorType
    slots: int | None = None  # the axis that counts slots
    positions: str = ""  # the operand with the slots of the tokens of the call
    window: int | None = None
    initial: float = 0.0

    @property
    def row(self) -> tuple[Size, ...]:
        """The shape of one batch row of the state."""
        return self.type.shape[1:]

    @property
    def per_slot(self) -> tuple[Size, ...]:
        """The shape of one slot of one batch row, or of the row where the state has no slots."""
        return tuple(s for axis, s in enumerate(self.type.shape) if axis not in (0, self.slots))


def fixed_size_state(kind: StateKind, like: TensorType, *row: Size, part: str = "", suffix: str = "") -> StateSpec:
    """Return a state [batch, *row] of constant size, from operand past to output present; `like` has the batch."""
    dtype = dtypes.f32 if kind.accumulates else like.dtype
    type = like.with_dtype(dtype).with_shape(like.shape[0], *row)
    return StateSpec(part or kind.value, kind, Growth.CONSTANT, f"past{suffix}", f"present{suffix}", type)


def caches(
    k: TensorType,
    v: TensorType | None,
    past: TensorType | None,
    heads: int,
    *,
    rolling: bool = False,
    window: int | None = None,
    bits: int | None = None,
    kind: StateKind | None = None,
) -> tuple[StateSpec, ...]:
    """Return the caches [batch, heads, capacity, width] of a causal attention, only of keys if these serve as values.

    k and v [batch, keys, heads · width] belong to a call (v is None if keys serve as values), `past` is the key cache
    that the node takes. With `bits` caches hold codes. `kind` is for keys with another use.
    """
    kind = kind or (StateKind.LATENT if v is None else StateKind.KV)
    growth = Growth.WINDOW if rolling else Growth.TEXT
    capacity = sizes.sym("capacity") if past is None else past.shape[2]

    def cache(part: str, fresh: TensorType) -> StateSpec:
        type = fresh.with_shape(fresh.shape[0], heads, capacity, sizes.floordiv(fresh.shape[2], heads))
        type = type if bits is None else type.with_dtype(CODES[bits])
        names = f"past_{part[0]}", f"present_{part[0]}"
        return StateSpec(part, kind, growth, *names, type, slots=2, positions="positions", window=window)

    return (cache("key", k),) if v is None else (cache("key", k), cache("value", v))


def cross_states(k: TensorType, v: TensorType | None) -> tuple[StateSpec, ...]:
    """Return states for keys and values [batch, source, width] of an encoded source, which every call reads again."""
    parts = (("key", "k", k), ("value", "v", v))
    return tuple(
        StateSpec(part, StateKind.CROSS, Growth.SOURCE, operand, "", type, slots=1)
        for part, operand, type in parts
        if type is not None
    )
