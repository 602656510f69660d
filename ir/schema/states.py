"""States: the tensors that a node keeps between calls, as one record that passes, backends, runtimes and pictures read.

| growth | slots | a forward pass | at the start of a sequence | can drop tokens | copied when beams reorder |
|---|---|---|---|---|---|
| text | position p in slot p | writes the new tokens | stays: masked beyond the length | yes | slots in use |
| window | position p in slot p mod capacity | overwrites old positions | stays | no | all slots |
| constant | none | replaces the state | `initial`, mostly zeros | no | the full state |
| source | tokens of an encoded source | only reads it | computed again | yes | with the source |
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
        """Return whether the state sums over all tokens; it is then f32: bf16 and f16 would lose small terms."""
        return self in (StateKind.SSM, StateKind.RECURRENT, StateKind.NORM, StateKind.SCAN)


class Growth(enum.Enum):
    """The growth of a state, which determines how it is indexed, reset and reordered: see the table of the module."""

    TEXT = "text"
    WINDOW = "window"
    CONSTANT = "constant"
    SOURCE = "source"

    @property
    def can_rewind(self) -> bool:
        """Return whether a batch row can drop its last tokens."""
        return self in (Growth.TEXT, Growth.SOURCE)


@dataclass(frozen=True)
class StateSpec:
    """One state of a node: a tensor whose first axis is the batch.

    `type` is the type of the state; for a cache that the node does not take yet, its type with `capacity` slots.
    `window` is the number of tokens, itself included, that a query of the attention sees, rolling or not; `initial` is
    the value of all elements of a state of constant size at the start of a sequence.
    """

    part: str  # its name among the states of a node
    kind: StateKind
    growth: Growth
    past_operand: str  # the operand that receives the past state
    present_output: str  # the output with the new state; "" if calls do not change it
    type: TensorType
    slots: int | None = None  # the axis that counts slots
    positions: str = ""  # the operand with the positions of the new tokens
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
    """Return the spec of a state [batch, *row] of constant size, taken as past`suffix`, returned as present`suffix`.

    `like` is the type of an operand with the batch axis; `part` defaults to the name of `kind`.
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
    window: int | None = None,
    bits: int | None = None,
    kind: StateKind | None = None,
) -> tuple[StateSpec, ...]:
    """Return the specs of the caches [batch, heads, capacity, width] of a causal attention: keys, and values if any.

    k and v [batch, keys, heads · width] are those of the new tokens (v None: keys serve as values), `past` is the key
    cache that the node takes. With `bits`, caches hold codes. `kind` overrides the kind, such as INDEX.
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


def list_cross_specs(k: TensorType, v: TensorType | None) -> tuple[StateSpec, ...]:
    """Return the specs of cached keys and values k, v [batch, source, width] of a source, which every step reads."""
    parts = (("key", "k", k), ("value", "v", v))
    return tuple(
        StateSpec(part, StateKind.CROSS, Growth.SOURCE, operand, "", type, slots=1)
        for part, operand, type in parts
        if type is not None
    )
