"""Every kernel on a GPU at odd shapes: its reference in float64, poisoned memory, repeats, graphs, dependent launch.

What a kernel computes is tested where its tests are, which run compiled on a GPU too. Here is what only a GPU can get
wrong: memory that nothing wrote, a race that shows now and then, a launch that a graph does not hold, a kernel that
reads before the one ahead of it has written.

Needs no pytest: `python benchmarks/gpu tests --only tests/kernels` runs all side by side. With --device cpu kernels
run in Triton's interpreter, without graphs; that much checks the checks themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from chosen import DEVICE
from gpu.kernel_inputs import Draw, Inputs
from kernel_cases import CASES, Odd, produce
from torch import Tensor

from weft.backends.torch.kernels.shared import launch
from weft.backends.torch.kernels.shared.float8 import FLOAT8

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
cuda: Any = torch.cuda  # partly untyped
REPEATS = 20 if DEVICE == "cuda" else 1
SLOW = 20_000  # turns of the loop that keeps a producer busy: tens of microseconds


def drawn(case: Odd, dtype: str, seed: int = 0) -> Inputs:
    return case.draw(Draw(DEVICE, seed, DTYPES[dtype]))


def tensors(found: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(found, Tensor):
        return [found]
    return [t for part in found for t in tensors(part)] if isinstance(found, tuple | list) else []


def outcome(given: Inputs, run: Callable[[Inputs], Any]) -> list[Tensor]:
    """Run a call and return its result, and the contents of its arguments afterwards."""
    result = run(given)
    return [*tensors(result), *given.tensors()]


def launched(case: Odd, given: Inputs) -> list[Tensor]:
    """The outcome of the kernel.

    Raises:
        ValueError: if torch would compute it, not the kernel.
    """
    launcher = case.functions()[0]
    return outcome(given, lambda inputs: inputs.launch(launcher, kernel=True))


def equal(first: list[Tensor], second: list[Tensor], what: str) -> None:
    """Bit for bit."""
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        same = x.view(torch.uint8) if x.is_contiguous() else x.contiguous().view(torch.uint8)
        assert torch.equal(same, y.contiguous().view(torch.uint8)), f"{what}: tensor {i}"


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is asked for empty is full of NaN, or of the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def interpreted() -> Iterator[None]:
    """On the CPU the launchers take Triton's interpreter for a device."""
    launch.INTERPRETED = DEVICE == "cpu"
    try:
        yield
    finally:
        launch.INTERPRETED = False


@contextmanager
def dependent(on: bool) -> Iterator[None]:
    """Kernels are launched with or without programmatic dependent launch."""
    package = launch.__name__.rpartition(".")[0]
    files: list[Any] = [file for name, file in sys.modules.items() if name.startswith(package)]
    files = [file for file in files if hasattr(file, "has_pdl")]
    before = [file.has_pdl for file in files]
    for file in files:
        file.has_pdl = (lambda x: x.is_cuda) if on else (lambda x: False)
    try:
        yield
    finally:
        for file, old in zip(files, before, strict=True):
            file.has_pdl = old


def check_reference(case: Odd, dtype: str) -> None:
    """The kernel with poisoned memory is its reference in f64, within the rounding of its result and its sums."""
    _, reference = case.functions()
    given = drawn(case, dtype)
    want = outcome(given.to_float64(), lambda inputs: inputs.call(reference))
    with poisoned():
        got = launched(case, given)
    eps, inner = torch.finfo(DTYPES[dtype]).eps, torch.finfo(torch.float32).eps
    bound = case.roundings * eps + 8 * inner * case.terms**0.5
    for i, (x, y) in enumerate(zip(got, want, strict=False)):  # the launcher's own tensors come after the reference's
        if x.dtype == torch.uint8 and torch.equal(x, y):  # codes of weights, for example, that nothing writes
            continue
        if x.dtype == torch.uint8:  # of a cache: where sums differ, the nearest float may be the next one
            x, y, bound = x.view(FLOAT8), y.view(FLOAT8), max(bound, 0.02)
        elif not x.is_floating_point():
            assert torch.equal(x, y), f"tensor {i}"
            continue
        x, y = x.double(), y.double()
        assert x.isfinite().all(), f"tensor {i} has numbers that nothing wrote"
        error = float((x - y).norm() / y.norm().clamp(min=1e-300))
        print(f"  tensor {i}: error {error:.2e} of {bound:.2e}")
        assert error <= bound, f"tensor {i}"


def check_repeats(case: Odd, dtype: str) -> None:
    """Twenty runs give the same bits, and counters are back where they were."""
    first = launched(case, drawn(case, dtype))
    for _ in range(REPEATS):
        equal(launched(case, drawn(case, dtype)), first, "another run")
    given = drawn(case, dtype)
    before = [value.clone() for value in given.launch_only.values() if isinstance(value, Tensor)]
    launched(case, given)
    equal([value for value in given.launch_only.values() if isinstance(value, Tensor)], before, "counters")


def check_graph(case: Odd, dtype: str) -> None:
    """A captured launch, replayed with other numbers in its inputs, computes what a launch does."""
    held = drawn(case, dtype)
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launched(case, held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launched(case, held)
    for seed in (1, 2, 1):
        fill(held, drawn(case, dtype, seed))
        graph.replay()
        equal(captured, launched(case, drawn(case, dtype, seed)), f"replay with seed {seed}")


def fill(held: Inputs, new: Inputs) -> None:
    """Copy the numbers of `new` into the tensors of `held`."""
    for x, y in zip(held.tensors(), new.tensors(), strict=True):
        x.copy_(y)


def check_dependent_launch(case: Odd, dtype: str) -> None:
    """With programmatic dependent launch the bits are those without, in a queue of launches too."""
    with dependent(on=False):
        want = launched(case, drawn(case, dtype))
    with dependent(on=True):
        given = [drawn(case, dtype) for _ in range(8)]
        torch.cuda.synchronize()
        for inputs, got in [(inputs, launched(case, inputs)) for inputs in given]:
            del inputs
            equal(got, want, "dependent launch")


def check_late_inputs(case: Odd, dtype: str) -> None:
    """The kernel reads what the one before writes slowly, after letting this one start."""
    want = launched(case, drawn(case, dtype))
    for late in case.late:
        given, known = drawn(case, dtype), drawn(case, dtype)
        target, source = given.args[late], known.args[late]
        target.zero_()
        torch.cuda.synchronize()
        with dependent(on=True):
            produce(source, target, SLOW)
            got = launched(case, given)
        equal(got, want, f"argument {late} written by the kernel ahead")


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every check by name."""
    found = [check_reference, check_repeats]
    if DEVICE == "cuda":
        found += [check_graph, check_dependent_launch, check_late_inputs]
    for name, case in CASES.items():
        for dtype in DTYPES if DEVICE == "cuda" else ["bf16"]:
            for check in found:
                yield f"{check.__name__[6:]}-{name}-{dtype}", partial(check, case, dtype)


def pytest_generate_tests(metafunc: Any) -> None:
    found = dict(checks())
    metafunc.parametrize("check", found.values(), ids=found)


def test_on_the_gpu(check: Callable[[], None]) -> None:
    with interpreted(), torch.no_grad():
        check()
