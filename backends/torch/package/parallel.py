"""Tensor parallelism: how a generated model is cut over the processes of a mesh, as a file to read beside it.

Heads, hidden units and experts are divided: the linears into them by columns, those out of them by rows, so that what
the processes make is added up once behind an attention and once behind a feed-forward (Shoeybi 2019, arXiv 1909.08053).
So are tokens: the rows of the embedding, and the logits, which are gathered.
What cannot be divided is computed whole by every process, and the file says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.op import Trait
from weft.passes.analysis.feed_forward import feed_forward
from weft.passes.analysis.projections import Branch, Projections, branch_of, projections

from ..codegen.source import formatted, template
from ..decode.divided import COLUMNS, EXPERTS, LOGITS, ROWS, TOKENS
from ..lower.lower import Lowered
from ..program.statements import CacheSlot, ParamRef, Program, Submodule

HEADS = "SequenceParallel(sequence_dim=2, use_local_output=True)"  # of a norm: its weights are the same for every head
PER_HEAD = ("bias", "sinks", "past_k")  # operands of an attention that differ by head


@dataclass
class Plan:
    """Plan of tensor parallelism: the split of modules by path, the attentions with split caches, and reasons for
    replicated parts. `units` are the modules that are split together or not at all, by what they belong to."""

    styles: dict[str, str] = field(default_factory=dict)
    units: dict[str, list[str]] = field(default_factory=dict)
    caches: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)


def write_plan(model: Lowered, degree: int) -> str:
    """The file parallel.py beside a generated model: ``parallelize(model, mesh)`` for `degree` processes.

    Raises:
        WeftError: if heads cannot be shared out evenly, or if there is nothing to divide.
    """
    _check(degree)
    graph = model.graph
    plan, paths = make_plan(graph, degree, model.program), set(model.program.weights)
    kinds = {style.partition("(")[0] for style in plan.styles.values()}
    text = template("parallel.py.j2").render(
        name=graph.name,
        degree=degree,
        styles=_folded(plan.styles, paths),
        caches=_listed(plan.caches) if plan.caches else "",
        whole=_folded(plan.whole, paths),
        kinds=sorted(k if k != "ExpertParallel" else "ParallelStyle" for k in kinds),
        vocabulary=any("Replicate" in style for style in plan.styles.values()),
    )
    return formatted(text)


def styles(model: Lowered, degree: int) -> dict[str, str]:
    """The styles by which `degree` processes divide the modules of `model`, by path; none for one process.

    Raises:
        WeftError: as `make_plan` does.
    """
    if degree == 1:
        return {}
    _check(degree)
    return make_plan(model.graph, degree, model.program).styles


def _check(degree: int) -> None:
    if degree < 2:
        raise WeftError(f"tensor parallelism of degree {degree} divides nothing; give at least 2")


def make_plan(graph: Graph, degree: int, program: Program) -> Plan:
    """Divide the model of `graph`, lowered to `program`, among `degree` processes.

    Raises:
        WeftError: if heads cannot be shared out evenly, or if there is nothing to divide.
    """
    plan = divided(graph, degree, program)
    if not plan.units:
        why = "; ".join(f"{path}: {reason}" for path, reason in list(plan.whole.items())[:1])
        raise WeftError(f"nothing of {graph.name} can be divided among {degree} processes{why and f' ({why})'}")
    return plan


def divided(graph: Graph, degree: int, program: Program) -> Plan:
    """Plan as `make_plan` does, also where there is nothing to divide; 1 says what any number of processes may divide.

    Raises:
        WeftError: if heads cannot be shared out evenly.
    """
    modules, plan = _Modules(program), Plan()
    for node in graph.nodes:
        if node.op is ops.attention:
            _attention(plan, modules, node, degree)
        elif node.op is ops.moe:
            _experts(plan, modules, node, degree)
        elif node.op is ops.linear:
            _feed_forward(plan, modules, node, degree)
    if plan.units:
        _vocabulary(plan, modules, graph)
    plan.caches = [path for path in modules.cached if path in plan.caches]
    return plan


class _Modules:
    """Map parameters of a graph to the modules of its program that hold them."""

    def __init__(self, program: Program) -> None:
        names = {key: param.name for key, param in program.weights.items()}
        operands = [(s.scope, o) for s in program.statements for o in s.operands]
        leaves = {o.path: o for _, o in operands if isinstance(o, Submodule)}
        self.leaves = {names[f"{path}.weight"]: leaf for path, leaf in leaves.items() if f"{path}.weight" in names}
        self.held = {o.path for _, o in operands if isinstance(o, ParamRef)}
        self.cached = [scope for scope, o in operands if isinstance(o, CacheSlot) and o.type.endswith("KVCache")]
        self.paths = {names[key]: key.rpartition(".")[0] for key in names}

    def leaf(self, param: Value | None, kind: str) -> str | None:
        """The path of the module of a `kind` (nn.Linear, …) whose weight is `param`."""
        leaf = self.leaves.get(param.name) if isinstance(param, Param) else None
        return leaf.path if leaf is not None and leaf.init.startswith(kind) else None


def _attention(plan: Plan, modules: _Modules, node: Node, degree: int) -> None:
    division = _divided_heads(modules, node)
    if isinstance(division, str):
        plan.whole[node.scope or node.output.name] = division
        return
    heads, kv_heads = int(node.attrs["heads"]), int(node.attrs["kv_heads"])
    if heads % degree or kv_heads % degree:
        raise WeftError(
            f"{degree} processes cannot evenly share {heads} query and {kv_heads} key/value heads ({node.scope})"
        )
    plan.styles |= division
    plan.units.setdefault(node.scope, []).extend(division)
    plan.caches.append(node.scope)


def _divided_heads(modules: _Modules, node: Node) -> dict[str, str] | str:
    """The styles of the linears and norms around the attention `node`, or why its heads cannot be told apart."""
    gate, out = _gate(node)
    around = projections(node) if gate is None else _around(node, out)
    if isinstance(around, str):
        return around
    if around.v is None:
        return "its keys are its values too"
    for name in PER_HEAD:
        if node.operand(name) is not None:
            return f"it has {name} of its own for every head"
    styles: dict[str, str] = {}
    for branch in around.branches:
        path = modules.leaf(branch.weight, "nn.Linear")
        if branch.packed or path is None:
            return "its projections are not modules of their own"
        styles[path] = COLUMNS
        norms = _norms(modules, around, branch)
        if isinstance(norms, str):
            return norms
        styles |= norms
    if gate is not None:
        path = modules.leaf(gate.operand("weight"), "nn.Linear")
        if path is None:
            return "its gate is not a module of its own"
        styles[path] = COLUMNS
    path = modules.leaf(around.o.operand("weight"), "nn.Linear")
    if path is None or path in styles:
        return "its output projection is not a module of its own"
    return styles | {path: ROWS}


def _gate(node: Node) -> tuple[Node | None, Node]:
    """The linear whose activated outputs multiply what the attention `node` makes, number by number, and the linear
    that alone reads the product; no gate where there is none."""
    mul = _only_reader(node)
    out = mul and _only_reader(mul)
    if (
        mul is None
        or out is None
        or mul.op is not ops.mul
        or out.op is not ops.linear
        or out.inputs[0] is not mul.output
    ):
        return None, node
    other = next((v for v in mul.inputs if v is not node.output), None)
    acting = None if other is None else other.producer
    if other is None or acting is None or other.shape != node.output.shape or Trait.ELEMENTWISE not in acting.op.traits:
        return None, node
    made = acting.inputs[0]
    linear = None if made is None or len(acting.inputs) != 1 else made.producer
    if linear is None or linear.op is not ops.linear or _only_reader(acting) is None or _only_reader(linear) is None:
        return None, node
    return linear, out


def _around(node: Node, out: Node) -> Projections | str:
    """The linears before the attention `node`, and the one that reads it through a gate."""
    branches = {role: branch_of(node, role) for role in "qkv" if node.operand(role) is not None}
    for branch in branches.values():
        if isinstance(branch, str):
            return branch
    q, k, v = (branches.get(role) for role in "qkv")
    assert isinstance(q, Branch) and isinstance(k, Branch) and not isinstance(v, str)
    return Projections(node, q, k, v, out)


def _only_reader(node: Node) -> Node | None:
    """The node that alone reads what `node` makes."""
    readers = [reader for reader, _ in node.output.uses]
    return readers[0] if len(readers) == 1 and not node.output.is_output else None


def _norms(modules: _Modules, around: Projections, branch: Branch) -> dict[str, str] | str:
    """The styles of what stands between a projection and the attention, or what of it spans several heads."""
    styles = {}
    for node in branch.between:
        weights = [v for v in node.inputs[1:] if isinstance(v, Param)]
        if node.op in (ops.rms_norm, ops.layer_norm):
            width = node.inputs[0].width if node.inputs[0] is not None else 0
            path = modules.leaf(node.operand("weight"), "nn.")
            if width != around.head_dim or (weights and path is None):
                return "its queries and keys are normed across heads"
            if path is not None:
                styles[path] = HEADS
        elif weights and node.op is not ops.rope:
            return f"{node.op.name} has weights between a projection and the scores"
    return styles


def _feed_forward(plan: Plan, modules: _Modules, node: Node, degree: int) -> None:
    unit = feed_forward(node)
    if unit is None or isinstance(unit, str):
        return
    ins = [modules.leaf(p.params[0], "nn.Linear") for p in unit.parts[:-1]]
    out = modules.leaf(unit.out.params[0], "nn.Linear")
    if out is None or any(p.packed or p.normed for p in unit.parts) or None in ins:
        plan.whole[node.scope or node.output.name] = "its linears are not modules of their own"
    elif unit.hidden % degree:
        plan.whole[node.scope or node.output.name] = f"its {unit.hidden} hidden units do not divide evenly"
    else:
        plan.styles |= {path: COLUMNS for path in ins if path is not None} | {out: ROWS}
        plan.units[out] = [*filter(None, ins), out]


def _experts(plan: Plan, modules: _Modules, node: Node, degree: int) -> None:
    stacks = [v for v in node.inputs[2:] if v is not None]
    homes = {modules.paths.get(v.name) for v in stacks}
    (home, *others) = homes
    count = stacks[0].shape[0]
    if others or home is None or not home.startswith(f"{node.scope}."):
        plan.whole[node.scope or node.output.name] = "its experts are no module of their own"
    elif count % degree:
        plan.whole[home] = f"its {count} experts do not divide evenly"
    else:
        plan.styles[home] = EXPERTS
        plan.units[home] = [home]


def _vocabulary(plan: Plan, modules: _Modules, graph: Graph) -> None:
    """The embedding of tokens, and the head that makes the logits; where they are one weight, both stay whole."""
    for node in graph.nodes:
        ids = node.inputs[0]
        if node.op is not ops.embedding or ids is None or not ids.name.endswith("input_ids"):
            continue
        path = modules.leaf(node.operand("table"), "nn.Embedding")
        if path is not None and f"{path}.weight" in modules.held:
            plan.whole[path] = "it is the head too"
        elif path is not None:
            plan.styles = {path: TOKENS, **plan.styles}
    value = graph.outputs.get("logits")
    while value is not None and value.producer is not None and value.producer.op is not ops.linear:
        value = value.producer.inputs[0] if Trait.ELEMENTWISE in value.producer.op.traits else None
    head = None if value is None or value.producer is None else value.producer.operand("weight")
    path = modules.leaf(head, "nn.Linear")
    if path is not None and path not in plan.styles:
        plan.styles[path] = LOGITS


def _folded(by_path: dict[str, str], paths: set[str]) -> dict[str, str]:
    """`by_path` with one entry, ``layers.*.…``, for what is the same in all layers of a list; `paths` are all there
    are in the model."""
    numbers: dict[str, set[str]] = {}
    for stem, number, _ in filter(None, map(_numbered, paths)):
        numbers.setdefault(stem, set()).add(number)
    folded: dict[str, str] = {}
    for path, text in by_path.items():
        match _numbered(path):
            case stem, _, rest if all(by_path.get(f"{stem}.{n}{rest}") == text for n in numbers[stem]):
                folded[f"{stem}.*{rest}"] = text
            case _:
                folded[path] = text
    return folded


def _listed(paths: list[str]) -> str:
    """A list of `paths` as Python, those of the layers of a list by their numbers."""
    runs: dict[tuple[str, str], list[int]] = {}
    for path in paths:
        stem, number, rest = _numbered(path) or (path, "-1", "")
        runs.setdefault((stem, rest), []).append(int(number))
    texts = []
    for (stem, rest), numbers in runs.items():
        first, last = numbers[0], numbers[-1]
        over = f"range({first}, {last + 1})" if numbers == list(range(first, last + 1)) else str(tuple(numbers))
        texts.append(f'"{stem}"' if first < 0 else f'*(f"{stem}.{{i}}{rest}" for i in {over})')
    return f"[{', '.join(texts)}]"


def _numbered(path: str) -> tuple[str, str, str] | None:
    """Split a path at its layer number: before, number, after."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:i]), part, "".join(f".{p}" for p in parts[i + 1 :])
    return None
