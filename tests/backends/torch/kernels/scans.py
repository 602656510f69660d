"""Kernels that are generated for recurrences of one's own, as functions.

As a script it compiles some for an H200 that is not there, and prints as JSON what the machine code is like: Triton
must be imported without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from weft import MLSTM, RGLRU, Block, Decoder, RWKV7TimeMix, RWKVTimeMix
from weft.backends.torch.decode.ops.scan_kernel import TEXTS, ScanKernel, ScanKernelWriter
from weft.backends.torch.package.module import run_source
from weft.frontends.dsl import building, scan
from weft.ir import Graph, TensorType, Value, dtypes, ops
from weft.ir.graph.step import Step
from weft.ir.types import sizes

HEAD = """from weft.backends.torch.kernels.shared.activation import activate
from weft.backends.torch.kernels.shared.launch import jit, start_next, tl, wait_for_previous
from weft.backends.torch.kernels.shared.recurrence import softplus


"""
MIXERS = {  # and the width of a model: RecurrentGemma 2B, RWKV-4 7B, RWKV-7 2.9B, xLSTM 7B
    "RG-LRU": (RGLRU(10, 2560), 2560),
    "RWKV-4": (RWKVTimeMix(), 4096),
    "RWKV-7": (RWKV7TimeMix(40, keep_values="v"), 2560),
    "mLSTM": (MLSTM(8), 4096),
}


def written(step: Step) -> tuple[Any, ScanKernel]:
    """The kernel of `step` as it is launched, and what is known of it."""
    found = ScanKernelWriter(step).write()
    return run_source(f"{HEAD}{found.text.replace('{name}', 'step_kernel')}\n").step_kernel, found


def every_op(h: Value, x: Value) -> tuple[Value, Value]:
    """A step of a state h and a token x, with each elementwise op that kernels have and some others."""
    y = ops.gelu(x) + ops.gelu(x, approximate="tanh") + ops.swish(x, beta=2.0) + ops.relu2(x) + ops.tanh(h)
    y = y + ops.clip(h, low=-0.5, high=0.5) + ops.affine(x, by=0.0, plus=2.0) + ops.cast(x < h, to=dtypes.f32)
    for name in sorted(TEXTS):
        op = getattr(ops, name)
        values = [h, x, y][-len(op.operands) :]
        if name == "where" or name.startswith("logical"):
            values = [values[0] < 0.5, *values[1:]] if name == "where" else [v < 0.5 for v in values]
        made = op(*values)
        y = y + (ops.cast(made, to=dtypes.f32) if made.type.dtype == dtypes.bool_ else made)
    y = (
        y
        + ops.sum(y, axes=(2,), keepdims=True)
        + ops.max(h, axes=(2,), keepdims=True)
        + ops.mean(h * x, axes=(2,), keepdims=True)
    )
    return y - ops.min(y, axes=(2,), keepdims=True), y


def step_of(graph: Graph) -> Step:
    """The step of the first recurrence of `graph`."""
    step: Step = next(node.attrs["step"] for node in graph.nodes if node.op is ops.scan)
    return step


def steps() -> dict[str, Step]:
    """Steps of mixers, and one of every op, by name."""
    found = {name: step_of(Decoder(100, dim, 1, Block(mixer)).graph()) for name, (mixer, dim) in MIXERS.items()}
    with building(Graph("own")) as graph:
        x = graph.add_input("x", TensorType(dtypes.f32, (sizes.sym("batch"), sizes.sym("seq"), 48, 40)))
        scan(every_op, x, state=(48, 40))
    return {**found, "every op": step_of(graph)}


def main() -> None:
    """Print the facts of the kernel of each step by its name."""
    from offline import facts  # beside this script
    from variants.form import BF16, variant

    made = {}
    for name, step in steps().items():
        kernel, found = written(step)
        states = dict.fromkeys((f"{state}_ptr" for state in step.states), "*fp32")
        rows = " ".join(f"{token}_row" for token in step.tokens)
        made[name] = facts(variant(kernel, BF16, {"BLOCK": found.block}, rows=rows, types=states))
    json.dump(made, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
