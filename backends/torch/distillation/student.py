"""A student: a quantized graph as a module whose scales, norms and biases train, while its codes stay fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
from weft.ir.types.block_layouts import BlockLayout, unpack_codes
from weft.ir.types.dtypes import DType

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


@dataclass
class Student:
    """A module of a quantized `graph`, with its trainable parameters by their names in the graph. scales: weight → (its
    parametrization, the trainable relative change of its scales); tied weights share a pair. vectors: trainable norm
    weights and biases."""

    graph: Graph
    module: nn.Module
    scales: Mapping[str, tuple[ScaledCodes, nn.Parameter]]
    vectors: Mapping[str, nn.Parameter]

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Return all trainable parameters: changes of scales (once per name of a tied weight), then vectors."""
        return [change for _, change in self.scales.values()] + list(self.vectors.values())

    def count_trained(self) -> tuple[int, int]:
        """Return (number of trainable scales, number of trainable elements of norms and biases)."""
        scales = {change for _, change in self.scales.values()}
        return sum(c.numel() for c in scales), sum(v.numel() for v in self.vectors.values())

    def copy_state(self) -> list[Tensor]:
        """Return copies of all trainable parameters, for `restore`."""
        return [p.detach().clone() for p in self.trainable]

    @torch.no_grad()
    def restore(self, state: Iterable[Tensor]) -> None:
        """Copy `state`, as `copy_state` returns it, into the trainable parameters."""
        for parameter, value in zip(self.trainable, state, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def round_scales(self) -> None:
        """Multiply the scales by 1 + change, round them to their stored dtype, and set the changes to 0."""
        for name, (weight, change) in self.scales.items():
            weight.scales.copy_(torch.from_numpy(_cast_scales(self, name).astype(np.float32)))
            change.zero_()

    def build_graph(self) -> Graph:
        """Return a copy of the graph with the trained scales, norms and biases; codes and zero points are unchanged."""
        reader, recipes = SpilledTensors(self.graph.reader), dict[str, Recipe]()
        for name in self.scales:
            recipe, scales = self.graph.params[name].recipe, _cast_scales(self, name)
            layout = find_block_layout(recipe, self.graph.reader)
            assert isinstance(layout, BlockLayout)
            key = reader.unique_key(f"{name}.scales")
            reader.put(key, scales)
            recipes[name] = Dequantize(
                Stored(recipe, "packed"),
                Source(key),
                Stored(recipe, "points") if layout.has_zeros else None,
                width=int(self.graph.params[name].shape[-1]),
                bits=layout.bits,
                group=layout.group,
                scale=layout.scale.name,
            )
        for name, vector in self.vectors.items():
            key = reader.unique_key(name)
            reader.put(key, vector.detach().cpu().numpy())
            recipes[name] = Source(key)
        graph = self.graph.clone(recipes)
        graph.reader = reader
        return graph


def _cast_scales(student: Student, name: str) -> Array:
    """Return the scales of the weight `name`, multiplied by 1 + change, clipped and cast to their stored dtype."""
    layout = find_block_layout(student.graph.params[name].recipe, student.graph.reader)
    assert isinstance(layout, BlockLayout)
    weight, change = student.scales[name]
    scales = (weight.scales * (1 + change)).detach().cpu().numpy()
    most = np.finfo(layout.scale.numpy).max
    return np.asarray(np.clip(scales, -most, most).astype(layout.scale.numpy))


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
    """A copy of a graph that reads quantized weights and trained vectors as float tensors. names_by_key: the key of
    each of these tensors → the names of the parameters that read it. scaled: names of weights whose scales are trained.
    vectors: names of norms and biases that are trained."""

    graph: Graph
    names_by_key: Mapping[str, list[str]]
    scaled: set[str]
    vectors: set[str]


def copy_as_floats(
    graph: Graph, scaled: Iterable[str] | None = None, vectors: Iterable[str] | None = None
) -> FloatCopy:
    """Return a copy of `graph` that reads quantized weights and trained vectors as float tensors. scaled: names of
    weights whose scales are trained (None: `find_scaled_params`). vectors: names of norms and biases that are trained
    (None: `find_vector_params`)."""
    scales = set(find_scaled_params(graph) if scaled is None else scaled)
    trained = set(find_vector_params(graph) if vectors is None else vectors)
    recipes, names, read = dict[str, Recipe](), dict[str, list[str]](), dict[str, Recipe]()
    keys: dict[Recipe, str] = {}
    for name, param in graph.params.items():
        if is_quantized(param):
            # A weight with two names is one tensor.
            key = keys.setdefault(param.recipe, f"quantized {name}")
        elif name in trained:
            key = f"vector {name}"
        else:
            continue
        recipes[key] = param.recipe
        names.setdefault(key, []).append(name)
        read[name] = Source(key)
    floats = graph.clone(read)
    floats.reader = _EvaluatingReader(graph.reader, recipes)
    return FloatCopy(floats, names, scales, trained)


def open_student(graph: Graph, floats: FloatCopy, forms: Mapping[str, Graph], device: torch.device | str) -> Student:
    """Return the student of the quantized `graph` on `device`. floats: `copy_as_floats(graph)`. forms: graphs by name,
    the result of compiling `floats.graph` for target torch; ``forms[MODEL]`` is built. A weight is trained only if that
    graph reads it unchanged from `floats`."""
    module = build_module(forms, device=device).requires_grad_(False)
    scales: dict[str, tuple[ScaledCodes, nn.Parameter]] = {}
    trained: dict[str, nn.Parameter] = {}
    for path, param in lower(forms[MODEL]).program.weights.items():
        if not isinstance(param.recipe, Source) or param.recipe.key not in floats.names_by_key:
            continue
        names, (home, _, attribute) = floats.names_by_key[param.recipe.key], path.rpartition(".")
        place = module.get_submodule(home)
        if names[0] in floats.vectors:
            trained[names[0]] = getattr(place, attribute).requires_grad_(True)
        elif names[0] in floats.scaled:
            pair = _parametrize(place, attribute, graph.params[names[0]])
            scales.update((name, pair) for name in names)
    return Student(graph, module, scales, trained)


def _parametrize(home: nn.Module, attribute: str, param: Param) -> tuple[ScaledCodes, nn.Parameter]:
    """Replace the weight `attribute` of the module `home` by a parametrization with the codes and scales of `param`.
    Return (the parametrization, its trainable parameter: the relative change of the scales)."""
    recipe, reader = param.recipe, param.graph.reader
    layout = find_block_layout(recipe, reader)
    assert isinstance(layout, BlockLayout)
    scales = Stored(recipe, "steps").evaluate(reader)
    groups = scales.shape[-1]
    codes = unpack_codes(Stored(recipe, "packed").evaluate(reader), layout.bits, groups * layout.group)
    centred = codes.reshape(*scales.shape, layout.group).astype(np.int16)
    if layout.has_zeros:
        centred -= unpack_codes(Stored(recipe, "points").evaluate(reader), layout.bits, groups)[..., None]
    else:
        centred -= layout.middle
    if layout.bits < 8 or not layout.has_zeros:  # −128 … 127
        centred = centred.astype(np.int8)
    device = getattr(home, attribute).device
    steps = torch.from_numpy(np.array(scales, np.float32))
    weight = ScaledCodes(torch.from_numpy(centred), steps, int(param.shape[-1]))
    change = nn.Parameter(torch.zeros(scales.shape, device=device))
    delattr(home, attribute)
    setattr(home, attribute, change)
    parametrize.register_parametrization(home, attribute, weight.to(device), unsafe=True)
    return weight, change
