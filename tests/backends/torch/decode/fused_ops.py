"""Run cases of fused ops token by token: their lowering in a decode step against the reference, by torch and kernels.

The cases are those of the ops; they are tests of the module that lowers the op.
"""

from __future__ import annotations

import importlib
import math
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.torch.decode.step_emitter import STEPS, StepEmitter
from weft.backends.torch.decode.step_source import LAUNCHERS
from weft.backends.torch.kernels.shared.norm import Norm
from weft.backends.torch.kernels.shared.tickets import Tickets
from weft.backends.torch.lib import positions
from weft.backends.torch.lower.lower import emit_nodes
from weft.backends.torch.program.statements import CacheSlot, ParamRef, Submodule
from weft.ir import Graph, TensorType, Value, interpret, ops
from weft.ir.op import OPS, Case, Op, Trait
from weft.ir.recipes import Source
from weft.ir.recipes.readers import MemoryReader
from weft.ir.types import dtypes, sizes
from weft.passes.analysis.states import find_states

FUSED = [op for name in STEPS if Trait.FUSED in (op := OPS[name]).traits]
KERNELS = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is published for Linux alone")


def begins(op: Op, case: Case) -> bool:
    """Return whether a case starts at the first token of a sequence."""
    given = dict(zip((o.name for o in op.operands), case.operands, strict=False))
    return given.get("past") is None


CASES = {f"{op.name}-{i}": (op, case) for op in FUSED for i, case in enumerate(op.cases) if begins(op, case)}


def cases_of(module: str) -> list[str]:
    """Return the cases of the fused ops that `module` of backends/torch/decode/ops lowers."""
    return [n for n, (op, _) in CASES.items() if STEPS[op.name].emit.__module__.rpartition(".")[2] == module]


SHAPE = sizes.sym("batch"), sizes.sym("seq")


class Model:
    """A graph of one op, with random inputs and parameters."""

    def __init__(self, op: Op, case: Case) -> None:
        reader, arrays = MemoryReader({}), case.draw()
        self.graph = graph = Graph("step", reader)
        graph.meta["kind"] = "decoder"
        first = arrays[0]
        assert first is not None
        if first.ndim == 2 and first.dtype.kind == "f":  # one token of each row
            first = arrays[0] = first[:, None]
        self.feeds = {"input_ids": np.ones(first.shape[:2], np.int64)}
        self.feeds["position_ids"] = np.arange(first.shape[1])[None].repeat(len(first), 0)
        for name in self.feeds:
            graph.add_input(name, TensorType(dtypes.i64, SHAPE))
        operands: list[Value | None] = []
        for name, array in zip(op.operand_names(arrays), arrays, strict=True):
            path = {"norm_weight": "norm.weight", "norm_bias": "norm.bias"}.get(name, f"{name}{len(operands)}.weight")
            name = path.removesuffix(".weight")
            kind = dtypes.f32 if array is not None and array.dtype.kind == "f" else dtypes.i64
            if array is None:
                operands.append(None)
            elif name.startswith("positions"):
                operands.append(graph.inputs["position_ids"])
                self.feeds["position_ids"] = array
            elif array.shape[:2] == first.shape[:2]:
                operands.append(graph.add_input(name, TensorType(kind, (*SHAPE, *array.shape[2:]))))
                self.feeds[name] = array
            else:
                reader.arrays[name] = array
                operands.append(graph.add_param(path, TensorType(kind, array.shape), Source(name)))
        if op is ops.mixture:  # its kernel call includes that of the router
            _, chosen, _, up, *_ = arrays
            assert chosen is not None and up is not None
            experts, k = len(up), chosen.shape[2]
            logits = graph.add_input("logits", TensorType(dtypes.f32, (*SHAPE, experts)))
            self.feeds["logits"] = np.random.default_rng(1).standard_normal((*first.shape[:2], experts))
            operands[1:3] = ops.choose_experts.emit(logits, k=k)
        made = self._followed(op, op.emit(*operands, **case.attrs), case)
        for i, value in enumerate(made):
            graph.add_output(f"y{i}", value)
        self.params = {name: torch.tensor(p.recipe.evaluate(reader)).float() for name, p in graph.params.items()}

    def _followed(self, op: Op, made: tuple[Value, ...], case: Case) -> tuple[Value, ...]:
        """Return the outputs of `op`, or of the op whose kernel call includes its own."""
        if op is ops.norm_qkv:
            heads = {name: case.attrs[name] for name in ("heads", "kv_heads")}
            return (ops.attention(*made, **heads, causal=True),)
        if op is ops.latent_qk:
            cosines = case.operands[3]
            assert cosines is not None
            rank = made[1].width - 2 * cosines.shape[-1]
            return (ops.attention(*made, heads=case.attrs["heads"], kv_heads=1, causal=True, value_dim=rank),)
        if op in (ops.norm_route, ops.choose_experts):
            rng, reader = np.random.default_rng(1), self.graph.reader
            assert isinstance(reader, MemoryReader)
            stacks = []
            for name, shape in (("up", (6, 8, 6)), ("down", (6, 6, 8))):
                reader.arrays[name] = rng.standard_normal(shape)
                stacks.append(self.graph.add_param(f"{name}.weight", TensorType(dtypes.f32, shape), Source(name)))
            x = self.graph.add_input("tokens", TensorType(dtypes.f32, (*SHAPE, 6)))
            self.feeds["tokens"] = rng.standard_normal((*self.feeds["input_ids"].shape, 6))
            return (ops.mixture(x, *made, *stacks),)
        return made

    def wanted(self) -> dict[str, Any]:
        return interpret(self.graph, self.feeds)


