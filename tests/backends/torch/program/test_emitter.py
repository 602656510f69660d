"""The emitter: statements with operands, hoisting, inlining, modules, functions and sizes."""

from __future__ import annotations

import pytest

from weft.backends.torch.program.emitter import Emitter, choose_name
from weft.backends.torch.program.statements import ParamRef, Submodule, Var
from weft.ir import Graph, TensorType, WeftError, ops
from weft.ir.recipes import Normal
from weft.ir.recipes.frequencies import AlibiSlopes
from weft.ir.types import dtypes
from weft.ir.types.sizes import floordiv, sym

F32 = dtypes.f32


@pytest.fixture
def graph() -> Graph:
    """Return a graph of one linear map with bias in the scope ``layers.0``."""
    graph = Graph("emitted")
    x = graph.add_input("x", TensorType(F32, (sym("batch"), sym("seq"), 4)))
    params = {
        name: graph.add_param(f"layers.0.map.{name}", TensorType(F32, dims), Normal(dims, 0.5, name))
        for name, dims in {"weight": (6, 4), "bias": (6,)}.items()
    }
    with graph.scope("layers.0"):
        graph.add_output("y", ops.linear(x, params["weight"], params["bias"]))
    return graph


@pytest.fixture
def emitter(graph: Graph) -> Emitter:
    return Emitter(graph, set(), set())


def test_statements_have_the_scope_and_name_of_their_node(graph: Graph, emitter: Emitter) -> None:
    (node,) = graph.nodes
    emitter.enter(node)
    y = emitter.emit("f({0}, {1})", graph.inputs["x"], graph.params["layers.0.map.weight"], comment="[batch]")
    emitter.leave()
    z = emitter.emit("g({0})", y)
    first, second = emitter.program.statements
    assert (first.scope, first.node, first.comment, first.results) == ("layers.0", node, "[batch]", (y,))
    assert first.operands == (emitter.program.inputs[0], ParamRef("layers.0.map.weight", (6, 4)))
    assert (second.scope, second.node, z.name) == ("", None, "value")
    assert list(emitter.program.weights) == ["layers.0.map.weight"]


def test_hoisted_statements_are_emitted_once_before_the_layers(graph: Graph, emitter: Emitter) -> None:
    emitter.enter(next(iter(graph.nodes)))
    first, again = (emitter.hoist("mask", "f({0})", graph.inputs["x"], name="mask") for _ in range(2))
    other = emitter.hoist("other", "f({0})", graph.inputs["x"], name="mask")
    assert first is again is not other and emitter.is_hoisted(first)
    assert [(s.scope, s.early) for s in emitter.program.statements] == [("", True)] * 2
    assert emitter.scope == "layers.0"
    assert not emitter.is_hoisted(emitter.emit("1"))


def test_inlined_expressions_count_placeholders_from_the_first(graph: Graph, emitter: Emitter) -> None:
    x = emitter[graph.inputs["x"]]
    inner = emitter.emit("{0} + 1", x)
    a, b = emitter.emit_tuple("{0}.split({1})", inner, x, names=("a", "b"))
    assert emitter.inline(b, 2) == ("(({2} + 1).split({3}))[1]", [x, x])
    emitter.scope = "layers.0"
    assert emitter.inline(a, 2) == ("{2}", [a])  # of another scope


def test_modules_own_exactly_the_parameters_below_their_path(graph: Graph, emitter: Emitter) -> None:
    weight, bias = graph.params["layers.0.map.weight"], graph.params["layers.0.map.bias"]
    emitter.enter(next(iter(graph.nodes)))
    assert emitter.make_submodule("nn.Linear(4, 6, bias=False)", weight=weight) is None  # the bias is left over
    leaf = emitter.make_submodule("nn.Linear(4, 6)", weight=weight, bias=bias)
    assert leaf == Submodule("layers.0.map", "nn.Linear(4, 6)", ("weight", "bias"))
    assert emitter.make_submodule("nn.Linear(4, 6)", weight=weight, bias=bias) == leaf
    assert emitter.make_submodule("Other()", weight=weight, bias=bias) is None
    emitter.scope = "layers.1"
    assert emitter.make_submodule("nn.Linear(4, 6)", weight=weight, bias=bias) is None  # outside of its scope


def test_weight_that_a_statement_reads_directly_gets_no_module(graph: Graph, emitter: Emitter) -> None:
    weight, bias = graph.params["layers.0.map.weight"], graph.params["layers.0.map.bias"]
    emitter.emit("{0}.T", weight)
    assert emitter.make_submodule("nn.Linear(4, 6)", weight=weight, bias=bias) is None


def test_equal_functions_are_added_once(emitter: Emitter) -> None:
    names = [emitter.add_function("f", text) for text in ("def {name}(): 1", "def {name}(): 2", "def {name}(): 1")]
    assert names == ["f", "f2", "f"]
    assert emitter.program.functions == {"f": "def f(): 1", "f2": "def f2(): 2"}


def test_symbolic_sizes_are_read_from_values_or_computed(graph: Graph, emitter: Emitter) -> None:
    x = graph.inputs["x"]
    assert emitter.write_size(7) == ("7", [])
    assert emitter.write_size(sym("seq"), x) == ("{0}.shape[1]", [emitter[x]])
    text, operands = emitter.write_size(sym("batch") * 2 + floordiv(sym("seq"), 2))
    values = {"batch": 3, "seq": 9}
    assert all(isinstance(o, Var) for o in operands)
    assert eval(text.format(*(str(values[o.name]) for o in operands if isinstance(o, Var)))) == 3 * 2 + 9 // 2
    text, operands = emitter.write_shape((sym("batch"), 4, sym("seq")), first=1)
    assert text == "{1}, 4, {2}" and len(operands) == 2
    with pytest.raises(WeftError, match="the size other cannot be computed: no axis of a graph input"):
        emitter.write_size(sym("other"))


def test_declared_inputs_are_added_once(emitter: Emitter) -> None:
    cache = emitter.declare_input("cache", "None", "Cache | None")
    assert emitter.declare_input("cache", "0", "int") is cache
    assert [(v.name, v.default) for v in emitter.program.inputs] == [("x", ""), ("cache", "None")]


def test_tables_with_a_formula_are_hoisted_instead_of_stored(graph: Graph, emitter: Emitter) -> None:
    slopes = graph.add_param("alibi_slopes", TensorType(F32, (4,)), AlibiSlopes(4))
    operand = emitter[slopes]
    assert isinstance(operand, Var) and operand.name == "slopes" and emitter.is_hoisted(operand)
    assert emitter.program.weights == {}


def test_values_are_named_after_the_operand_of_their_reader(graph: Graph) -> None:
    x = graph.inputs["x"]
    named, gate = ops.exp(x, name="hidden"), ops.exp(x)
    graph.add_output("z", ops.glu(gate, named))
    assert [choose_name(v) for v in (named, gate)] == ["hidden", "gate"]
