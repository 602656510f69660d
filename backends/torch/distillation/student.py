"""A student: a graph as a module of which chosen parameters train, and its graph with their trained values.

Of quantized weights the scales train. Float parameters train directly, or as the sum of the fixed weight and a product
of low rank (LoRA).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from weft.ir import Graph, Param, Recipe, ops
from weft.ir.recipes import RANDOM, Source
from weft.ir.recipes.blocks import Dequantize, Stored, find_block_layout
from weft.ir.recipes.readers import SpilledTensors
from weft.ir.types.block_layouts import BlockLayout, unpack_codes

from ...block_weights import is_quantized
from ...target import MODEL
from ..lower.lower import lower
from ..package.module import build_module

# op: its trained operands. Biases of routers are excluded: they would change the choice of experts.
TRAINED_OPERANDS = {
    ops.rms_norm: ("weight",),
    ops.layer_norm: ("weight", "bias"),
    ops.add_norm: ("weight", "bias"),
    ops.linear: ("bias",),
    ops.norm_linear: ("bias",),
    ops.causal_conv: ("bias",),
}


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
        return (self.codes * (self.scales * (1 + change))[..., None]).flatten(-2)[..., : self.width]


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
    """The names of parameters that train: of quantized ones the scales, others directly or by matrices of low rank."""

    scales: frozenset[str] = frozenset()
    direct: frozenset[str] = frozenset()
    low_rank: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.scales or self.direct or self.low_rank)


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

        It is the root mean square, at least 0.01; a tenth of it for norms and biases, and 0.04 for relative changes of
        scales, whose effects add up over many weights.
        """

        def measure(name: str, parameter: nn.Parameter) -> float:
            if name in changes:
                return 0.04
            size = max(float(parameter.detach().square().mean().sqrt()), 1e-2)
            return size if parameter.ndim > 1 else 0.1 * size

        changes = set(self._list_changes())
        return {name: measure(name, p) for name, p in self.module.named_parameters() if p.requires_grad}

    def _list_changes(self) -> Iterator[str]:
        """Yield the names of the trainable relative changes of scales."""
        for path in set(self.quantized.values()):
            home, _, attribute = path.rpartition(".")
            yield f"{home}.parametrizations.{attribute}.original"

    def list_products(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the matrices (up, down) that are added to each weight of low rank, by its name in the graph."""
        products: dict[str, tuple[Tensor, Tensor]] = {}
        for name, path in self.floats.items():
            home, _, attribute = path.rpartition(".")
            place: Any = self.module.get_submodule(home)
            if parametrize.is_parametrized(place, attribute):
                part = place.parametrizations[attribute][0]
                products[name] = part.up.detach(), part.down.detach()
        return products

    @torch.no_grad()
    def build_graph(self) -> Graph:
        """Return a copy of the graph with the trained values: scales in their stored dtype, products of low rank added.
        Codes and zero points are unchanged."""
        reader, recipes = SpilledTensors(self.graph.reader), dict[str, Recipe]()
        for name, path in self.quantized.items():
            recipe = self.graph.params[name].recipe
            layout = find_block_layout(recipe, self.graph.reader)
            assert isinstance(layout, BlockLayout)
            home, _, attribute = path.rpartition(".")
            place: Any = self.module.get_submodule(home)
            weight = place.parametrizations[attribute]
            scales = (weight[0].scales * (1 + weight.original)).cpu().numpy()
            most, key = np.finfo(layout.scale.numpy).max, reader.unique_key(f"{name}.scales")
            reader.put(key, np.clip(scales, -most, most).astype(layout.scale.numpy))
            recipes[name] = Dequantize(
                Stored(recipe, "packed"),
                Source(key),
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
    """Return a copy of `graph` that reads quantized weights, and parameters in `choice`, as float tensors.

    They are in a temporary file until the student is opened. WeftError if it cannot be created.
    """
    reader, keys = SpilledTensors(graph.reader), dict[Recipe, str]()
    names, read = dict[str, list[str]](), dict[str, Recipe]()
    for name, param in graph.params.items():
        if is_quantized(param) or name in choice.direct or name in choice.low_rank:
            # A weight with two names is one tensor; equal values to begin with, such as ones, are not.
            is_weight = param.recipe.has(*RANDOM) or any(param.recipe.sources())
            if not is_weight or param.recipe not in keys:
                keys[param.recipe] = reader.unique_key(name)
                reader.put(keys[param.recipe], param.recipe.evaluate(graph.reader).astype(np.float32))
            names.setdefault(keys[param.recipe], []).append(name)
            read[name] = Source(keys[param.recipe])
    floats = graph.clone(read)
    floats.reader = reader
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
        if not choice.scales.isdisjoint(names):
            _parametrize(place, attribute, graph.params[names[0]])
            student.quantized.update((name, path) for name in names)
        elif not choice.low_rank.isdisjoint(names):
            parametrize.register_parametrization(place, attribute, LowRank(getattr(place, attribute), rank))
            student.floats.update((name, path) for name in names)
        elif not choice.direct.isdisjoint(names):
            getattr(place, attribute).requires_grad_(True)
            student.floats.update((name, path) for name in names)
    return student


def _parametrize(home: nn.Module, attribute: str, param: Param) -> None:
    """Parametrize the weight `attribute` of the module `home` by `ScaledCodes` of `param`, whose scales train."""
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
    if layout.bits < 8 or not layout.has_zeros:  # −128 … 127
        centred = centred.astype(np.int8)
    delattr(home, attribute)
    setattr(home, attribute, nn.Parameter(torch.zeros(scales.shape, device=device)))
    weight = ScaledCodes(torch.from_numpy(centred), steps, width).to(device)
    parametrize.register_parametrization(home, attribute, weight, unsafe=True)