class Step:
    """Run the statements of a decode step of a graph, one token after the other."""

    def __init__(self, model: Model, functions: dict[str, Any]) -> None:
        self.model, self.graph, self.functions = model, model.graph, {**functions, "torch": torch, "Norm": Norm}
        self.e = StepEmitter(self.graph, {})
        for node in self.graph.nodes:
            assert node.op.name not in STEPS or STEPS[node.op.name].when(self.e, node) is None
        emit_nodes(self.e, self.graph, {OPS[name]: lowering.emit for name, lowering in STEPS.items()})
        self.tickets = Tickets(4096)
        self.caches = {node: self._cache(node) for node in self.graph.nodes}

    def _cache(self, node: Any) -> SimpleNamespace:
        rows, seq = self.model.feeds["input_ids"].shape
        found = SimpleNamespace(advance=lambda n: 0)
        for spec in find_states(node):
            found.values = [torch.zeros(rows, *(n for n in spec.row_shape if isinstance(n, int)))]
        if node.op is ops.attention:
            widths = [v.width // node.attrs["kv_heads"] for v in node.inputs[1:3] if v is not None]
            caches = [torch.zeros(rows, node.attrs["kv_heads"], seq, width) for width in widths]
            found.k, found.v = caches[0], caches[-1]
        return found

    def token(self, t: int) -> list[torch.Tensor]:
        """Return the outputs of token `t`."""
        env: dict[object, Any] = {}
        for name, value in self.graph.inputs.items():
            part = torch.tensor(self.model.feeds[name][:, t : t + 1])
            angles = name.startswith(("cosines", "sines"))
            env[self.e[value]] = (part.flatten(0, 1) if angles else part).to(
                torch.float32 if part.is_floating_point() else part.dtype
            )
        env |= {v: SimpleNamespace(advance=lambda n: 0) for v in self.e.program.inputs if v.name == "cache"}
        for s in self.e.program.statements:
            given = {f"v{i}": self._operand(o, s.node, env) for i, o in enumerate(s.operands)}
            made = eval(s.text.format(*given), {**self.functions, **given})
            for var, one in zip(s.results, made if len(s.results) > 1 else (made,), strict=True):
                env[var] = one
        return [env[self.e[value]] for _, value in self.graph.outputs.items()]

    def _operand(self, o: object, node: object, env: dict[object, Any]) -> Any:
        if isinstance(o, ParamRef):
            return self.model.params[o.path]
        if isinstance(o, CacheSlot):
            return self.caches[node]
        if isinstance(o, Submodule) and o.init == "Tickets":
            return self.tickets
        if isinstance(o, Submodule):
            home = o.path.rpartition(".")[0]
            own = {k.rpartition(".")[2]: p for k, p in self.model.params.items() if k.rpartition(".")[0] == home}
            return eval(o.init.format("owner"), {**self.functions, "owner": SimpleNamespace(**own)})
        return env[o]


def launchers(kernel: bool) -> dict[str, Any]:
    """Return the functions that statements call; with `kernel`, launchers do not fall back to torch."""
    rotary = {name: getattr(positions, name) for name in ("rotary", "rotary_scaled")}
    homes = {name: importlib.import_module(f"weft.backends.torch.kernels.{name}") for name in LAUNCHERS}
    found = {name: getattr(home, name) for name, home in homes.items()}
    return rotary | {name: partial(f, kernel=True) if kernel else f for name, f in found.items()}


def write_statements(name: str) -> str:
    """Return the statements of the decode step of a case, one per line, with placeholders for operands."""
    return "\n".join(s.text for s in Step(Model(*CASES[name]), {}).e.program.statements)


def check(name: str, kernel: bool) -> None:
    """Check the decode step of a case against the interpreter; with `kernel`, kernels must compute it."""
    model = Model(*CASES[name])
    step, wanted = Step(model, launchers(kernel)), model.wanted()
    with torch.inference_mode():
        for t in range(model.feeds["input_ids"].shape[1]):
            for got, want in zip(step.token(t), wanted.values(), strict=True):
                expected = want[:, t : t + 1]
                found = got.double().numpy().reshape(expected.shape)
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * max(1, math.sqrt(want.size) / 10))
