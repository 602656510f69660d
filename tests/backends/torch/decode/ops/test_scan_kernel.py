"""Kernels that are generated for recurrences of one's own, in Triton's interpreter, against float64."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.backends.torch.decode.ops.scan_kernel import TEXTS, NoKernel, ScanKernelWriter
from weft.backends.torch.kernels.shared import launch
from weft.backends.torch.kernels.shared.recurrence import step_in_place
from weft.frontends.dsl import building, scan
from weft.ir import Graph, TensorType, Value, dtypes, interpret, ops
from weft.ir.graph.step import NEXT, Step
from weft.ir.types import sizes

from .....random_steps import RandomStep
from .....recurrences import RECURRENCES
from ...generated import graph_of
from ...kernels.close import DTYPES, rounded
from ...kernels.scans import step_of, written

MODELS = ("mLSTM", "RG-LRU", "RWKV", "RWKV-7")  # of the zoo of variants
PAPERS = ("mamba", "gated linear attention", "delta rule")
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is published for Linux alone")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the CPU."""
    monkeypatch.setattr(launch, "INTERPRETED", True)


def of_paper(kind: str) -> Step:
    """The step of a recurrence of tests/recurrences.py."""
    recurrence, lead = RECURRENCES[kind], (sizes.sym("batch"), sizes.sym("seq"))
    with building(Graph("recurrence")) as graph:
        values = [graph.add_input(n, TensorType(dtypes.f32, (*lead, *s))) for n, s in recurrence.inputs.items()]
        values += [graph.add_input(n, TensorType(dtypes.f32, s)) for n, s in recurrence.weights.items()]
        graph.add_output("y", recurrence.make(*values))
    return step_of(graph)


def own(step: Any, state: Any, **rows: tuple[int, ...]) -> Step:
    """A step of one's own, of inputs whose rows have these shapes."""
    lead = sizes.sym("batch"), sizes.sym("seq")
    with building(Graph("own")) as graph:
        values = [graph.add_input(n, TensorType(dtypes.f32, (*lead, *s))) for n, s in rows.items()]
        scan(step, *values, state=state)
    return step_of(graph)


def no_torch(*_: Tensor) -> tuple[Tensor, ...]:
    raise AssertionError("torch has computed the step")


