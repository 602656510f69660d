"""Forms of graphs: targets are built from them and change none; nothing but passes rewrites a graph."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from weft.backends.target import TARGETS
from weft.ir import WeftError
from weft.ir.op import OPS
from weft.ir.testing import build_node_graph
from weft.passes import run_passes
from weft.passes.forms import derive_graphs

from ..passes.zoo import ZOO
from ..sampling import ALL, by_turns, each

EDITS = ("add_input", "add_output", "add_node", "erase", "erase_param", "inserting", "replace_uses")
# Steps of recurrences are graphs of their own, which lowerings copy and write as functions.
STEPS = (
    "backends/onnx/lowerings/scan_operator.py",
    "backends/torch/ops/custom_recurrences.py",
    "backends/torch/decode/ops/scan_parts.py",
)


@pytest.mark.halved
@pytest.mark.parametrize(("name", "target"), each(7, by_turns(ZOO, TARGETS)) if not ALL else by_turns(ZOO, TARGETS))
def test_building_a_target_leaves_the_graph_unchanged(name: str, target: str) -> None:
    backend, graph = TARGETS[target], ZOO[name]()
    options, dtype = backend.options(), backend.dtypes[0]
    given, length = str(graph), int(graph.meta.get("context") or 32)
    try:
        rewritten = run_passes(graph, backend.pipeline(graph, dtype, max_length=length))
        forms = derive_graphs(rewritten, backend.forms(rewritten, options))
        texts = {form: str(made) for form, made in forms.items()}
        backend.build(forms, dtype, length, options, [])
    except WeftError:
        # ONNX targets run every model of the zoo that can have a cache; transformers.js feeds only whole models.
        assert target in ("torch", "transformers", "web") or name == "variant/depths by rank"
        return
    assert str(graph) == given
    assert {form: str(made) for form, made in forms.items()} == texts


@pytest.mark.parametrize("op", ["choose_tokens", "selective_scan", "ssd"])
def test_only_target_torch_calls_kernels(op: str) -> None:
    """Folders for transformers lack them: an op that has no other lowering is expanded into its body."""
    case = next(c for c in OPS[op].cases if len(c.operands) == len(OPS[op].operands) or op == "choose_tokens")
    graph, _ = build_node_graph(OPS[op], case)
    (node,) = graph.nodes
    assert TARGETS["torch"].refusals(node) is None
    found = run_passes(graph, "legalize{target=transformers}").nodes
    assert (op in {n.op.name for n in found}) == (op != "choose_tokens")
    assert TARGETS["transformers"].lowerings(op) == ([] if op == "choose_tokens" else ["state_space"])


def rewrites(path: Path) -> list[str]:
    """List the places of a file that rewrite a graph, or run passes."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), list[ast.AST]()
    passes = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft.passes")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            for place in node.targets:
                outputs = isinstance(place, ast.Subscript) and ast.unparse(place.value).endswith("graph.outputs")
                if outputs or (isinstance(place, ast.Attribute) and place.attr == "recipe"):
                    found.append(place)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_pass = isinstance(node.func, ast.Name) and called in passes & {"run_passes", "lookup", "legalize"}
            if is_pass or called in EDITS:
                found.append(node)
    return [f"{path}:{node.lineno}: {ast.unparse(node)}" for node in found if isinstance(node, ast.expr)]


def test_backends_do_not_rewrite_graphs(root: Path) -> None:
    sources = (path for path in sorted((root / "backends").rglob("*.py")))
    assert [line for path in sources if str(path.relative_to(root)) not in STEPS for line in rewrites(path)] == []
    assert all(rewrites(root / path) for path in STEPS)


def test_frontends_run_passes_only_in_the_api(root: Path) -> None:
    """Besides, they only make graphs: of modules, and of checkpoints, whose tensors are recipes."""
    makers = ("frontends/app/api/", "frontends/app/cli/", "frontends/dsl/", "frontends/formats/", "frontends/models/")
    sources = (str(path.relative_to(root)) for path in sorted((root / "frontends").rglob("*.py")))
    assert [line for path in sources if not path.startswith(makers) for line in rewrites(root / path)] == []
    run = [line for path in makers[2:] for file in (root / path).rglob("*.py") for line in rewrites(file)]
    assert [line for line in run if "run_passes" in line or "lookup(" in line] == []
