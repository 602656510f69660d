"""Apply a family table to a config and a checkpoint: build the model, whose parameters read checkpoint tensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes.readers import TensorReader
from weft.ir.recipes.streams import stream_rows
from weft.ir.storage.documents import quote_value

from .config_keys import RULE_ERRORS, find_unread_keys
from .left_out import LeftOut, find_unread_modules, find_unread_settings
from .tables.family import Config, Model, Table, blame_keys
from .tables.settings import Settings, build

_DEPTHS = (  # config keys that count layers
    *("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"),
    *("n_layer", "n_layers", "block_count"),
)
MOST_LAYERS = 4096  # if layers share weights, or there is no checkpoint with at least a tensor per layer


@dataclass(frozen=True)
class LoadedModel:
    """A graph with its weights, and the module and settings that it was built from.

    unread: checkpoint keys that nothing reads, except `ignored`. ignored: unread keys that match the table's patterns
        `unused` or `idle`. idle: the ignored keys that match `idle`.
    left_out: unread tensors by module, unread config keys, and other parts of the source that the graph lacks.
    """

    graph: Graph
    module: Model
    settings: Settings
    unread: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def load(table: Table, config: Config, reader: TensorReader, source: str) -> LoadedModel:
    """Build the model of `config` by `table`; its parameters read the tensors of `reader` on demand.

    Raises:
        WeftError: if a setting of `config` (called `source`) or a tensor is missing, not supported or does not fit.
    """
    keys, keys_read = frozenset(reader.keys()), set[str]()
    _check_depth(table, config, keys, source)

    def check(param: Param) -> None:
        _check_param(param, reader, keys)
        keys_read.update(param.recipe.sources())

    table = _untie_stored(table, table.read(config, keys, source), reader, keys)
    loaded = build_from_table(table, config, keys, source, check)
    loaded.graph.reader = reader
    rest = sorted(keys - keys_read)
    idle, unused = ({k for p in patterns for k in fnmatch.filter(rest, p)} for patterns in (table.idle, table.unused))
    unread = [k for k in rest if k not in idle | unused]
    settings = find_unread_keys(config, table.model_types[0], table.inert, lambda c: table.read(c, keys, source))
    left_out = [*find_unread_modules(unread, keys_read), *find_unread_settings(settings)]
    return replace(loaded, unread=unread, ignored=sorted(idle | unused), idle=sorted(idle), left_out=left_out)


def _untie_stored(table: Table, settings: Settings, reader: TensorReader, keys: frozenset[str]) -> Table:
    """Return `table`, changed if the config ties the head to the embedding, but the checkpoint has a tensor for the
    head. If that tensor differs from the embedding, the head becomes separate, as in transformers; if there is no
    embedding tensor, the embedding reads the head's."""
    if not settings.tie:
        return table
    side = "decoder." if settings.kind == "encoder-decoder" else ""
    head, embed = (table.recipe(f"{name}.weight", settings, keys) for name in (f"{side}lm_head", "embed"))
    if head is None or embed is None or not keys.issuperset(head.sources()):
        return table
    if keys.isdisjoint(embed.sources()):
        return replace(table, names={**table.names, "embed": table.names[f"{side}lm_head"]})
    equal = head.shape(reader) == embed.shape(reader) and all(
        np.array_equal(*pair) for pair in zip(stream_rows(head, reader), stream_rows(embed, reader), strict=True)
    )
    without_tie = {name: rule for name, rule in table.from_keys.items() if name != "tie"}
    return table if equal else replace(table, settings={**table.settings, "tie": False}, from_keys=without_tie)


def _check_depth(table: Table, config: Config, keys: frozenset[str], source: str) -> None:
    """Raise WeftError if `config` has more layers than `keys` has tensors: rules would loop over all these layers.
    Without tensors, and for layers that share weights, the limit is `MOST_LAYERS`."""
    limit = MOST_LAYERS if not keys or "shared_layers" in table.settings else len(keys)
    for name in _DEPTHS:
        value = config.get(name)
        if isinstance(value, int) and value > limit:
            reason = f"its checkpoint has only {limit} tensors" if limit == len(keys) else f"the limit is {limit}"
            cause = "the config is damaged or of another model"
            raise WeftError(f"{source}: {name}={quote_value(value)} is too large: {reason}; {cause}")


def build_from_table(
    table: Table, config: Config, keys: frozenset[str], source: str, check: Callable[[Param], None] = lambda param: None
) -> LoadedModel:
    """Build the model of `config` by `table`; its recipes name tensors of a checkpoint with `keys`, but read none.

    A tensor that `keys` lacks has its expected name in the recipe. `check` gets each parameter that the table names.

    Raises:
        WeftError: if a setting of `config` (called `source`) is missing or not supported, or `table` lacks a parameter.
    """
    settings = table.read(config, keys, source)

    def model(config: Config) -> tuple[Model, Graph]:
        module = build(table.read(config, keys, source))
        return module, module.graph(name=table.model_types[0])

    try:
        module, graph = model(config)
    except (WeftError, *RULE_ERRORS) as e:
        raise WeftError(f"{source}: {blame_keys(e, model, config)}") from e
    for param in graph.params.values():
        recipe = table.recipe(param.name, settings, keys)
        if recipe is not None:
            param.recipe = recipe
            check(param)
        elif not param.recipe.is_constant:
            raise WeftError(
                f"parameter {param.name} has no checkpoint name in the table of {table.model_types[0]} models: add one"
            )
    return LoadedModel(graph, module, settings)


def _check_param(param: Param, reader: TensorReader, keys: frozenset[str]) -> None:
    for key in param.recipe.sources():
        if key not in keys:
            raise WeftError(
                f"{reader.path} has no tensor {key!r}, which parameter {param.name} reads; "
                "the checkpoint is incomplete, or its config is of another model"
            )
        if not (reader.dtype(key).is_float or reader.dtype(key).is_block):
            raise WeftError(
                f"{reader.path}: tensor {key!r} has dtype {reader.dtype(key)}, but weights must be floats: the "
                "checkpoint may be quantized by a tool that weft does not support"
            )
    tensors = ", ".join(f"{key} {list(reader.shape(key))}" for key in dict.fromkeys(param.recipe.sources()))
    try:
        shape = param.recipe.shape(reader)
    except WeftError as e:
        raise WeftError(f"{reader.path}: {tensors} does not fit {param.name} {list(param.shape)}: {e}") from e
    if shape != param.shape:
        raise WeftError(f"{reader.path}: {tensors} does not fit {param.name} {list(param.shape)} of the config")
