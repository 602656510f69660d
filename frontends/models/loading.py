"""Family tables applied to a config and a checkpoint: the model, its parameters pointing at the tensors."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from weft.ir.documents import shown
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes import Recipe
from weft.ir.recipes.readers import TensorReader

from .tables.family import UNFIT, Config, Fetch, Model, Table, blaming
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
    """A model with its weights; `unread` keys of the checkpoint nothing reads, `ignored` and `idle` are declared so."""

    graph: Graph
    module: Model
    settings: Settings
    unread: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)


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

    loaded = describe(table, config, keys, source, check)
    loaded.graph.reader = reader
    left = sorted(keys - read)
    idle, unused = ({k for p in patterns for k in fnmatch.filter(left, p)} for patterns in (table.idle, table.unused))
    unread = [k for k in left if k not in idle | unused]
    return replace(loaded, unread=unread, ignored=sorted(idle | unused), idle=sorted(idle))


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
        recipe = _recipe(table, settings, param, keys)
        if recipe is not None:
            param.recipe = recipe
            check(param)
    return Loaded(graph, module, settings)


def _recipe(table: Table, settings: Settings, param: Param, keys: frozenset[str]) -> Recipe | None:
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "{i}", param.name)
    index = re.search(r"(?<=\.)\d+(?=\.)", param.name)
    stem, _, part = pattern.rpartition(".")
    fetch = Fetch(keys, table.prefix, table.aliases, index.group() if index else "")
    # The full name goes first: it may say something else of a bias than of the weight.
    for found, suffix in ((table.names.get(pattern), ""), (table.names.get(stem), f".{part}")):
        if isinstance(found, str):
            return fetch(found + suffix)
        if found is not None:
            return found(fetch, part, settings)
    if not param.recipe.constant:
        raise WeftError(
            f"the table of {table.model_types[0]} models says no checkpoint name for parameter {param.name}"
        )
    return None


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
