"""Family tables applied to a config and a checkpoint: the model, its parameters pointing at the tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes.readers import TensorReader
from weft.ir.recipes.streams import stream
from weft.ir.storage.documents import shown

from .config_keys import unread_keys
from .left_out import LeftOut, unread_settings, unread_tensors
from .tables.family import UNFIT, Config, Model, Table, blaming
from .tables.settings import Settings, build

_DEPTHS = (  # config keys that count layers
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "n_layer",
    "n_layers",
    "block_count",
)
MOST_LAYERS = 4096  # that share weights, or have none to be counted by


@dataclass(frozen=True)
class Loaded:
    """A model with its weights; `unread` keys of the checkpoint nothing reads, `ignored` and `idle` are declared so.

    `left_out` names the unread tensors by their modules, keys of the config, and what else the source holds.
    """

    graph: Graph
    module: Model
    settings: Settings
    unread: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def load(table: Table, config: Config, reader: TensorReader, source: str) -> Loaded:
    """Build the model of `config` and point its parameters at `reader`; `source` is what errors call the config.

    Raises:
        WeftError: if a setting is missing or not supported, or a tensor is missing or of another shape.
    """
    keys, read = frozenset(reader.keys()), set[str]()
    _check_depth(table, config, keys, source)

    def check(param: Param) -> None:
        _check(param, reader, keys)
        read.update(param.recipe.sources())

    table = _as_stored(table, table.read(config, keys, source), reader, keys)
    loaded = describe(table, config, keys, source, check)
    loaded.graph.reader = reader
    left = sorted(keys - read)
    idle, unused = ({k for p in patterns for k in fnmatch.filter(left, p)} for patterns in (table.idle, table.unused))
    unread = [k for k in left if k not in idle | unused]
    settings = unread_keys(config, table.model_types[0], table.inert, lambda varied: table.read(varied, keys, source))
    left_out = [*unread_tensors(unread, read), *unread_settings(settings)]
    return replace(loaded, unread=unread, ignored=sorted(idle | unused), idle=sorted(idle), left_out=left_out)


def _as_stored(table: Table, settings: Settings, reader: TensorReader, keys: frozenset[str]) -> Table:
    """Return `table` for a checkpoint that contradicts a config which ties the head to the embedding: with a head of
    its own, which transformers keeps, or with the shared matrix under the name of the head only."""
    if not settings.tie:
        return table
    side = "decoder." if settings.kind == "encoder-decoder" else ""
    head, embed = (table.recipe(f"{name}.weight", settings, keys) for name in (f"{side}lm_head", "embed"))
    if head is None or embed is None or not keys.issuperset(head.sources()):
        return table
    if keys.isdisjoint(embed.sources()):
        return replace(table, names={**table.names, "embed": table.names[f"{side}lm_head"]})
    same = head.shape(reader) == embed.shape(reader) and all(
        np.array_equal(*pair) for pair in zip(stream(head, reader), stream(embed, reader), strict=True)
    )
    apart = {name: rule for name, rule in table.found.items() if name != "tie"}
    return table if same else replace(table, settings={**table.settings, "tie": False}, found=apart)


def _check_depth(table: Table, config: Config, keys: frozenset[str], source: str) -> None:
    """Raise WeftError if `config` counts more layers than the tensors `keys` can be of, before a rule counts to it."""
    most = MOST_LAYERS if not keys or "shared_layers" in table.settings else len(keys)
    for name in _DEPTHS:
        value = config.get(name)
        if isinstance(value, int) and value > most:
            has = f"its checkpoint has {most} tensors in all" if most == len(keys) else f"{most} are the most"
            what = "the config is damaged or another model's"
            raise WeftError(f"{source}: {name}={shown(value)} layers, and {has}; {what}")


def describe(
    table: Table,
    config: Config,
    keys: frozenset[str],
    source: str,
    check: Callable[[Param], None] = lambda param: None,
) -> Loaded:
    """The model of `config` whose parameters name the tensors of a checkpoint that has `keys`, or, where it has no
    such, the tensors that it should have; `check` sees each parameter that is named.

    Raises:
        WeftError: if a setting is missing or not supported.
    """
    settings = table.read(config, keys, source)

    def model(config: Config) -> tuple[Model, Graph]:
        module = build(table.read(config, keys, source))
        return module, module.graph(name=table.model_types[0])

    try:
        module, graph = model(config)
    except (WeftError, *UNFIT) as e:
        raise WeftError(f"{source}: {blaming(e, model, config)}") from e
    for param in graph.params.values():
        recipe = table.recipe(param.name, settings, keys)
        if recipe is not None:
            param.recipe = recipe
            check(param)
        elif not param.recipe.constant:
            raise WeftError(
                f"the table of {table.model_types[0]} models says no checkpoint name for parameter {param.name}"
            )
    return Loaded(graph, module, settings)


def _check(param: Param, reader: TensorReader, keys: frozenset[str]) -> None:
    for key in param.recipe.sources():
        if key not in keys:
            raise WeftError(
                f"{reader.path} has no tensor {key!r}, which parameter {param.name} is read from; "
                "either the checkpoint is incomplete or its config is another model's"
            )
        if not (reader.dtype(key).is_float or reader.dtype(key).is_block):
            raise WeftError(
                f"{reader.path}: tensor {key!r} holds {reader.dtype(key)}, but a weight must hold floats; "
                "was the checkpoint quantized by another tool?"
            )
    read = ", ".join(f"{key} {list(reader.shape(key))}" for key in dict.fromkeys(param.recipe.sources()))
    try:
        shape = param.recipe.shape(reader)
    except WeftError as e:
        raise WeftError(f"{reader.path}: {read} does not fit {param.name} {list(param.shape)}: {e}") from e
    if shape != param.shape:
        raise WeftError(f"{reader.path}: {read} does not fit {param.name}, which the config makes {list(param.shape)}")
