"""Kernels that are generated for recurrences of one's own, as functions.

As a script it compiles some for an H200 that is not there, and prints as JSON what the machine code is like: Triton
must be imported without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from weft import MLSTM, RGLRU, Block, Decoder, RWKV7TimeMix, RWKVTimeMix
from weft.backends.torch.decode.kernels.scan_kernel import ScanKernel, scan_kernel
from weft.backends.torch.kernels.shared.launch import BF16, variant
from weft.backends.torch.package.module import run_source
from weft.ir import ops
from weft.ir.graph.step import Step

HEAD = """from weft.backends.torch.kernels.shared.activation import activate
from weft.backends.torch.kernels.shared.launch import jit, start_next, tl, wait
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
    found = scan_kernel(step)
    return run_source(f"{HEAD}{found.text.replace('{name}', 'step_kernel')}\n").step_kernel, found


def main() -> None:
    """Print the facts of the kernel of each mixer by its name."""
    from offline import facts  # beside this script

    made = {}
    for name, (mixer, width) in MIXERS.items():
        graph = Decoder(100, width, 1, Block(mixer)).graph()
        step = next(node.attrs["step"] for node in graph.nodes if node.op is ops.scan)
        kernel, found = written(step)
        states = dict.fromkeys((f"{state}_ptr" for state in step.states), "*fp32")
        rows = " ".join(f"{token}_row" for token in step.tokens)
        made[name] = facts(variant(kernel, BF16, {"BLOCK": found.block}, rows=rows, types=states))
    json.dump(made, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
