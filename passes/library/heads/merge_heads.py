"""Fewer key and value heads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from weft.ir import Graph, Node, Param, Recipe, WeftError, interpret
from weft.ir.recipes import MeanPool

from ...analysis.projections import Branch, branch_of, output_of, unpacked
from ...analysis.states import has_cache
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.trace import Trace
from ...edits.edit import changed, reweigh
from ...fitting.calibration import read_tokens
from ...fitting.head_fitting import Fit, Fitter
from .head_layout import Layout, apply_layout, misfit, taken


@dataclass(frozen=True)
class Pooled(Layout):
    """The new heads are means of runs of the old ones."""

    old: int = 0

    def of(self, recipe: Recipe, shape: tuple[int, ...], axis: int = 0) -> Recipe:
        """`recipe` of `shape` with its first axis, that of the old heads' numbers, pooled."""
        return recipe if shape[axis] == self.width else MeanPool(recipe, self.old, len(self.heads))


@dataclass(frozen=True)
class Replaced(Layout):
    """The new heads have rows of their own: `weight`, and `bias` where there is one."""

    weight: Recipe = field(kw_only=True)
    bias: Recipe | None = field(kw_only=True)

    def of(self, recipe: Recipe, shape: tuple[int, ...], axis: int = 0) -> Recipe:
        """The weight in place of a matrix, the bias in place of a vector."""
        return self.weight if len(shape) == 2 or self.bias is None else self.bias


