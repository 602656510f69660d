"""Merge or repeat key and value heads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from weft.ir import Graph, Node, Param, Recipe, WeftError, ops
from weft.ir.recipes import MeanPool

from ... import Pass, Trace
from ...analysis.layers import refuse_caches
from ...analysis.projections import Branch, find_branch, find_output_linear, unpack_branch
from ...core.equivalence import EquivalenceCheck
from ...edits.edit import rebuild_node, replace_weights
from ...fitting.calibration import read_tokens
from ...fitting.head_fitting import Fit, Fitter
from .head_layout import HeadLayout, apply_layout, find_layouts, take_rows


@dataclass(frozen=True)
class MeanHeads(HeadLayout):
    """A layout with fewer heads: each new head is the mean of a run of adjacent heads, of `old` heads in all."""

    old: int = 0

    def rearrange(self, recipe: Recipe, shape: tuple[int, ...], axis: int = 0) -> Recipe:
        """Return `recipe` (a tensor of `shape`) with runs of `old` / len(heads) heads along its first axis averaged.
        A tensor with a single head along `axis`, such as the weight of a norm per head, is returned unchanged."""
        return recipe if shape[axis] == self.width else MeanPool(recipe, self.old, len(self.heads))


@dataclass(frozen=True)
class FittedHeads(HeadLayout):
    """A layout that replaces the parameters of a linear: the weight by `weight`, the bias (if any) by `bias`."""

    weight: Recipe = field(kw_only=True)
    bias: Recipe | None = field(kw_only=True)

    def rearrange(self, recipe: Recipe, shape: tuple[int, ...], axis: int = 0) -> Recipe:
        """Return `bias` if `shape` has one axis and `bias` is not None, else `weight`; `recipe` is not used."""
        return self.weight if len(shape) == 2 or self.bias is None else self.bias


class MhaToGqa(Pass):
    """Merge runs of adjacent key and value heads until `kv_heads` are left, shared by larger groups of query heads.

    The pass converts multi-head or grouped-query attention to fewer groups. `method` chooses the new head. mean: the
    mean of the old heads' weights (Ainslie 2023). first: the first old head. Neither accounts for the bases of heads,
    which may differ: V → A V with O → O A⁻¹ is the same attention. svd computes, in closed form, the head from which
    the old heads are best expressed, and changes queries and outputs accordingly:

    - Stack O_h V_h L over the heads h of a group. With B the right singular vectors of its truncated SVD, V' = B L⁻¹
      and O'_h = O_h V_h L Bᵀ.
    - Keys without RoPE: the same for Q_h and K_h. With RoPE, a rotary pair is one complex feature, and only complex
      factors commute with the rotation: a rank-1 SVD, weighted by the energy of the queries, gives one complex row per
      frequency, and Q'_h absorbs its factor for head h.

    L Lᵀ is the second moment of the linears' input on `tokens` tokens of `calibration` (a text file, or token ids as
    .npy or .json); without a file, the identity. Half of it comes from single tokens and half from the attention: for
    values, from their weighted averages; for keys, from the differences among the keys that a query attends to. Heads
    that attend to many keys get more weight. With `sequential` and a file, later layers are fitted to the outputs of
    the changed earlier layers, and output projections are refitted by ridge regression. svd falls back to the mean,
    with a note: for keys, if queries or keys have a norm, scale or clip or are rotated differently, or if no linear
    computes queries; for values, if they have a norm, scale or clip, or if a gate or several nodes read the result.

    Condition: k and v are two values from linears, with only norms, scales, clips and rotations between linear and
    attention. The result is exact if the merged heads are equal (svd: up to their basis). It is an error if `kv_heads`
    does not divide the number of KV heads, if there are caches, or with `calibration` unless the method is svd.

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
        refuse_caches(graph, self.name)
        sites = [n for n in graph.nodes if n.attrs.get("kv_heads", self.kv_heads) != self.kv_heads]
        for node in sites:
            if node.attrs["kv_heads"] % self.kv_heads:
                raise WeftError(
                    f"mha-to-gqa: kv_heads={self.kv_heads} does not divide the {node.attrs['kv_heads']} key and value "
                    f"heads of %{node.output.name}"
                )
        # Sites are checked before the first change: the calibration file is read only if an attention can be fitted.
        layouts_by_node = {node: self._find_layouts(node) for node in sites}
        fitter = None
        if self.method == "svd" and any(isinstance(layouts, dict) for layouts in layouts_by_node.values()):
            token_ids = read_tokens(graph, self.calibration, self.tokens) if self.calibration is not None else ()
            fitter = Fitter(graph, token_ids, self.sequential)
        for progress, (node, layouts) in enumerate(layouts_by_node.items()):
            trace.progress(progress, len(layouts_by_node))
            name = node.output.name
            if isinstance(layouts, str):
                trace.refuse(self.name, name, layouts)
                continue
            fit = fitter.fit(node, self.kv_heads) if fitter else Fit({}, [])
            merged = _merge_kv_heads(node, layouts, self.kv_heads, fit)
            if fitter and "o" in fit.linears:
                fitter.refit_output(node, merged, fit)
            for reason in fit.reasons:
                trace.note(f"{self.name}: warning: %{name} gets means instead of fitted {reason}")
            trace.record_rewrite(self.name, name)

    def _check_arguments(self) -> None:
        if self.kv_heads < 1 or self.tokens < 1:
            raise WeftError(f"mha-to-gqa: kv_heads={self.kv_heads} and tokens={self.tokens} must both be positive")
        if self.calibration is not None and self.method != "svd":
            raise WeftError(f"mha-to-gqa: calibration= is for method=svd, not for method={self.method}; leave it out")

    def _find_layouts(self, node: Node) -> dict[str, tuple[Branch, HeadLayout]] | str:
        """Return (branch, layout) of k and of v of the attention `node`; a reason (str) if heads cannot be merged."""
        if node.operand("v") is None:
            return "its keys are its values too"

        def make_layout(role: str, old: int, width: int) -> HeadLayout:
            if self.method == "first":
                return HeadLayout(tuple(range(0, old, old // self.kv_heads)), width)
            return MeanHeads(tuple(range(self.kv_heads)), width, 0, old)

        return find_layouts(node, "kv", make_layout)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that outputs do not change if the heads that are merged are equal."""
        equal = equivalence.randomize_weights(before)
        for node in equal.nodes:
            if "kv_heads" in node.attrs and not node.attrs["kv_heads"] % self.kv_heads:
                for branch in (find_branch(node, role) for role in "kv" if node.operand(role) is not None):
                    if isinstance(branch, Branch):
                        equalize_heads(branch, int(node.attrs["kv_heads"]), self.kv_heads)
        # Without calibration: heads that are equal merge exactly, whatever the moments are.
        replace(self, calibration=None).check_keeps(equal, equivalence)


def _merge_kv_heads(node: Node, layouts: dict[str, tuple[Branch, HeadLayout]], groups: int, fit: Fit) -> Node:
    for role in set(layouts).intersection(fit.linears):
        (branch, layout), (weight, bias) = layouts[role], fit.linears[role]
        layouts[role] = branch, FittedHeads(layout.heads, layout.width, weight=weight, bias=bias)
    apply_layout(node, layouts)
    node = rebuild_node(node, kv_heads=groups)
    for role in set("qo").intersection(fit.linears):
        linear = find_output_linear(node) if role == "o" else unpack_branch(node, role).linear
        assert isinstance(linear, Node)
        weight, bias = fit.linears[role]
        replace_weights(linear, weight, bias or "same")
    return node


def equalize_heads(branch: Branch, heads: int, groups: int) -> None:
    """Replace the `heads` heads of `branch`, by recipe, so that each of `groups` runs repeats its first head."""
    start, stop = branch.span
    head_dim, run = (stop - start) // heads, heads // groups
    source = [h // run * run * head_dim + i for h in range(heads) for i in range(head_dim)]
    for param in (branch.weight, branch.bias):
        if param is not None:
            count = int(param.shape[0])
            param.recipe = take_rows(param.recipe, [*range(start), *(start + i for i in source), *range(stop, count)])
    for v in (v for node in branch.between for v in node.inputs[1:]):
        if isinstance(v, Param) and v.shape == (stop - start,):
            v.recipe = take_rows(v.recipe, source)


class GqaToMha(Pass):
    """Repeat key and value heads until there are `kv_heads`, by default one for every query head.

    With n KV heads, query head h reads number ⌊h·n/heads⌋. If each KV head is repeated r times in place, h reads a copy
    of the same head. With `kv_heads` between 1 and the number of query heads, MQA becomes GQA; without, MHA. A norm
    over all key heads at once keeps its mean. The pass restores the form before mha-to-gqa, not the lost information.

    Condition: k and v come from linears, with only norms, scales, clips and rotations between linear and attention. The
    pass refuses attentions whose present number of KV heads does not divide `kv_heads`, whose number of query heads is
    not a multiple of `kv_heads`, whose keys are also the values, or that have a cache.

    Source: Ainslie 2023, GQA (arXiv 2305.13245), figure 2.

    Example gqa-to-mha::

        graph example {
          input %q: f32[batch, seq, 8]
          input %x: f32[batch, seq, 5]
          param %k.weight: f32[4, 5] = normal([4, 5], std=1.0, stream="k")
          param %v.weight: f32[4, 5] = normal([4, 5], std=1.0, stream="v")
          %k: f32[batch, seq, 4] = linear(%x, %k.weight)
          %v: f32[batch, seq, 4] = linear(%x, %v.weight)
          %y: f32[batch, seq, 8] = attention(%q, %k, %v, heads=4, kv_heads=2, causal=true)
          output y = %y
        }
    """

    name = "gqa-to-mha"
    effect = "exact"
    purpose = "Same function, other weights"
    see = ("mha-to-gqa",)
    tradeoff = "keys and values are computed and cached as often as they are repeated, for targets without groups"
    kv_heads: int | None = None

    def run(self, graph: Graph, trace: Trace) -> None:
        if self.kv_heads is not None and self.kv_heads < 1:
            raise WeftError(f"gqa-to-mha: kv_heads={self.kv_heads} must be positive")
        for node in graph.nodes:
            if node.op is not ops.attention:
                continue
            kv_heads = self.kv_heads or node.attrs["heads"]
            if kv_heads != node.attrs["kv_heads"]:
                trace.record_result(self.name, node.output.name, _repeat_heads(node, kv_heads))


def _repeat_heads(node: Node, count: int) -> str | None:
    """Repeat KV heads of the attention `node` up to `count` and return None; return a reason (str) if impossible."""
    heads, kv_heads = node.attrs["heads"], node.attrs["kv_heads"]
    if count % kv_heads:
        return f"{count} is not a multiple of its {kv_heads} KV heads; mha-to-gqa merges heads"
    if heads % count:
        return f"{count} KV heads do not divide its {heads} query heads"
    if node.operand("past_k") is not None:
        return "it has a cache of its KV heads; run gqa-to-mha before kv-cache"
    if node.operand("v") is None:
        return "its keys are its values too"
    repeated = tuple(h * kv_heads // count for h in range(count))
    layouts = find_layouts(node, "kv", lambda role, _, width: HeadLayout(repeated, width))
    if isinstance(layouts, str):
        return layouts
    apply_layout(node, layouts)
    rebuild_node(node, kv_heads=count)
    return None
