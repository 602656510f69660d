"""Find the families that read a folder of an unknown model_type best, by its config keys and its tensors."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.graph import Param
from weft.ir.recipes.readers import TensorReader

from .config_keys import RecordingConfig, explain, normalize_config
from .families import FAMILIES
from .left_out import summarize
from .loading import build_from_table
from .tables.family import Config, Family

LAYERS = 2  # layers to compare: the tensors of all others have the same names


@dataclass(frozen=True)
class Resemblance:
    """The degree to which a family fits a folder; a higher `score` is better, 1 is perfect.

    parameters: number of parameters of its model. n_matched: number of them whose tensors exist with the right shapes.
    unread: patterns of checkpoint tensors that the family does not read. ignored: config keys that it does not read.
    """

    family: str
    n_matched: int
    parameters: int
    unread: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    score: float = 0.0

    def __str__(self) -> str:
        is_complete = self.n_matched == self.parameters
        parts = ["all parameters fit" if is_complete else f"{self.n_matched} of {self.parameters} parameters fit"]
        if self.unread:
            parts.append(f"tensors it does not read: {summarize(self.unread, 4)}")
        if self.ignored:
            parts.append(f"config keys it does not read: {summarize(self.ignored, 4)}")
        return f"{self.family} ({'; '.join(parts)})"


def find_closest(config: Config, reader: TensorReader, most: int = 3) -> list[Resemblance]:
    """Return at most `most` families with a score over 0.5 for a folder with `config` and `reader`, best first."""
    stored = reader.keys()
    short, keys = _shorten_config(config), frozenset(key for key in stored if _find_layer(key) < LAYERS)
    tables = [table for name, table in FAMILIES.items() if name == table.model_types[0]]
    candidates = [_measure(table, short, keys, reader) for table in tables]
    matches = sorted((r for r in candidates if r is not None and r.score > 0.5), key=lambda r: -r.score)
    return matches[:most]


def _measure(family: Family, config: Config, keys: frozenset[str], reader: TensorReader) -> Resemblance | None:
    """Return how well `family` fits `config` and the tensors `keys` of `reader`; None if it cannot build a model."""
    keys_read, n_matched, parameters = set[str](), 0, 0

    def check(param: Param) -> None:
        nonlocal n_matched, parameters
        parameters += 1
        sources = set(param.recipe.sources())
        keys_read.update(sources)
        with contextlib.suppress(WeftError):  # raised for shapes that do not fit
            n_matched += sources <= keys and param.recipe.shape(reader) == param.shape

    recorded = RecordingConfig(normalize_config(config, family.model_types[0]))
    try:
        build_from_table(family, recorded, keys, "config.json", check)
    except WeftError:
        return None
    if not parameters:
        return None
    unread = sorted({re.sub(r"\.\d+\.", ".{i}.", k) for k in keys - keys_read})
    ignored = sorted(k for k in config if k not in recorded.read and not explain(k) and config[k] not in (None, False))
    score = n_matched / parameters - len(keys - keys_read) / max(len(keys), 1) - 0.002 * len(ignored)
    return Resemblance(family.model_types[0], n_matched, parameters, unread, ignored, score)


def _shorten_config(config: Config) -> dict[str, Any]:
    """Return `config` with at most `LAYERS` layers, also in lists with one value per layer."""
    depths = {
        k: v for k, v in config.items() if isinstance(v, int) and re.search(r"n_layers?$|num_(hidden_)?layers$", k)
    }
    full = max(depths.values(), default=LAYERS)
    lists = {k: v[:LAYERS] for k, v in config.items() if isinstance(v, list) and len(v) == full > LAYERS}
    return {**config, **{k: min(v, LAYERS) for k, v in depths.items()}, **lists}


def _find_layer(key: str) -> int:
    """Return the first number in the tensor name `key`, the number of its layer; 0 if there is none."""
    match = re.search(r"\.(\d+)\.", key)
    return int(match[1]) if match else 0
