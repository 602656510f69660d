"""Every kernel at shapes of real models: its time, beside plain torch, its peers, and what the card allows.

A case says which bytes must move and how many operations there are; `of_copy` and `of_read` are those bytes over the
time, divided by what copying and reading reach in this run, `of_product` the operations by what a bf16 product reaches.
Before it is timed, a kernel's result is compared with its reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product as combinations
from types import ModuleType
from typing import Any

import torch
from gpu_cases import Case, cases
from gpu_rivals import rival
from gpu_run import Run, Work, cycled, microseconds
from torch import Tensor

CALLS = 32  # of a kernel in one CUDA graph, at least
SAME = 0.1  # relative error of what computes the same, in bf16
LONG = 2e-3  # seconds: what takes longer is timed by itself


def module(name: str) -> ModuleType:
    """A kernel file, or one that kernels share, by name.

    Raises:
        ModuleNotFoundError: there is none.
    """
    package = "weft.backends.torch.kernels"
    shared = find_spec(f"{package}.shared.{name}") is not None
    return import_module(f"{package}.shared.{name}" if shared else f"{package}.{name}")


@contextmanager
def configured(kernel: ModuleType, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The launcher's keywords of an alternative, while its other settings hold.

    "file.NAME" is a constant of a kernel file, "warps" and "stages" are those of the launch, any other name is a
    keyword of the launcher.
    """
    keywords, undo = {}, list[Callable[[], None]]()
    launch = {name: settings[name] for name in ("warps", "stages") if name in settings}

    def put(where: ModuleType, name: str, value: Any) -> None:
        undo.append(partial(setattr, where, name, getattr(where, name)))
        setattr(where, name, value)

    for name, value in settings.items():
        if "." in name:
            file, _, constant = name.partition(".")
            put(module(file), constant, value)
        elif name not in launch:
            keywords[name] = value
    if launch:
        options = kernel.options
        put(kernel, "options", lambda x, *_, **__: options(x, **launch))
    try:
        yield keywords
    finally:
        for back in reversed(undo):
            back()


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


def timed(run: Run, works: Sequence[Work], least: float = 2e-3) -> dict[str, Any]:
    """Microseconds of a call: in a CUDA graph of many, or by itself where it is long or waits for the device."""
    works[0]()  # compiles
    if run.clock.once(works[0]) < LONG:
        try:
            return {"us": microseconds(run.clock.graph(cycled(works, CALLS if run.cuda else 1), least))}
        except RuntimeError:  # it cannot be captured
            run.clock.wait()
    return {"us": microseconds(run.clock.calls(works[-1])), "timed": "by itself"}


def ratios(run: Run, case: Case, seconds: float) -> dict[str, Any]:
    """What a time is of what the card can do."""
    found: dict[str, Any] = {}
    if case.size:
        rate = case.size / seconds / 1e9
        found = {
            "gb_per_s": round(rate, 1),
            "of_copy": run.share(rate, "copy", "gb_per_s"),
            "of_read": run.share(rate, "read", "gb_per_s"),
        }
    if case.flops:
        rate = case.flops / seconds / 1e12
        found |= {"tflop_per_s": round(rate, 1), "of_product": run.share(rate, "product", "tflop_per_s")}
    return found


def measured(run: Run, case: Case) -> dict[str, Any]:
    """The kernel, its reference, and its peers on the same inputs."""
    kernel = module(case.kernel)
    launcher, reference = functions(kernel, case)
    fresh = partial(case.checked, run.device)
    want = fresh().wide().call(reference)
    wrong = error(fresh().launch(launcher), want)
    sets = run.clock.rotation(partial(case.make, run.device), case.size)
    found = timed(run, [partial(inputs.launch, launcher) for inputs in sets])
    found |= {
        "relative_error": float(f"{wrong:.3g}"),
        "bytes": case.size,
        "flops": case.flops,
        **ratios(run, case, found["us"]["median"] / 1e6),
    }
    peers = (*(() if case.small else ("reference",)), *case.rivals)
    for name in () if run.quick else peers:
        other = reference if name == "reference" else rival(name, reference)
        found[name] = versus(run, [partial(inputs.call, other) for inputs in sets], partial(fresh().call, other), want)
    best = [found[name]["us"]["median"] for name in peers if found.get(name, {}).get("relative_error", 1) < SAME]
    return found | ({"speedup": round(min(best) / found["us"]["median"], 3)} if best else {})


def functions(kernel: ModuleType, case: Case) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The launcher of a case and its reference."""
    return getattr(kernel, case.kernel), kernel.reference


def versus(run: Run, works: Sequence[Work], once: Work, want: Any) -> dict[str, Any]:
    """A peer's time, and how far it is from the reference."""
    try:
        return {"relative_error": float(f"{error(once(), want):.3g}"), **timed(run, works)}
    except Exception as failure:  # a peer that has nothing for this case: said in the result
        return {"error": f"{type(failure).__name__}: {failure}"[:300]}


def swept(run: Run, case: Case) -> dict[str, Any]:
    """Microseconds of every combination of the settings that the case offers, and the best of them."""
    kernel = module(case.kernel)
    launcher, _ = functions(kernel, case)
    sets = run.clock.rotation(partial(case.make, run.device), case.size)
    times: dict[str, float] = {}
    failed: dict[str, str] = {}
    for values in [(), *combinations(*case.sweep.values())]:  # none: as it ships
        settings = dict(zip(case.sweep, values, strict=False))
        label = " ".join(f"{name}={value}" for name, value in settings.items()) or "as it ships"
        if run.cuda and run.left() < 5:
            failed[label] = "not run"
            continue
        try:
            with configured(kernel, settings) as keywords:
                works = [partial(inputs.launch, launcher, **keywords) for inputs in sets]
                times[label] = timed(run, works, 1e-3)["us"]["median"]
        except Exception as failure:  # does not compile, or does not fit: said in the result
            failed[label] = f"{type(failure).__name__}: {failure}"[:120]
    best = min(times, key=lambda label: times[label])
    return {"best": best, "best_us": times[best], "us": times.get("as it ships"), "all_us": times, "failed": failed}


@torch.no_grad()
def kernels(run: Run) -> None:
    """Every case of every kernel, or with --sweep its configurations."""
    stage = "sweep" if run.args.sweep else "kernels"
    run.begin(stage)
    for case in cases(run.cuda):
        name = f"{case.kernel}.{case.name}"
        if stage == "kernels":
            run.measure(stage, name, partial(measured, run, case), 3 if run.quick else 12)
        elif case.sweep:
            run.measure(stage, name, partial(swept, run, case), 10)
