"""`scan` in generated PyTorch: random steps, gradients, numbers that would break a division by products, texts cut."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.torch.codegen.model_source import write_source
from weft.frontends.dsl import building, scan
from weft.ir import Graph, TensorType, Value, dtypes, interpret, ops
from weft.ir.graph.step import NEXT
from weft.ir.types import sizes
from weft.passes.analysis.recurrences.affine import find_affine_form

from ....lowered import lower
from ....random_steps import RandomStep
from ....recurrences import HEADS, KEYS, RECURRENCES, VALUES
from ....sampling import each

BENT = [False, True]
SEEDS = range(24)


def built(graph: Graph) -> tuple[Any, str]:
    """The generated module of a graph without weights, and its source."""
    source = write_source(lower(graph)).text
    namespace: dict[str, Any] = {}
    exec(compile(source, "model.py", "exec"), namespace)
    return namespace["Model"](), source


def made(net: Any, feeds: dict[str, np.ndarray]) -> tuple[torch.Tensor, ...]:
    found = net(**{name: torch.from_numpy(x) for name, x in feeds.items()})
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize(("seed", "bent"), each(3, itertools.product(SEEDS, BENT)))
def test_random_recurrences_agree_with_the_interpreter(seed: int, bent: bool) -> None:
    drawn = RandomStep(seed, bent)
    graph = drawn.graph()
    net, _ = built(graph)
    for seq in (1, 2, 37):
        feeds = drawn.feeds(2, seq)
        for found, wanted in zip(made(net, feeds), interpret(graph, feeds).values(), strict=True):
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_affine_form_of_affine_steps_holds_for_any_state(seed: int) -> None:
    """All that ops keep affine are, and what the analysis says of them holds for any state."""
    drawn = RandomStep(seed, bent=False)
    (node,) = (n for n in drawn.graph().nodes if n.op is ops.scan)
    step, rng = node.attrs["step"], np.random.default_rng(seed)
    form = find_affine_form(step)
    assert form is not None
    feeds = {name: rng.standard_normal(v.type.concrete({"batch": 3})) for name, v in step.graph.inputs.items()}
    parts = interpret(form.gates, {name: feeds[name] for name in form.gates.inputs})
    new = interpret(step.graph, feeds)
    for name in step.states:
        a, b = parts.get(f"a.{name}", np.ones(1)), parts.get(f"b.{name}", np.zeros(1))
        np.testing.assert_allclose(a * feeds[name] + b, new[NEXT + name], rtol=1e-12, atol=1e-12)
    known = {f"new_{name}": new[NEXT + name] for name in step.states}
    after = interpret(form.after, {**feeds, **known})
    for name in step.outputs:
        np.testing.assert_allclose(after[name], new[name], rtol=1e-12, atol=1e-12)


def test_steps_called_affine_map_midpoints_to_midpoints() -> None:
    """A step that the analysis calls affine maps the middle of two states to the middle of what it makes of them."""
    verdicts = []
    for seed in range(60):
        (node,) = (n for n in RandomStep(seed, bent=True).graph().nodes if n.op is ops.scan)
        step, rng = node.attrs["step"], np.random.default_rng(seed)
        verdicts.append(find_affine_form(step) is not None)
        if not verdicts[-1]:
            continue
        feeds = {name: rng.standard_normal(v.type.concrete({"batch": 3})) for name, v in step.graph.inputs.items()}
        other = {**feeds, **{name: rng.standard_normal(feeds[name].shape) for name in step.states}}
        middle = {**feeds, **{name: (feeds[name] + other[name]) / 2 for name in step.states}}
        one, two, half = (interpret(step.graph, given) for given in (feeds, other, middle))
        for name in step.states:
            key = NEXT + name
            np.testing.assert_allclose((one[key] + two[key]) / 2, half[key], rtol=1e-12, atol=1e-12)
    assert 10 <= sum(verdicts) <= 50


@pytest.mark.parametrize("kind", RECURRENCES)
@pytest.mark.parametrize("seq", [1, 5, 70])
def test_gradients_of_recurrences_of_papers(kind: str, seq: int) -> None:
    """In float64 those of definitions that share nothing with what is generated."""
    recurrence, rng = RECURRENCES[kind], np.random.default_rng(5)
    batch, length = sizes.sym("batch"), sizes.sym("seq")
    with building(Graph("recurrence")) as graph:
        values = [graph.add_input(n, TensorType(dtypes.f32, (batch, length, *s))) for n, s in recurrence.inputs.items()]
        values += [graph.add_input(n, TensorType(dtypes.f32, s)) for n, s in recurrence.weights.items()]
        graph.add_output("y", recurrence.make(*values))
    net, source = built(graph)
    assert ("many=" in source) == recurrence.affine
    shapes = {**{n: (2, seq, *s) for n, s in recurrence.inputs.items()}, **recurrence.weights}
    drawn = {n: torch.from_numpy(rng.standard_normal(shape)) for n, shape in shapes.items()}
    ours, theirs = ({n: x.clone().requires_grad_() for n, x in drawn.items()} for _ in range(2))
    at = {"position_ids": torch.arange(seq)[None]} if "position_ids" in graph.inputs else {}
    found, wanted = net(**ours, **at), recurrence.define(*theirs.values())
    direction = torch.from_numpy(rng.standard_normal(tuple(wanted.shape)))
    (found * direction).sum().backward()
    (wanted * direction).sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    for name in drawn:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-8, atol=1e-8)


def _zeroed(states: Value, q: Value, k: Value, v: Value, a: Value) -> tuple[Value, Value]:
    state = ops.unsqueeze(a, axes=(3,)) * states + ops.unsqueeze(k, axes=(3,)) * ops.unsqueeze(v, axes=(2,))
    return state, ops.squeeze(ops.unsqueeze(q, axes=(2,)) @ state, axes=(2,))


@pytest.mark.parametrize("keys", [1, KEYS])
def test_decay_factors_may_be_zero_or_negative(keys: int) -> None:
    """Factors that erase a state, change its sign, or vanish over a chunk: gradients stay finite, and right."""
    batch, seq = sizes.sym("batch"), sizes.sym("seq")
    shapes = {"q": (HEADS, KEYS), "k": (HEADS, KEYS), "v": (HEADS, VALUES), "a": (HEADS, keys)}
    with building(Graph("zeroed")) as graph:
        values = [graph.add_input(n, TensorType(dtypes.f32, (batch, seq, *s))) for n, s in shapes.items()]
        graph.add_output("y", scan(_zeroed, *values, state=(HEADS, KEYS, VALUES)))
    net, source = built(graph)
    assert "outer_products" in source
    rng, length = np.random.default_rng(0), 150
    feeds = {n: torch.from_numpy(rng.standard_normal((2, length, *s))) for n, s in shapes.items()}
    feeds["a"][:, ::7] = 0
    feeds["a"][:, 40:100] = 1e-30
    found = {n: x.clone().requires_grad_() for n, x in feeds.items()}
    wanted = {n: x.clone().requires_grad_() for n, x in feeds.items()}
    y = net(**found)
    state, rows = torch.zeros(2, HEADS, KEYS, VALUES, dtype=torch.float64), []
    for t in range(length):
        q, k, v, a = (x[:, t, :, :, None] for x in wanted.values())
        state = a * state + k * v.mT
        rows.append((q * state).sum(2))
    right = torch.stack(rows, 1)
    torch.testing.assert_close(y, right, rtol=1e-9, atol=1e-9)
    y.square().sum().backward()
    right.square().sum().backward()
    for name in feeds:
        torch.testing.assert_close(found[name].grad, wanted[name].grad, rtol=1e-8, atol=1e-8)


def _vector(h: Value, m: Value, x: Value) -> tuple[Value, Value]:
    h = ops.squeeze(m @ ops.unsqueeze(h, axes=(2,)), axes=(2,)) + x
    return h, ops.tanh(h) * x


def _on_the_right(s: Value, m: Value, x: Value) -> tuple[Value, Value]:
    s = s @ m + x
    return s, ops.sum(ops.square(s), axes=(3,))


def _by_blocks(s: Value, m: Value, x: Value) -> tuple[Value, Value]:
    halves = ops.concat(*ops.split.emit(m @ s, sizes=(3, 4), axis=1), axis=1)
    return halves - ops.mean(s, axes=(1,), keepdims=True) + x, s


MATRICES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], bool]]] = {
    "a vector": (_vector, (6,), (6, 6), ((0, 1), False)),
    "on the right": (_on_the_right, (2, 3, 5), (2, 5, 5), ((0, 1, 3, 2), True)),
    "more keys than columns": (_by_blocks, (7, 2), (7, 7), ((0, 1, 2), True)),
}


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("seq", [2, 7, 64])
def test_matrix_recurrences_run_in_chunks(kind: str, seq: int) -> None:
    step, row, matrix, axes = MATRICES[kind]
    batch, length = sizes.sym("batch"), sizes.sym("seq")
    with building(Graph("matrices")) as graph:
        shapes = {"m": matrix, "x": row}
        values = [graph.add_input(n, TensorType(dtypes.f32, (batch, length, *s))) for n, s in shapes.items()]
        graph.add_output("y", scan(step, *values, state=row))
    net, source = built(graph)
    assert "partial(matrix_steps, step, (left_of_" in source and f"({axes},)" in source
    rng = np.random.default_rng(1)
    feeds = {n: rng.standard_normal((2, seq, *s)) / max(s) for n, s in shapes.items()}
    (found,) = made(net, feeds)
    np.testing.assert_allclose(found.numpy(), interpret(graph, feeds)["y"], rtol=1e-9, atol=1e-12)


def test_wide_transition_matrices_run_token_by_token() -> None:
    """Its transitions would be products of 40 × 40 matrices for a state of 40 numbers."""
    with building(Graph("wide")) as graph:
        m, x = (graph.add_input(n, TensorType(dtypes.f32, (1, 3, *s))) for n, s in (("m", (40, 40)), ("x", (40,))))
        graph.add_output("y", scan(_vector, m, x, state=(40,)))
    assert "many=" not in built(graph)[1]


def test_the_delta_rule_is_a_triangular_system() -> None:
    recurrence = RECURRENCES["delta rule"]
    batch, length = sizes.sym("batch"), sizes.sym("seq")
    with building(Graph("delta")) as graph:
        values = [graph.add_input(n, TensorType(dtypes.f32, (batch, length, *s))) for n, s in recurrence.inputs.items()]
        graph.add_output("y", recurrence.make(*values))
    source = built(graph)[1]
    assert "unit_inverse" in source and "w_s, c_s)" in source and "matrix_steps" not in source


@pytest.mark.parametrize("gates", [1, KEYS])
def test_gated_delta_rule_is_a_triangular_system(gates: int) -> None:
    """Of heads or of keys: outputs and gradients are those of the op, whose reference goes from token to token."""
    batch, length, shape = sizes.sym("batch"), sizes.sym("seq"), (2, 70)
    rows = {"q": (HEADS, KEYS), "k": (HEADS, KEYS), "v": (HEADS, VALUES), "beta": (HEADS,), "g": (HEADS, gates)}

    def step(s: Value, q: Value, k: Value, v: Value, beta: Value, g: Value) -> tuple[Value, Value]:
        s = ops.unsqueeze(ops.exp(g), axes=(3,)) * s
        known = ops.squeeze(ops.unsqueeze(k, axes=(2,)) @ s, axes=(2,))
        s = s + ops.unsqueeze(k, axes=(3,)) * ops.unsqueeze(ops.unsqueeze(beta, axes=(2,)) * (v - known), axes=(2,))
        return s, ops.squeeze(ops.unsqueeze(q, axes=(2,)) @ s, axes=(2,))

    with building(Graph("gated")) as graph:
        values = [graph.add_input(n, TensorType(dtypes.f32, (batch, length, *s))) for n, s in rows.items()]
        graph.add_output("y", scan(step, *values, state=(HEADS, KEYS, VALUES)))
    net, source = built(graph)
    assert "unit_inverse" in source and "matrix_steps" not in source
    rng = np.random.default_rng(4)
    feeds = {n: rng.standard_normal((*shape, *s)) for n, s in rows.items()}
    feeds["k"] /= np.linalg.norm(feeds["k"], axis=-1, keepdims=True)
    feeds |= {"beta": rng.random(feeds["beta"].shape), "g": -np.abs(feeds["g"])}
    flat = {n: x if n == "beta" else x.reshape(*shape, -1) for n, x in feeds.items()}
    wanted = ops.gated_delta_rule.reference(*flat.values(), heads=HEADS, groups=HEADS)
    given = {n: torch.from_numpy(x).requires_grad_() for n, x in feeds.items()}
    y = net(**given)
    np.testing.assert_allclose(y.detach().flatten(2), wanted, rtol=1e-9, atol=1e-9)
    torch.autograd.gradcheck(lambda *xs: net(*(x[:1, :20] for x in xs)), tuple(given.values()), fast_mode=True)
