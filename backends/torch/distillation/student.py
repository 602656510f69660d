"""A student: a graph as a module of which chosen parameters train, and its graph with their trained values.

Of quantized weights the scales train, and optionally the integer codes (quantization-aware training). Float parameters
train directly, or as the sum of the fixed weight and a product of low rank (LoRA).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from weft.ir import Graph, Param, Recipe, ops
from weft.ir.recipes import Source
from weft.ir.recipes.blocks import Dequantize, Stored, find_block_layout
from weft.ir.recipes.readers import Array, SpilledTensors, TensorReader
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import BlockLayout, pack_codes, unpack_codes
from weft.ir.types.dtypes import DType

from ...block_weights import is_quantized
from ...target import MODEL
from ..lower.lower import lower
from ..package.module import build_module

LARGE = 3.0  # gradients of codes that move them, relative to the root mean square of the tensor's
# op: its trained operands. Biases of routers are excluded: they would change the choice of experts.
TRAINED_OPERANDS = {
    ops.rms_norm: ("weight",),
    ops.layer_norm: ("weight", "bias"),
    ops.add_norm: ("weight", "bias"),
    ops.linear: ("bias",),
    ops.norm_linear: ("bias",),
    ops.causal_conv: ("bias",),
}


class _Product(torch.autograd.Function):
    """The product of integer codes [..., groups, group] and scales [..., groups], which alone have a gradient. It saves
    the codes for the backward pass as integers; autograd would save them as floats."""

    @staticmethod
    def forward(ctx: Any, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes)
        return codes * scales[..., None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (codes,) = ctx.saved_tensors
        return None, (grads[0] * codes).sum(-1)


_multiply_codes: Callable[[Tensor, Tensor], Tensor] = _Product.apply  # torch gives it no types


class ScaledCodes(nn.Module):
    """A torch parametrization of a weight [..., out, width] by relative changes [..., out, groups] of its scales. The
    weight is codes · scales · (1 + change), cut to the first `width` columns."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: Tensor, scales: Tensor, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", codes)  # [..., out, groups, group], the zero points subtracted
        self.register_buffer("scales", scales)  # f32 [..., out, groups]
        self.width = width

    def forward(self, change: Tensor) -> Tensor:
        return _multiply_codes(self.codes, self.scales * (1 + change)).flatten(-2)[..., : self.width]


class _EvaluatingReader:
    """A reader of the tensors of `base`, and of one more tensor for each key of `recipes`: the recipe's f32 result."""

    def __init__(self, base: TensorReader, recipes: Mapping[str, Recipe]) -> None:
        self.base, self.recipes = base, recipes

    @property
    def path(self) -> Path:
        return self.base.path

    def keys(self) -> Iterable[str]:
        return (*self.base.keys(), *self.recipes)

    def shape(self, key: str) -> tuple[int, ...]:
        return self.recipes[key].shape(self.base) if key in self.recipes else self.base.shape(key)

    def dtype(self, key: str) -> DType:
        return dtypes.f32 if key in self.recipes else self.base.dtype(key)

    def read(self, key: str, start: int, stop: int) -> Array:
        if key not in self.recipes:
            return self.base.read(key, start, stop)
        return self.recipes[key].read(self.base, start, stop)


