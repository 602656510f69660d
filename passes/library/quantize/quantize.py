"""The pass that quantizes weights in blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from weft.ir import Graph, WeftError
from weft.ir.recipes.blocks import BlockRecipe, find_block_layout
from weft.ir.recipes.blocks.floats import FLOAT8, find_float4_layout
from weft.ir.recipes.blocks.floats import FORMATS as FLOATS4
from weft.ir.recipes.readers import EMPTY, Array
from weft.ir.types.block_layouts import INTEGER_BITS, BlockLayout, build_integer_layout, build_offset_layout

from ... import Pass, Trace
from ...analysis.states import has_cache
from ...core.equivalence import EquivalenceCheck
from ...fitting.budget import choose_layouts, report_layouts
from ...fitting.calibration import MIXTURE, read_tokens
from ...fitting.matrices import Matrix, compute_tensor_scales, find_matrices, group_matrices, has_matching_name
from ...fitting.quantizing import (
    count_stored_bits,
    find_stored_layout,
    fit_gptq,
    read_stored_codes,
    round_to_nearest,
    store_rounded,
)

HEAD_BITS = 8
AUTOMATIC = ("auto", "fast", "best")  # methods that keep codes of the file
GROUPS = (32, 64, 128)  # that a budget chooses from
FEW = 6.0  # bits of a weight, scales included, below which a file counts as one of 4 bits, as "Q4_K_M" and "Q5_K_M" do
LEAST_TOKENS = 256  # below which moments of activations are meaningless


class QuantizeWeights(Pass):
    """Store weight matrices as integers of `bits` bits; every group of `group` values of a row shares a scale.

    A weight is scale · (code − zero point). With `zeros`, each group has a zero point of `bits` bits; without, and
    always for codes of 8 bits, the zero point is 2^{bits−1}. Scales are f16. The graph does not change: the recipe of a
    parameter describes how its codes are computed. Targets read the codes if they have a kernel for them, and
    dequantized values otherwise.

    `method` selects how codes are computed:

    - rtn: rounding to the nearest, block by block.
    - gptq: rounding column by column, each compensating for the errors of the columns before it, on the inputs that a
      text gives: `calibration`, a text file or token ids (.npy, .json), or else a mixture of prose, code and languages
      that comes with weft. `tokens` of it are read. A layer is fitted on the outputs of the quantized layers before it.
    - kquant: rounding to the nearest, with scales and zero points that minimize weighted squared errors, without text.
    - hqq: zero points that minimize a norm of errors which tolerates outliers (Badri and Shaji 2023, HQQ), without
      text, for linear maps in 4 bits whose rows are a multiple of `group`. They are real numbers, stored as a zero
      point and a code for the remainder. Other weights are rounded to the nearest.
    - fast: codes as stored in the file, where they fit, else kquant; 8 bits are rounded to the nearest.
    - auto, best: codes as stored in the file, where they fit; gptq for other weights if they get less than 8 bits and
      the model has a tokenizer; rtn otherwise. `calibration` and `budget` select gptq instead of stored codes.

    Codes fit (auto) if they are integers of at most `bits` bits in groups of `group` or more: q4_0, q4_1, q4_k, q5_0
    and q8_0 of GGUF files (codes of 5 bits become codes of 8), q2_k, q3_k and q6_k with group=16, and the codes of
    GPTQ, AWQ and others in a Hugging Face folder. They also fit if weights were converted from such blocks to floats,
    and 4 bits in groups of 32, 64 or 128, or 8 bits in groups of 32 without zero points, represent them exactly. If the
    linear maps of a file take less than 6 bits per weight on average (as in Q4_K_M), those with more than `bits` bits
    (q5_0, q5_1, q5_k, q6_k, q8_0) get codes of 8 bits without zero points, unchanged (q5_0, q8_0) or rounded to the
    nearest; experts do not.

    With a `budget` of bits per weight on average, scales and zero points included, `bits` and `group` are chosen for
    every matrix: codes of the bits that `choices` lists, in groups of 32, 64 or 128. The importance of a matrix is
    measured on the text, as the divergence of the outputs if only this matrix is rounded. Query, key and value of an
    attention get the same layout, so that they can still be packed.

    Results of gptq are stored in the folder `resume`: after an interruption the same command continues there. Commands
    that write OUT store them in OUT.partial, and remove them when they are done.

    `format` int means integers. Other formats are floats, rounded to the nearest; `bits` does not apply to them. fp8: 8
    bits (e4m3) with a scale for each tile of 128 · 128. mxfp4: 4 bits (e2m1) in groups of 32 with a power of two
    (e8m0). nvfp4: 4 bits (e2m1) in groups of 16 with a scale of 8 bits (e4m3), relative to one f32 scale of the matrix,
    which matrices that multiply the same value share. Weights that a file stores in the chosen 4-bit format keep it.

    Embedding tables and output heads get integers of `head` bits, or fp8 with format=fp8. Unchanged are routers, norms,
    biases, all other parameters that are not matrices of products, and weights whose names, or a part of them between
    dots, match a pattern of `keep` (``"down, layers.0.*"``).

    Condition: weights are finite, and their sizes are fixed.

    Source: Frantar 2022, GPTQ (arXiv 2210.17323); group-wise integers as in ONNX Runtime's MatMulNBits; mxfp4 of OCP
    Microscaling Formats 1.0; nvfp4 of NVIDIA 2025, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149).

    Example quantize{bits=8, group=16, method=rtn}::

        graph example {
          input %x: f32[batch, seq, 32]
          param %up.weight: f32[48, 32] = normal([48, 32], std=0.5, stream="up")
          param %down.weight: f32[32, 48] = normal([32, 48], std=0.5, stream="down")
          %up: f32[batch, seq, 48] = linear(%x, %up.weight)
          %act: f32[batch, seq, 48] = relu(%up)
          %down: f32[batch, seq, 32] = linear(%act, %down.weight)
          output y = %down
        }
    """

    name = "quantize"
    effect = "lossy"
    purpose = "Numbers"
    format: Literal["int", "fp8", "mxfp4", "nvfp4"] = "int"
    bits: int = 4
    group: int = 32
    method: Literal["auto", "fast", "best", "rtn", "kquant", "hqq", "gptq"] = "auto"
    zeros: bool = True
    head: int = HEAD_BITS
    budget: float | None = None
    choices: str = "2, 4, 8"
    keep: str = ""
    calibration: str | None = None
    tokens: int = 16384
    resume: str | None = None

    def run(self, graph: Graph, trace: Trace) -> None:
        self._check_arguments()
        plan = self._choose_layouts(graph, trace)
        if not plan and not trace.refusals:
            raise WeftError(f"quantize: graph {graph.name} has no weight matrix that can be quantized")
        for matrix, (layout, wider) in self._find_stored(plan).items():
            if wider is None:
                read_stored_codes(matrix.param, layout)
                trace.record_rewrite(self.name, f"{matrix.param.name} as stored, in {layout}")
            else:
                round_to_nearest(matrix.param, wider)
                widened = f"{matrix.param.name} from {layout} to {wider}, which loses next to nothing"
                trace.record_rewrite(self.name, widened)
            del plan[matrix]
        is_requested = self.method == "gptq" or self.calibration is not None or self.budget is not None
        needs_text = is_requested or any(layout.bits < 8 for layout in plan.values())
        texts = self._read_texts(graph, trace) if plan and needs_text else []
        if self.budget is not None and plan:
            plan = self._fit_budget(self.budget, graph, plan, texts, trace)
        if texts and self.uses_fitting:
            for name in fit_gptq(graph, texts, plan, trace.progress, self.resume or trace.store):
                trace.record_rewrite(self.name, name)
            return
        scales = compute_tensor_scales(matrix for matrix, layout in plan.items() if layout.tensor_scale)
        for matrix, layout in plan.items():
            if layout.sums or self.method == "kquant" or (self.method == "fast" and layout.bits < 8):
                store_rounded(matrix.param, layout, "hqq" if layout.sums else "kquant")
            else:
                round_to_nearest(matrix.param, layout, scales.get(matrix, ()))
            trace.record_rewrite(self.name, matrix.param.name)

    def _check_arguments(self) -> None:
        for name, bits in (("bits", self.bits), ("head", self.head)):
            if bits not in INTEGER_BITS:
                choices = ", ".join(map(str, INTEGER_BITS))
                raise WeftError(f"quantize: {name}={bits} must be one of {choices} (bits of a code)")
        if self.group < 16 or self.group & (self.group - 1) or self.group > 256:
            raise WeftError(f"quantize: group={self.group} must be 16, 32, 64, 128 or 256 (values that share a scale)")
        self._parse_choices()
        if self.method == "hqq" and (self.bits != 4 or not self.zeros or self.budget is not None):
            raise WeftError(
                "quantize: method=hqq needs bits=4 and zeros=true, without budget=, as it fits zero points of 4-bit "
                "codes: choose these or another method"
            )
        if self.format != "int" and (self.method not in (*AUTOMATIC, "rtn") or self.budget is not None):
            raise WeftError(
                f"quantize: format={self.format} is rounded to the nearest: it takes no method and no budget"
            )
        if self.budget is not None and not 0 < self.budget <= 16:
            raise WeftError(
                f"quantize: budget={self.budget:g} (bits per weight on average) must be above 0 and at most 16"
            )
        if self.tokens < 1:
            raise WeftError(f"quantize: tokens={self.tokens} must be positive")
        if self.calibration is not None and not self.uses_text:
            raise WeftError(
                f"quantize: {'method=' + self.method if self.format == 'int' else 'format=' + self.format} reads no "
                "text: leave out calibration=, which is for method=gptq or budget="
            )

    @property
    def uses_text(self) -> bool:
        """Return whether the pass reads a text if it can: if there is a tokenizer, or a file of token ids."""
        return self.format == "int" and (self.uses_fitting or self.budget is not None)

    @property
    def uses_search(self) -> bool:
        """Return whether `method` searches scales and zero points that give weights small errors, without a text."""
        return self.method in ("fast", "kquant", "hqq")

    @property
    def uses_fitting(self) -> bool:
        """Return whether gptq computes the codes if there is a text."""
        uses_fitting = self.bits < 8 or self.calibration is not None or self.budget is not None
        return self.method == "gptq" or (self.method in ("auto", "best") and uses_fitting)

    def is_mostly_stored(self, graph: Graph) -> bool:
        """Return whether `_find_stored` finds more than half of the weights in linears and experts to be quantized."""
        self._check_arguments()
        plan = self._choose_layouts(graph, Trace())
        mapped = {matrix: layout for matrix, layout in plan.items() if matrix.kind in ("linear", "experts")}
        stored = sum(matrix.elements for matrix in self._find_stored(mapped))
        return 2 * stored > sum(matrix.elements for matrix in mapped)

    def _find_stored(self, plan: Mapping[Matrix, BlockLayout]) -> dict[Matrix, tuple[BlockLayout, BlockLayout | None]]:
        """Return the matrices of `plan` for which the file determines the codes, with (stored layout, wider layout).
        The wider layout is None if the stored codes stay. It has 8 bits if they do not fit, the file has few bits
        (`_has_few_bits`), and `plan` or the codes of a linear have 8 bits."""
        if self.format in FLOATS4:
            reader = next((matrix.param.graph.reader for matrix in plan), EMPTY)
            return {
                m: (layout, None) for m, layout in plan.items() if find_block_layout(m.param.recipe, reader) == layout
            }
        automatic = self.format == "int" and self.method in AUTOMATIC
        if not automatic or self.calibration is not None or self.budget is not None:
            return {}
        stored = {matrix: find_stored_layout(matrix.param) for matrix in plan}
        has_few_bits = self._has_few_bits(stored)
        unrounded: dict[Matrix, tuple[BlockLayout, BlockLayout | None]] = {}
        for matrix, chosen_layout in plan.items():
            layout = stored[matrix]
            if layout is None:
                continue
            # One kernel takes all weights of experts, with zero points in all or in none; heads have bits of their own.
            bits = 8 if has_few_bits and layout.bits == 8 and matrix.kind == "linear" else chosen_layout.bits
            # Offsets that are codes need sums of activations, and are for codes of 4 bits: 8 lose nothing without.
            can_offset = matrix.kind == "linear" and layout.bits <= 4
            if layout.group >= chosen_layout.group and layout.bits <= bits and (can_offset or not layout.has_minimum):
                unrounded[matrix] = layout, None
            elif has_few_bits and bits == 8:
                # Also q6_k, whose groups of 16 take half a bit more and suit no kernel of target torch.
                unrounded[matrix] = layout, build_integer_layout(8, self.group, False)
        return unrounded

    def _has_few_bits(self, stored: Mapping[Matrix, BlockLayout | None]) -> bool:
        """Return whether `bits` ≥ 4, and linears and experts in `stored` take fewer than `FEW` bits per weight."""
        mapped = {matrix: layout for matrix, layout in stored.items() if matrix.kind in ("linear", "experts")}
        bits = sum(count_stored_bits(layout) * matrix.elements for matrix, layout in mapped.items())
        return self.bits >= 4 and bits < FEW * sum(matrix.elements for matrix in mapped)

    def _choose_layouts(self, graph: Graph, trace: Trace) -> dict[Matrix, BlockLayout]:
        """Return the layout of each matrix to be quantized; record refusals and kept weights in `trace`."""
        patterns = [p.strip() for p in self.keep.split(",") if p.strip()]
        plan: dict[Matrix, BlockLayout] = {}
        for param, matrix in find_matrices(graph).items():
            if isinstance(matrix, str):
                trace.refuse(self.name, param.name, matrix)
            elif has_matching_name(param, patterns):
                trace.note(f"{self.name}: kept %{param.name}")
            elif param.recipe.has(BlockRecipe):
                layout = find_block_layout(param.recipe, graph.reader)
                trace.refuse(self.name, param.name, f"it is quantized already ({layout})")
            else:
                plan[matrix] = self._choose_layout(graph, matrix)
        return plan

    def _choose_layout(self, graph: Graph, matrix: Matrix) -> BlockLayout:
        if self.format == "fp8":
            return FLOAT8
        outer = matrix.kind in ("head", "table")
        if self.format in FLOATS4 and not outer:
            return find_float4_layout(self.format)
        bits = self.head if outer else self.bits
        # Offsets are multiplied by sums of activations over whole groups.
        if self.method == "hqq" and matrix.kind == "linear" and int(matrix.param.shape[-1]) % self.group == 0:
            return build_offset_layout(bits, self.group)
        return build_integer_layout(bits, self.group, self.zeros and bits < 8)

    def _fit_budget(
        self, budget: float, graph: Graph, plan: dict[Matrix, BlockLayout], texts: Sequence[Array], trace: Trace
    ) -> dict[Matrix, BlockLayout]:
        """Return `plan` with new layouts of linears and experts: at most `budget` bits per weight on average."""
        if not texts:
            raise WeftError(
                f"quantize: budget={budget:g} needs a text to weigh errors, but the model has no tokenizer: "
                "give calibration= a .npy or .json file of token ids"
            )
        mapped = [matrix for matrix in plan if matrix.kind in ("linear", "experts")]
        choices = [build_integer_layout(b, g, self.zeros and b < 8) for b in self._parse_choices() for g in GROUPS]
        chosen = choose_layouts(graph, texts, group_matrices(mapped), choices, budget, trace.progress)
        for line in report_layouts(chosen):
            trace.note(f"quantize: {line}")
        return {matrix: chosen.get(matrix, layout) for matrix, layout in plan.items()}

    def _parse_choices(self) -> list[int]:
        """Return the numbers of bits in `choices`, sorted; raise a WeftError for a number that is not supported."""
        numbers = self.choices.replace(",", " ").split()
        if not numbers or any(number not in map(str, INTEGER_BITS) for number in numbers):
            possible = ", ".join(map(str, INTEGER_BITS))
            raise WeftError(f"quantize: choices={self.choices!r}: each number must be one of {possible}")
        return sorted({int(number) for number in numbers})

    def _read_texts(self, graph: Graph, trace: Trace) -> list[Array]:
        """Return batches of calibration ids; [] if none are needed, or without tokenizer and file (gptq: WeftError)."""
        if not self.uses_text:
            return []
        if has_cache(graph):
            raise WeftError(
                f"quantize: graph {graph.name} has caches already, which texts are not read with: run quantize before "
                "kv-cache, or with method=rtn"
            )
        if self.calibration is None and graph.tokenize is None:
            if self.method == "gptq":
                raise WeftError(
                    "quantize: method=gptq reads a text, and the model has no tokenizer for it: give calibration= a "
                    ".npy or .json file of token ids, or method=rtn"
                )
            trace.note("quantize: weights are rounded to the nearest: the model has no tokenizer to read a text with")
            return []
        texts = read_tokens(graph, self.calibration or str(MIXTURE), self.tokens)
        if (count := sum(ids.size for ids in texts)) < min(LEAST_TOKENS, self.tokens):
            raise WeftError(
                f"quantize: the calibration text {self.calibration} has {count} tokens, and gptq needs {LEAST_TOKENS} "
                "or more to weigh errors; give a longer one, or method=rtn"
            )
        return texts

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that weights rounded to the nearest are within about a step of the original; others must be equal."""
        staged = equivalence.randomize_weights(before)
        rounded = replace(self, method="rtn", budget=None, calibration=None).apply_to(staged)
        for name, param in staged.params.items():
            recipe, exact = rounded.params[name].recipe, param.recipe.evaluate(staged.reader)
            actual = recipe.evaluate(staged.reader)
            if not isinstance(recipe, BlockRecipe):
                equivalence.check_close({name: exact}, {name: actual}, 0.0)
                continue
            blocks, layout = recipe.read_blocks(staged.reader, 0, len(exact)), recipe.layout(staged.reader)
            steps = np.abs(blocks.scales).repeat(layout.group, -1)[..., : exact.shape[-1]]
            error = np.abs(exact - actual)
            if layout.small_floats:
                # Steps are a quarter of a float at most, and half a scale below 1; a scale that is rounded down, to the
                # least E4M3 from up to 1.5 of it, leaves the largest a third short.
                steps = np.maximum(np.abs(exact) / 3, steps / 4)
            elif layout.floats:
                steps = np.maximum(np.abs(exact), steps * 2.0**-6) * 2.0**-3  # subnormal below 2^-6
            # A zero point is rounded by half a step, and a code by another; a scale by 2^-11 of the code's value in
            # steps.
            if not (error <= steps * (1 + 2.0 ** (layout.bits - 10))).all():
                raise WeftError(
                    f"%{name} differs from the original by {np.nanmax(error / steps):.2f} of the rounding error allowed"
                )