@dataclass(frozen=True)
class MhaToGqa(Pass):
    """Let groups of query heads share key and value heads: of each run of heads that become one, `kv_heads` are left.

    From multi-head, grouped or multi-query attention to fewer groups. `method` says what a new head is. mean: the mean
    of the old ones' weights (Ainslie 2023). first: the first of them. Both take heads for comparable that have no
    common basis: V → A V with O → O A⁻¹ is the same attention. svd finds the one head with which the others can be
    expressed best, in closed form, and changes queries and outputs accordingly:

    - O_h V_h L over the heads of a group, stacked, has a truncated SVD … B; V' = B L⁻¹ and O'_h = O_h V_h L Bᵀ.
    - Keys that nothing rotates: the same of Q_h and K_h. Rotary pairs are complex numbers, q k̄ for every frequency, and
      only complex factors commute with rotation: one complex row each, by a rank-1 SVD weighed by the energy of the
      queries; Q'_h takes up the factor.

    L Lᵀ is the second moment of what the heads read, of white noise without a `calibration`: a text file, or token ids
    (.npy, .json), of which `tokens` are read. Half of it is that of tokens, half that of what attention makes of them:
    for values their averages, for keys their differences among those that a query attends to; and heads whose attention
    is spread count for more. `sequential`: later layers are fitted to what the changed earlier ones make of the text,
    and each output map then makes up for what its attention lost, by least squares with a ridge. Where heads have norms
    (of queries and keys) or the output a gate, the basis is fixed, and svd falls back to the mean, with a note in the
    trace.

    Condition: k and v come from linears, with nothing but norms, scales, clips and rotations between. Nothing is lost
    when the merged heads are equal (svd: up to their basis). An error where
    `kv_heads` does not divide the heads there are, or where there are caches.

    Source: Ainslie 2023, GQA (arXiv 2305.13245); Shazeer 2019, MQA (arXiv 1911.02150); the SVD of products of weights
    by activations: Wang 2024, SVD-LLM (arXiv 2403.07378).

    Example mha-to-gqa{kv_heads=1}::

        graph example {
          input %x: f32[batch, seq, 4]
          param %q.weight: f32[8, 4] = normal([8, 4], std=0.5, stream="q")
          param %k.weight: f32[8, 4] = normal([8, 4], std=0.5, stream="k")
          param %v.weight: f32[8, 4] = normal([8, 4], std=0.5, stream="v")
          param %o.weight: f32[4, 8] = normal([4, 8], std=0.5, stream="o")
          %q: f32[batch, seq, 8] = linear(%x, %q.weight)
          %k: f32[batch, seq, 8] = linear(%x, %k.weight)
          %v: f32[batch, seq, 8] = linear(%x, %v.weight)
          %y: f32[batch, seq, 8] = attention(%q, %k, %v, heads=2, kv_heads=2, causal=true)
          %o: f32[batch, seq, 4] = linear(%y, %o.weight)
          output o = %o
        }
    """

    name = "mha-to-gqa"
    effect = "lossy"
    purpose = "Convert heads, cut heads and layers"
    see = ("gqa-to-mha", "gqa-to-mla")
    kv_heads: int
    method: Literal["mean", "first", "svd"] = "mean"
    calibration: str | None = None
    tokens: int = 8192
    sequential: bool = True

    def run(self, graph: Graph, trace: Trace) -> None:
        self._check_arguments()
        if has_cache(graph):
            raise WeftError(f"{self.name}: graph {graph.name} has caches already; run {self.name} before kv-cache")
        sites = [n for n in graph.nodes if n.attrs.get("kv_heads", self.kv_heads) != self.kv_heads]
        for node in sites:
            if node.attrs["kv_heads"] % self.kv_heads:
                raise WeftError(
                    f"mha-to-gqa: kv_heads={self.kv_heads} does not divide the {node.attrs['kv_heads']} key and value "
                    f"heads of %{node.output.name}"
                )
        # All sites are checked before the first change: the text is read only if some attention can be fitted.
        found = {node: self._layouts(node) for node in sites}
        fitter = None
        if self.method == "svd" and any(isinstance(layouts, dict) for layouts in found.values()):
            texts = read_tokens(graph, self.calibration, self.tokens) if self.calibration is not None else ()
            fitter = Fitter(graph, texts, self.sequential)
        for done, (node, layouts) in enumerate(found.items()):
            trace.progress(done, len(found))
            at = node.output.name
            if isinstance(layouts, str):
                trace.refuse(self.name, at, layouts)
                continue
            fit = fitter.fit(node, self.kv_heads) if fitter else Fit({}, [])
            now = _converted(node, layouts, self.kv_heads, fit)
            if fitter and "o" in fit.linears:
                fitter.make_up(node, now, fit)
            for reason in fit.reasons:
                trace.note(f"{self.name}: warning: %{at} gets means instead of fitted {reason}")
            trace.fired(self.name, at)

    def _check_arguments(self) -> None:
        if self.kv_heads < 1 or self.tokens < 1:
            raise WeftError(f"mha-to-gqa: kv_heads={self.kv_heads} and tokens={self.tokens} must be positive")
        if self.calibration is not None and self.method != "svd":
            raise WeftError(f"mha-to-gqa: method={self.method} looks at no text; calibration is for method=svd")

    def _layouts(self, node: Node) -> dict[str, Layout] | str:
        """Return the new layouts of keys and values of the attention `node`, or why there are none."""
        if node.operand("v") is None:
            return "its keys are its values too"
        old, layouts = int(node.attrs["kv_heads"]), dict[str, Layout]()
        for role in "kv":
            branch = branch_of(node, role)
            if isinstance(branch, str):
                return branch
            width = branch.start.width // old
            if self.method == "first":
                layouts[role] = Layout(tuple(range(0, old, old // self.kv_heads)), width)
            else:
                layouts[role] = Pooled(tuple(range(self.kv_heads)), width, 0, old)
            if (reason := misfit(branch, layouts[role])) is not None:
                return reason
        return layouts

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """When the merged heads are equal, nothing is lost."""
        equal = equivalence.stage(before)
        for node in equal.nodes:
            if "kv_heads" in node.attrs and not node.attrs["kv_heads"] % self.kv_heads:
                for branch in (branch_of(node, role) for role in "kv" if node.operand(role) is not None):
                    if isinstance(branch, Branch):
                        _equalize(branch, int(node.attrs["kv_heads"]), self.kv_heads)
        merged = equal.clone()
        # Without the text: heads that are equal merge exactly, whatever the moments are.
        replace(self, calibration=None).run(merged, Trace())
        inputs = equivalence.inputs(before)
        equivalence.same(interpret(equal, inputs), interpret(merged, inputs), EXACT)


def _converted(node: Node, layouts: dict[str, Layout], groups: int, fit: Fit) -> Node:
    """The attention `node` with `groups` KV heads, their keys and values laid out anew and its linears as in `fit`."""
    for role in set(layouts).intersection(fit.linears):
        weight, bias = fit.linears[role]
        layouts[role] = Replaced(layouts[role].heads, layouts[role].width, weight=weight, bias=bias)
    apply_layout(node, {role: (unpacked(node, role), layout) for role, layout in layouts.items()})
    node = changed(node, kv_heads=groups)
    for role in set("qo").intersection(fit.linears):
        _reweigh(node, role, *fit.linears[role])
    return node


def _reweigh(node: Node, role: str, weight: Recipe, bias: Recipe | None) -> None:
    """Give a linear of the attention `node` another weight, and another bias where it has one."""
    linear = output_of(node) if role == "o" else unpacked(node, role).linear
    assert isinstance(linear, Node)
    reweigh(linear, weight, bias or "same")


def _equalize(branch: Branch, heads: int, groups: int) -> None:
    """Let runs of heads have the numbers of the first of each: of a staged graph, whose recipes may change."""
    start, stop = branch.span
    each, run = (stop - start) // heads, heads // groups
    of_heads = [h // run * run * each + i for h in range(heads) for i in range(each)]
    for param in (branch.weight, branch.bias):
        if param is not None:
            count = int(param.shape[0])
            param.recipe = taken(param.recipe, [*range(start), *(start + i for i in of_heads), *range(stop, count)])
    for v in (v for node in branch.between for v in node.inputs[1:]):
        if isinstance(v, Param) and v.shape == (stop - start,):
            v.recipe = taken(v.recipe, of_heads)