def drawn(step: Step, batch: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Numbers for all inputs of a step: states in f32, the rest in `dtype`, tokens as parts of wider rows."""
    rng, found = np.random.default_rng(7), dict[str, Tensor]()
    for name, value in step.graph.inputs.items():
        shape = value.type.concrete({"batch": batch})
        if name in step.tokens:
            wide = rounded(rng.standard_normal((batch, 3 + math.prod(shape[1:]))), dtype, torch.device("cpu"))
            found[name] = wide[:, 3:].unflatten(1, shape[1:]) if len(shape) > 2 else wide[:, 3:]
        else:
            kind = torch.float32 if name in step.states else dtype
            found[name] = rounded(rng.standard_normal(shape), kind, torch.device("cpu"))
    return found


def assert_near(got: Tensor, want: NDArray[np.float64], dtype: torch.dtype) -> None:
    """`got` is `want`, computed in f32 and rounded once to `dtype`."""
    assert tuple(got.shape) == want.shape
    bound = 200 * torch.finfo(torch.float32).eps + (torch.finfo(dtype).eps if dtype != torch.float32 else 0)
    assert np.abs(got.double().numpy() - want).max() <= bound * max(1.0, np.abs(want).max())


def assert_step(step: Step, batch: int, dtype: torch.dtype) -> None:
    """The kernel of `step` gives what the interpreter does, and writes states in their place."""
    kernel, found = written(step)
    given = drawn(step, batch, dtype)
    wanted = interpret(step.graph, {name: x.double().numpy() for name, x in given.items()})
    states = tuple(given[name] for name in step.states)
    tokens, constants = ([given[name] for name in part] for part in (step.tokens, step.constants))
    made = step_in_place(
        kernel,
        no_torch,
        states,
        tuple(x[:, None] for x in tokens),
        tuple(constants),
        outputs=found.outputs,
        count=found.count,
        block=found.block,
        kernel=True,
    )
    for name, y in zip(step.outputs, made if isinstance(made, tuple) else (made,), strict=True):
        assert y.dtype == dtype
        assert_near(y[:, 0], wanted[name], dtype)
    for name in step.states:
        assert_near(given[name], wanted[NEXT + name], torch.float32)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*MODELS, *PAPERS])
def test_kernels_of_recurrences_agree_with_float64(name: str, dtype: torch.dtype, batch: int) -> None:
    step = of_paper(name) if name in PAPERS else step_of(graph_of(f"variant/{name}"))
    assert_step(step, batch, dtype)


POSITIVE = {"log", "reciprocal", "rsqrt", "sqrt", "div"}  # whose (last) operand is positive here
OTHERS = {
    "affine": lambda x, h: ops.affine(x, by=-2.5, plus=0.5) * ops.affine(h, plus=1.0),
    "a number": lambda x, h: ops.affine(x, by=0.0, plus=1.5) - h,
    "clip": lambda x, h: ops.clip(x, low=-0.5, high=0.25) + ops.clip(h, high=0.0) + ops.clip(h, low=0.1),
    "swish": lambda x, h: ops.swish(x) + ops.swish(h, beta=2.0) + ops.swish(h, beta=1.702),
    "gelu": lambda x, h: ops.gelu(x) + ops.gelu(h, approximate="tanh") + ops.gelu(x, approximate="sigmoid"),
    "relu2": lambda x, h: ops.relu2(x) - h,
    "tanh": lambda x, h: ops.tanh(x) - h,
    "cast": lambda x, h: ops.cast(x < h, to=dtypes.f32) + ops.cast(x, to=dtypes.f32),
    "mean": lambda x, h: ops.mean(h - 3.0, axes=(1,), keepdims=True) * x,
    "max": lambda x, h: ops.max(h - 9.0, axes=(1,), keepdims=True) * x,
    "min": lambda x, h: ops.min(h + 9.0, axes=(1,), keepdims=True) * x,
    "transpose": lambda x, h: ops.transpose(ops.exp(ops.transpose(x, axes=(0, 2, 1))), axes=(0, 2, 1)) * h,
}


@pytest.mark.parametrize("name", [*sorted(TEXTS), *OTHERS])
def test_kernels_of_each_op_in_a_step(name: str) -> None:
    """Each op that kernels have, of a token and a state."""

    def step(h: Value, x: Value) -> tuple[Value, Value]:
        if name in OTHERS:
            return OTHERS[name](x, h), OTHERS[name](h, x)
        op = getattr(ops, name)
        values = [x, h, x + h][-len(op.operands) :]
        if name in POSITIVE:
            values[-1] = ops.abs(values[-1]) + 0.5
        if name == "where":
            values[0] = values[0] < 0.5
        if name.startswith("logical"):
            values = [v < 0.3 for v in values]
        y = op(*values)
        y = ops.cast(y, to=dtypes.f32) if y.type.dtype == dtypes.bool_ else y
        return y + x, y * h

    assert_step(own(step, (3, 5), x=(3, 5)), 2, torch.float32)


def test_sums_over_expanded_axes_count_each_element() -> None:
    """A number for all keys, expanded to them, counts for each of them."""

    def step(h: Value, x: Value) -> tuple[Value, Value]:
        spread = ops.expand(ops.exp(x), shape=h.shape)
        return h + spread, ops.sum(spread, axes=(2,))

    assert_step(own(step, (3, 5), x=(3, 1)), 2, torch.float32)


def test_products_of_a_state_with_columns_and_rows() -> None:
    """A state is read from its other side, and rows of a token are columns of it."""

    def step(h: Value, q: Value, v: Value) -> tuple[Value, Value]:
        read = h @ ops.unsqueeze(q, axes=(3,))  # [batch, 2, 5, 1]
        return h - read * v, ops.squeeze(read, axes=(3,))

    assert_step(own(step, (2, 5, 6), q=(2, 6), v=(2, 1, 6)), 2, torch.bfloat16)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda h, x: (ops.cumsum(h, axis=1) + x, x), "no kernel has its op cumsum"),
        (lambda h, x: (ops.softmax(h, axis=-1) + x, x), "no kernel has its op softmax"),
        (
            lambda h, x: (h * ops.sum(h, axes=(1,), keepdims=True), ops.sum(x, axes=(2,))),
            "its op sum does not run over one",
        ),
        (lambda h, x: (h + x @ ops.transpose(h, axes=(0, 2, 1)) @ h, x), "its op matmul does not run over one axis"),
        (lambda h, x: (h + x, ops.sum(h, axes=(0,), keepdims=True) + x), "its op sum does not run over one axis"),
        (lambda h, x: (h + x, ops.square(ops.reshape(h * x, shape=(h.shape[0], 15)))), "no kernel has its op reshape"),
        (lambda h, x: (h, x @ ops.transpose(x, axes=(0, 2, 1)) @ h), "its op matmul does not run over one axis"),
        (lambda h, x: (h + x, ops.mean(h, axes=(1, 2))), "its op mean does not run over one axis"),
    ],
)
def test_steps_without_a_kernel_give_a_reason(step: Any, why: str) -> None:
    with pytest.raises(NoKernel, match=why):
        ScanKernelWriter(own(step, (3, 5), x=(3, 5))).write()


def test_an_axis_that_no_state_has_is_refused() -> None:
    step = own(lambda h, q: (h * 0.5, q @ h), (2, 5, 6), q=(2, 4, 5))
    with pytest.raises(NoKernel, match="q has an axis that no state has"):
        ScanKernelWriter(step).write()


def test_tokens_of_all_texts_and_states_with_gaps() -> None:
    """A token [1, 1, ...] is that of each text, as what is made of weights alone; states lie without gaps."""
    kernel, found = written(own(lambda h, x: (h + x, h * x), (3, 5), x=(3, 5)))
    h, x = torch.arange(30.0).view(2, 3, 5), torch.arange(45.0).view(1, 1, 3, 15)[..., ::3]
    sizes = {"outputs": found.outputs, "count": found.count, "block": found.block}
    want, state = h + x[0, 0], h.clone()
    y = step_in_place(kernel, no_torch, (state,), (x,), **sizes)
    torch.testing.assert_close(y, (h * x[0, 0])[:, None])
    torch.testing.assert_close(state, want)
    again = step_in_place(kernel, lambda h, x: (h + x, h * x), (h,), (x,), **sizes, kernel=False)
    torch.testing.assert_close(again, y)
    torch.testing.assert_close(h, want)
    with pytest.raises(ValueError, match="must be contiguous"):
        step_in_place(kernel, no_torch, (h.mT,), (x,), **sizes)


@pytest.mark.parametrize("bent", [False, True])
def test_kernels_of_random_recurrences(bent: bool) -> None:
    """Most have a kernel; those that have none say which op is in the way."""
    reasons = []
    for seed in range(30):
        step = step_of(RandomStep(seed, bent).graph())
        try:
            assert_step(step, 1 + seed % 3, torch.float32)
        except NoKernel as reason:
            reasons.append(str(reason))
    assert len(reasons) <= 15
    assert all("reshape" in reason or "sum" in reason for reason in reasons), reasons
