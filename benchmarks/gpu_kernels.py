"""Every kernel at shapes of real models: its time, beside plain torch, its peers, and what the card allows.

A case says which bytes must move and how many operations there are. `of_copy` and `of_read` are those bytes over the
time, divided by what copying and reading reach in this run, `of_product` the operations by what a bf16 product reaches.
Before it is timed, a kernel's result is compared with its reference's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from gpu_cases import Case, cases
from gpu_clock import Call, Clock, cycled, microseconds
from gpu_pool import Work
from gpu_rivals import rival
from torch import Tensor

CALLS = 32  # of a kernel in one CUDA graph, at least
SAME = 0.1  # relative error of what computes the same, in bf16
LONG = 2e-3  # seconds: what takes longer is timed by itself


def module(name: str) -> ModuleType:
    """A kernel file, one for prompts, or one that kernels share, by name.

    Raises:
        ModuleNotFoundError: there is none.
    """
    package = "weft.backends.torch.kernels"
    places = (f"{package}.{room}.{name}" for room in ("shared", "prompt"))
    return import_module(next((place for place in places if find_spec(place) is not None), f"{package}.{name}"))


def functions(case: Case) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The launcher of a case and its reference."""
    kernel = module(case.kernel)
    return getattr(kernel, case.kernel), kernel.reference


def error(got: Any, want: Any) -> float:
    """‖got − want‖ / ‖want‖ of the tensors in both, the worst; infinite if anything is not finite."""
    pairs = zip(_tensors(got), _tensors(want), strict=True)
    worst = 0.0
    for x, y in pairs:
        x, y = x.double(), y.double()
        worst = max(worst, float((x - y).norm() / y.norm().clamp(min=1e-30)) if x.isfinite().all() else float("inf"))
    return worst


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [t for part in found if part is not None for t in _tensors(part)]


def timed(clock: Clock, calls: Sequence[Call], least: float = 2e-3) -> dict[str, Any]:
    """Microseconds of a call: in a CUDA graph of many, or by itself where it is long or waits for the device."""
    if clock.once(calls[0]) < LONG:
        try:
            return {"us": microseconds(clock.graph(cycled(calls, CALLS if clock.cuda else 1), least))}
        except RuntimeError:  # it cannot be captured
            clock.wait()
    return {"us": microseconds(clock.calls(calls[-1])), "timed": "by itself"}


@torch.no_grad()
def prepared(args: Namespace, case: Case) -> Callable[[], dict[str, Any]]:
    """Compile the kernel and its peers, compare all with the reference, and return what times them."""
    clock = Clock(args.device)
    launcher, reference = functions(case)
    fresh = partial(case.checked, args.device)
    want = fresh().wide().call(reference)
    found: dict[str, Any] = {"relative_error": _rounded(error(fresh().launch(launcher), want)), "bytes": case.size}
    sets = clock.rotation(partial(case.make, args.device), case.size)
    contenders: dict[str, list[Call]] = {}
    for name in () if args.quick else (*(() if case.small else ("reference",)), *case.rivals):
        other = reference if name == "reference" else rival(name, reference, tuned=args.slow)
        try:
            found[name] = {"relative_error": _rounded(error(fresh().call(other), want))}
            contenders[name] = [partial(inputs.call, other) for inputs in sets]
            contenders[name][0]()  # compiles
        except Exception as failure:  # a peer that has nothing for this case: said in the result
            found[name] = {"error": f"{type(failure).__name__}: {failure}"[:300]}
            contenders.pop(name, None)
    own = [partial(inputs.launch, launcher) for inputs in sets]
    own[0]()
    del want
    return partial(_timed_beside, clock, case, found, own, contenders)


@torch.no_grad()
def _timed_beside(
    clock: Clock, case: Case, found: dict[str, Any], own: Sequence[Call], contenders: dict[str, list[Call]]
) -> dict[str, Any]:
    found |= timed(clock, own)
    seconds = found["us"]["median"] / 1e6
    if case.size:
        found["gb_per_s"] = round(case.size / seconds / 1e9, 1)
    if case.flops:
        found["tflop_per_s"] = round(case.flops / seconds / 1e12, 1)
    best = []
    for name, calls in contenders.items():
        try:
            found[name] |= timed(clock, calls)
        except RuntimeError as failure:
            found[name]["error"] = f"{type(failure).__name__}: {failure}"[:300]
        else:
            best += [found[name]["us"]["median"]] * (found[name]["relative_error"] < SAME)
    return found | ({"speedup": round(min(best) / found["us"]["median"], 3)} if best else {})


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def works(args: Namespace) -> Iterator[Work]:
    """Every case of every kernel."""
    for case in cases(args.device == "cuda"):
        alone = 0.5 * (2 + len(case.rivals)) + (4 if case.small else 0)
        seconds = 5 + 6 * len(case.rivals) * (1 + 2 * args.slow)
        memory = 3 + 3 * max(case.size, 2 << 27) / 2**30
        yield Work(f"{case.kernel}.{case.name}", partial(prepared, args, case), seconds, alone, memory)
