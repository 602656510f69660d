"""Kernels in every configuration that they offer: which one is fastest at shapes of real models."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product as combinations
from math import prod
from types import ModuleType
from typing import Any

import torch
from gpu_cases import Case, cases
from gpu_clock import Clock
from gpu_kernels import functions, module, timed
from gpu_pool import Work

SHIPPED = "as it ships"


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


@torch.no_grad()
def prepared(args: Namespace, case: Case) -> Callable[[], dict[str, Any]]:
    """Compile every combination of the settings that a case offers, and return what times them."""
    launcher, _ = functions(case)
    clock, failed = Clock(args.device), dict[str, str]()
    sets = clock.rotation(partial(case.make, args.device), case.size)
    tried = {}
    for values in [(), *combinations(*case.sweep.values())]:
        settings = dict(zip(case.sweep, values, strict=False))
        label = " ".join(f"{name}={value}" for name, value in settings.items()) or SHIPPED
        try:
            with configured(module(case.kernel), settings) as keywords:
                sets[0].launch(launcher, **keywords)
            tried[label] = settings
        except Exception as failure:  # does not compile, or does not fit: said in the result
            failed[label] = f"{type(failure).__name__}: {failure}"[:120]

    @torch.no_grad()
    def measured() -> dict[str, Any]:
        times = {}
        for label, settings in tried.items():
            with configured(module(case.kernel), settings) as keywords:
                calls = [partial(inputs.launch, launcher, **keywords) for inputs in sets]
                times[label] = timed(clock, calls, 1e-3)["us"]["median"]
        best = min(times, key=lambda label: times[label])
        return {"best": best, "best_us": times[best], "us": times[SHIPPED], "all_us": times, "failed": failed}

    return measured


def works(args: Namespace) -> Iterator[Work]:
    """Every case that has alternatives."""
    for case in cases(args.device == "cuda"):
        if case.sweep:
            count = prod(map(len, case.sweep.values()))
            memory = 2 + 3 * max(case.size, 2 << 27) / 2**30
            name = f"{case.kernel}.{case.name}"
            yield Work(name, partial(prepared, args, case), 5 + 1.5 * count, 1 + 0.06 * count, memory)
