"""Targets: where a compiled model runs, as facts. Model code never asks about them; lowerings do."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from weft.ir.errors import WeftError


@dataclass(frozen=True)
class Target:
    """A place to run: `device`, the float dtypes it computes in (by name, best first), ONNX operator sets.

    `contrib` tells whether ONNX Runtime's own operators (com.microsoft) may be used beside opset `opset`; `slower`
    names passes of the default pipeline that do not pay here, `phases` its phases that apply, all where empty;
    `keep_blocks` (head, all) asks for weights in the quantized blocks that the checkpoint stores, where a kernel takes
    them.
    """

    name: str
    doc: str
    device: str
    dtypes: tuple[str, ...]
    contrib: bool
    opset: int = 24
    ir_version: int = 11
    slower: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    keep_blocks: str = ""


TARGETS = {
    t.name: t
    for t in (
        # On a CPU cutting a packed gate/up product apart copies it: 2 to 5 % of a prefill.
        Target("ort-cpu", "ONNX Runtime on a CPU", "cpu", ("f32", "f16"), contrib=True, slower=("pack-gate-up",)),
        Target("ort-cuda", "ONNX Runtime on an NVIDIA GPU", "cuda", ("f16", "bf16"), contrib=True),
        Target("onnx", "any ONNX runtime: standard operators of opset 24 only", "cpu", ("f32", "f16", "bf16"), False),
        # Its source reads as the architecture does, and keeps what later calls need by itself: no fusions, no caches.
        Target(
            "torch", "PyTorch source to read, CPU or GPU", "any", ("f32", "bf16", "f16"), False, phases=("simplify",)
        ),
    )
}


def find_target(name: str) -> Target:
    """The target called `name`.

    Raises:
        WeftError: if there is none.
    """
    if name not in TARGETS:
        near = difflib.get_close_matches(name, TARGETS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise WeftError(f"unknown target {name!r}; {hint}known are {', '.join(TARGETS)}")
    return TARGETS[name]