class _LargeGradients(torch.autograd.Function):
    """The identity, whose gradient is set to 0 where it is less than `LARGE` times its root mean square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gradient,) = grads
        return gradient * (gradient.abs() >= LARGE * gradient.square().mean().sqrt())


_drop_small_gradients: Callable[[Tensor], Tensor] = _LargeGradients.apply  # torch gives it no types


class TrainedCodes(nn.Module):
    """A torch parametrization of a weight [..., out, width] by its codes as floats [..., out, groups, group]: it is
    round(codes) · scales · (1 + change), cut to `width` columns.

    Rounding has the gradient 1 (straight-through; Bengio 2013, arXiv 1308.3432), and codes are clipped to the range of
    their dtype. Only codes with large gradients move: all together they would cross the borders of rounding in the same
    step, which no gradient of single codes foresees (Malinovskii 2024, PV-Tuning, arXiv 2405.14852).
    """

    scales: Tensor
    zeros: Tensor

    def __init__(self, scales: Tensor, zeros: Tensor, bits: int, width: int) -> None:
        """zeros: the codes [..., out, groups] or [] that represent 0, which are subtracted from the stored codes."""
        super().__init__()
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.most, self.width = (1 << bits) - 1, width
        self.change = nn.Parameter(torch.zeros_like(scales))

    def round(self, codes: Tensor) -> Tensor:
        """Return `codes` rounded and clipped, with the gradient of the clipping alone."""
        low = -self.zeros[..., None] if self.zeros.ndim else -self.zeros
        clipped = codes.clamp(low, low + self.most)
        return clipped + (clipped.round() - clipped).detach()

    def forward(self, codes: Tensor) -> Tensor:
        scales = self.scales * (1 + self.change)
        return (self.round(_drop_small_gradients(codes)) * scales[..., None]).flatten(-2)[..., : self.width]


class LowRank(nn.Module):
    """A torch parametrization of a fixed weight [..., out, in] by an added product of matrices [..., out, rank] and
    [..., rank, in], which is 0 at first (LoRA; Hu 2021, arXiv 2106.09685)."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        *lead, rows, width = weight.shape
        self.down = nn.Parameter(
            torch.empty(*lead, rank, width, device=weight.device).uniform_(-1, 1) / math.sqrt(width)
        )
        self.up = nn.Parameter(torch.zeros(*lead, rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


@dataclass(frozen=True)
class ParameterChoice:
    """The names of parameters that train: of quantized ones the scales, or the codes and scales; others directly or by
    matrices of low rank."""

    scales: frozenset[str] = frozenset()
    codes: frozenset[str] = frozenset()
    direct: frozenset[str] = frozenset()
    low_rank: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.scales or self.codes or self.direct or self.low_rank)


@dataclass
class Student:
    """A module of `graph`, of which the parameters in `quantized` and `floats` train: name in the graph → path of the
    weight in the module; tied weights share a path."""

    graph: Graph
    module: nn.Module
    quantized: dict[str, str] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Return all trainable parameters."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def list_sizes(self) -> dict[str, float]:
        """Return the size of each trainable parameter of the module, by name: learning rates are relative to it.

        It is the root mean square, at least 0.01; a tenth of it for norms and biases, and 0.1 for relative changes of
        scales, whose effects add up over many weights.
        """

        def measure(name: str, parameter: nn.Parameter) -> float:
            if name in changes:
                return 0.1
            size = max(float(parameter.detach().square().mean().sqrt()), 1e-2)
            return size if parameter.ndim > 1 else 0.1 * size

        changes = set(self._list_changes())
        return {name: measure(name, p) for name, p in self.module.named_parameters() if p.requires_grad}

    def _list_changes(self) -> Iterator[str]:
        """Yield the names of the trainable relative changes of scales."""
        for path in set(self.quantized.values()):
            home, _, attribute = path.rpartition(".")
            prefix = f"{home}.parametrizations.{attribute}"
            weight = self._find_parametrization(path)
            yield f"{prefix}.original" if isinstance(weight, ScaledCodes) else f"{prefix}.0.change"

    def _find_parametrization(self, path: str) -> Any:
        """Return the parametrization of the weight at `path` of the module, or None."""
        home, _, attribute = path.rpartition(".")
        place: Any = self.module.get_submodule(home)
        return place.parametrizations[attribute][0] if parametrize.is_parametrized(place, attribute) else None

    def list_products(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the matrices (up, down) that are added to each weight of low rank, by its name in the graph."""
        parts = {name: self._find_parametrization(path) for name, path in self.floats.items()}
        return {name: (p.up.detach(), p.down.detach()) for name, p in parts.items() if p is not None}

    @torch.no_grad()
    def build_graph(self) -> Graph:
        """Return a copy of the graph with the trained values: scales in their stored dtype, codes rounded, products of
        low rank added. Zero points are unchanged."""
        reader, recipes = SpilledTensors(self.graph.reader), dict[str, Recipe]()
        for name, path in self.quantized.items():
            recipe = self.graph.params[name].recipe
            layout = find_block_layout(recipe, self.graph.reader)
            assert isinstance(layout, BlockLayout)
            codes, scales = self._read_codes(path, layout)
            stored: dict[str, Recipe] = {"codes": Stored(recipe, "packed")}
            for part, values in (("codes", codes), ("scales", scales)):
                if values is not None:
                    key = reader.unique_key(f"{name}.{part}")
                    reader.put(key, values)
                    stored[part] = Source(key)
            recipes[name] = Dequantize(
                stored["codes"],
                stored["scales"],
                Stored(recipe, "points") if layout.has_zeros else None,
                width=int(self.graph.params[name].shape[-1]),
                bits=layout.bits,
                group=layout.group,
                scale=layout.scale.name,
            )
        keys: dict[str, str] = {}
        for name, path in self.floats.items():
            if path not in keys:  # tied weights stay one tensor
                keys[path] = reader.unique_key(name)
                home, _, attribute = path.rpartition(".")
                weight = getattr(self.module.get_submodule(home), attribute)
                reader.put(keys[path], weight.float().cpu().numpy())
            recipes[name] = Source(keys[path])
        graph = self.graph.clone(recipes)
        graph.reader = reader
        return graph

    def _read_codes(self, path: str, layout: BlockLayout) -> tuple[Array | None, Array]:
        """Return (packed codes, None if they did not train; scales in their stored dtype) of the weight at `path`."""
        weight = self._find_parametrization(path)
        home, _, attribute = path.rpartition(".")
        place: Any = self.module.get_submodule(home)
        trained = place.parametrizations[attribute].original
        if isinstance(weight, ScaledCodes):
            return None, _cast_scales(weight.scales * (1 + trained), layout)
        zeros = weight.zeros[..., None] if weight.zeros.ndim else weight.zeros
        codes = (weight.round(trained) + zeros).flatten(-2).cpu().numpy().astype(np.uint8)
        return pack_codes(codes, layout.bits), _cast_scales(weight.scales * (1 + weight.change), layout)


def _cast_scales(scales: Tensor, layout: BlockLayout) -> Array:
    """Return `scales` clipped and cast to the dtype in which `layout` stores them."""
    most = np.finfo(layout.scale.numpy).max
    return np.asarray(np.clip(scales.cpu().numpy(), -most, most).astype(layout.scale.numpy))


def find_scaled_params(graph: Graph) -> list[str]:
    """Return the names of the quantized parameters of `graph` whose scales can be trained: those with integer codes and
    without minima. If some have codes of less than 8 bits, only these: 8-bit codes have almost no error to compensate,
    and the noise of their gradients costs more than they gain."""
    bits_by_name: dict[str, int] = {}
    for name, param in graph.params.items():
        if param.uses and is_quantized(param):
            layout = find_block_layout(param.recipe, graph.reader)
            if isinstance(layout, BlockLayout) and not layout.has_minimum and not layout.floats:
                bits_by_name[name] = layout.bits
    coarse = [name for name, bits in bits_by_name.items() if bits < 8]
    return coarse or list(bits_by_name)


def find_vector_params(graph: Graph) -> list[str]:
    """Return the names of the norm weights and biases (rank 1) of `graph` that are trained."""
    names: dict[str, None] = {}
    for node in graph.nodes:
        for operand in TRAINED_OPERANDS.get(node.op, ()):
            param = node.operand(operand)
            if isinstance(param, Param) and not param.recipe.is_constant and param.type.rank == 1:
                names[param.name] = None
    return list(names)


@dataclass(frozen=True)
class FloatCopy:
    """A copy of a graph that reads quantized weights, and the parameters in `choice`, as float tensors. names_by_key:
    the key of each of these tensors → the names of the parameters that read it."""

    graph: Graph
    names_by_key: Mapping[str, list[str]]
    choice: ParameterChoice


def copy_as_floats(graph: Graph, choice: ParameterChoice) -> FloatCopy:
    """Return a copy of `graph` that reads quantized weights, and parameters in `choice`, as float tensors."""
    recipes, names, read = dict[str, Recipe](), dict[str, list[str]](), dict[str, Recipe]()
    keys: dict[Recipe, str] = {}
    for name, param in graph.params.items():
        if is_quantized(param) or name in choice.direct or name in choice.low_rank:
            key = keys.setdefault(param.recipe, f"trained {name}")  # a weight with two names is one tensor
            recipes[key] = param.recipe
            names.setdefault(key, []).append(name)
            read[name] = Source(key)
    floats = graph.clone(read)
    floats.reader = _EvaluatingReader(graph.reader, recipes)
    return FloatCopy(floats, names, choice)


def open_student(
    graph: Graph, floats: FloatCopy, forms: Mapping[str, Graph], device: torch.device | str, rank: int = 8
) -> Student:
    """Return the module of `graph` on `device` with its chosen parameters trainable, all others fixed.

    floats: `copy_as_floats(graph, choice)`. forms: graphs by name, the result of compiling `floats.graph` for target
    torch; ``forms[MODEL]`` is built. rank: of low-rank matrices. A weight is trained only if that graph reads it
    unchanged from `floats`.
    """
    module = build_module(forms, device=device).requires_grad_(False)
    student, choice = Student(graph, module), floats.choice
    for path, param in lower(forms[MODEL]).program.weights.items():
        if not isinstance(param.recipe, Source) or param.recipe.key not in floats.names_by_key:
            continue
        names, (home, _, attribute) = floats.names_by_key[param.recipe.key], path.rpartition(".")
        place = module.get_submodule(home)
        if not (choice.scales | choice.codes).isdisjoint(names):
            _parametrize(place, attribute, graph.params[names[0]], not choice.codes.isdisjoint(names))
            student.quantized.update((name, path) for name in names)
        elif not choice.low_rank.isdisjoint(names):
            parametrize.register_parametrization(place, attribute, LowRank(getattr(place, attribute), rank))
            student.floats.update((name, path) for name in names)
        elif not choice.direct.isdisjoint(names):
            getattr(place, attribute).requires_grad_(True)
            student.floats.update((name, path) for name in names)
    return student


def _parametrize(home: nn.Module, attribute: str, param: Param, with_codes: bool) -> None:
    """Replace the weight `attribute` of the module `home` by a parametrization with the codes and scales of `param`.
    Its scales train, and its codes if `with_codes`."""
    recipe, reader = param.recipe, param.graph.reader
    layout = find_block_layout(recipe, reader)
    assert isinstance(layout, BlockLayout)
    scales = Stored(recipe, "steps").evaluate(reader)
    groups, device = scales.shape[-1], getattr(home, attribute).device
    codes = unpack_codes(Stored(recipe, "packed").evaluate(reader), layout.bits, groups * layout.group)
    zeros = np.array(layout.middle, np.int16)
    if layout.has_zeros:
        zeros = unpack_codes(Stored(recipe, "points").evaluate(reader), layout.bits, groups).astype(np.int16)
    centred = codes.reshape(*scales.shape, layout.group).astype(np.int16) - (zeros[..., None] if zeros.ndim else zeros)
    steps, width = torch.from_numpy(np.array(scales, np.float32)).to(device), int(param.shape[-1])
    delattr(home, attribute)
    if with_codes:
        setattr(home, attribute, nn.Parameter(torch.from_numpy(centred.astype(np.float32)).to(device)))
        weight: nn.Module = TrainedCodes(steps, torch.from_numpy(zeros.astype(np.float32)), layout.bits, width)
    else:
        if layout.bits < 8 or not layout.has_zeros:  # −128 … 127
            centred = centred.astype(np.int8)
        setattr(home, attribute, nn.Parameter(torch.zeros(scales.shape, device=device)))
        weight = ScaledCodes(torch.from_numpy(centred), steps, width)
    parametrize.register_parametrization(home, attribute, weight.to(device), unsafe=True)
