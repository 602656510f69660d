"""FLOPs and memory traffic of operations, for a prefill and for a decode step; peaks of devices for the roofline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from weft.ir import Node
from weft.ir.types import TensorType, dtypes, sizes
from weft.ir.types.sizes import Atom, Monomial, Poly, Size
from weft.passes.analysis.costs import count_state_bytes, find_cache_sizes
from weft.passes.analysis.states import find_cache_owner, has_state

TOKENS = "seq"  # the size that grows by one with every token
MODEL = (dtypes.f32, dtypes.f16, dtypes.bf16)  # interchangeable dtypes of a model


@dataclass(frozen=True)
class Work:
    """FLOPs and memory traffic, as polynomials over the sizes batch, seq and source.

    `read` and `written` are numbers of elements in the model's dtype, which may be chosen later. `read_bytes` and
    `written_bytes` are bytes of other tensors (token ids, masks, packed weights, sums of recurrences).
    """

    flops: Size = 0
    read: Size = 0
    written: Size = 0
    read_bytes: Size = 0
    written_bytes: Size = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def evaluate(self, binding: Mapping[str, int], item: int) -> dict[str, int]:
        """Return FLOPs and bytes for the sizes in `binding` and elements of `item` bytes."""
        at = {f.name: sizes.evaluate(getattr(self, f.name), binding) for f in fields(self)}
        read, written = (at[name] * item + at[f"{name}_bytes"] for name in ("read", "written"))
        return {"flops": at["flops"], "read": read, "written": written}


NONE = Work()


def sum_work(works: Iterable[Work]) -> Work:
    """Return the sum of `works`."""
    terms = [work for work in works if work != NONE]
    return Work(*(sizes.sum_sizes(getattr(work, f.name) for work in terms) for f in fields(Work)))


def compute_work(node: Node) -> Work:
    """Return the work of `node` in a prefill of all tokens."""
    operands = [None if v is None else v.type for v in node.inputs]
    outputs = [v.type for v in node.outputs]

    def cost(dtype: dtypes.DType) -> tuple[Size, Size, Size]:
        def cast_type(t: TensorType | None) -> TensorType | None:
            return t.with_dtype(dtype) if t is not None and t.dtype in MODEL else t

        price = node.op.cost_of(list(map(cast_type, operands)), [cast_type(t) or t for t in outputs], node.attrs)
        return price.flops, price.read, price.written

    (flops, read, written), (_, wide_read, wide_written) = cost(dtypes.f16), cost(dtypes.f32)
    reads, writes = sizes.floordiv(wide_read - read, 2), sizes.floordiv(wide_written - written, 2)
    return Work(flops, reads, writes, read - reads * 2, written - writes * 2)


def compute_step_work(work: Work, node: Node) -> Work:
    """Return the work of a decode step of `node`, given its prefill `work`; `seq` is the length with the new token.

    Weights are read once; keys and values (of the window, if any) are read from a cache, the new ones are written to
    it; states are read and written. Operations whose work does not grow with the sequence (encoders) do not run again.
    """
    if not any(TOKENS in sizes.list_names(getattr(work, f.name)) for f in fields(work)):
        return NONE
    total = Work(*(_divide_by_tokens(getattr(work, f.name)) for f in fields(work)))
    if has_state(node):
        return total  # a cache or a state is among its operands
    length, batch = sizes.sym(TOKENS), sizes.sym("batch")
    first = find_cache_owner(node)
    for width, window in find_cache_sizes([first]):
        keys = length if window is None else sizes.minimum(window, length)
        total += Work(0, keys * width * batch, batch * width if first is node else 0)
    elements, fixed = measure_state(node)
    return total + Work(0, batch * elements, batch * elements, batch * fixed, batch * fixed)


def measure_state(node: Node) -> tuple[int, int]:
    """Return the size of a recurrence's state: elements in the model's dtype, and bytes in other dtypes."""
    fixed = count_state_bytes([node], 0)
    return count_state_bytes([node], 1) - fixed, fixed


def _divide_by_tokens(size: Size) -> Size:
    """Return the share of one token in `size`, a sum over `seq` tokens: drop one factor `seq` from every term. A term
    with `seq` only inside min, max or a division (such as the number of experts used) is evaluated for seq = 1."""
    if not isinstance(size, Poly):
        return size
    total: Size = 0
    for mono, coefficient in size.terms:
        powers = dict(mono)
        if TOKENS in powers:
            powers[TOKENS] -= 1
            total = total + _make_term(powers, coefficient)
        else:
            total = total + sizes.substitute(_make_term(powers, coefficient), {TOKENS: 1})
    return total


def _make_term(powers: dict[Atom, int], coefficient: int) -> Size:
    mono: Monomial = tuple((atom, power) for atom, power in powers.items() if power)
    return Poly(((mono, coefficient),)) if mono else coefficient


# -- the roofline

DTYPES = {"f16": 2, "bf16": 2, "f32": 4}  # bytes per element
SHOWN_TOKENS = 512  # sequence length, as in `weft inspect`


@dataclass(frozen=True)
class Device:
    """A device for the roofline (Williams 2009): FLOP/s in f16 or bf16 (`half`) and f32 (`single`), memory bytes/s."""

    name: str
    half: float
    single: float
    memory: float

    def rate(self, dtype: str) -> float:
        """Return the peak FLOP/s of the device in `dtype`, one of `DTYPES`."""
        return self.single if dtype == "f32" else self.half


# Dense peaks and bandwidths from data sheets:
# H100, H200    NVIDIA H100 and H200 Tensor Core GPU data sheets, SXM: half of the f16 and bf16 peaks with sparsity
# A100          NVIDIA A100 80 GB data sheet, SXM
# RTX 4090      NVIDIA Ada GPU Architecture white paper, appendix A: tensor cores that add up in f32
# Laptop CPU    AMD Ryzen 7 7840U: 8 cores at 3.3 GHz, each two fused multiply-adds of 256 bits a cycle (32 FLOPs in
#               f32, double in bf16 by AVX512_BF16); 128 bits of LPDDR5X-7500
# f32 is the rate of the ordinary units, not TF32. Real programs reach less: about 0.8 of the FLOPs in large products
# and 0.9 of the bytes.
DEVICES = (
    Device("H100", 989.5e12, 67e12, 3.35e12),
    Device("H200", 989.5e12, 67e12, 4.8e12),
    Device("A100", 312e12, 19.5e12, 2.039e12),
    Device("RTX 4090", 165.2e12, 82.6e12, 1.008e12),
    Device("Laptop CPU", 1.69e12, 0.845e12, 0.12e12),
)


def list_devices() -> dict[str, Any]:
    """Return the JSON data of the roofline: default tokens, bytes per dtype, and peaks of each device."""
    return {
        "tokens": SHOWN_TOKENS,
        "dtypes": DTYPES,
        "devices": {d.name: {"rates": {t: d.rate(t) for t in DTYPES}, "memory": d.memory} for d in DEVICES},
    }
