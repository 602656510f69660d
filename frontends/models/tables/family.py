"""Family tables: where the settings and parameters of a model family are in configs and checkpoints."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Self, get_type_hints

from weft.ir.errors import WeftError
from weft.ir.recipes import Recipe, Source
from weft.ir.registry import Registry
from weft.ir.storage.documents import matches_type, quote_value

from ...dsl import AudioEncoder, Decoder, Encoder, EncoderDecoder, ImageEncoder
from ..config_keys import normalize_config
from .settings import Settings

Config = Mapping[str, Any]
Rule = Callable[[Config], Any]  # the value of a setting, by the config
Model = Decoder | Encoder | EncoderDecoder | ImageEncoder | AudioEncoder
REQUIRED = object()
SENTENCE = "pooling of sentence-transformers"  # the config key under which the folder's reader puts the pooling
_OUTSIDE = (  # names outside base models
    *("lm_head", "embed_out", "decoder.weight", "decoder.bias", "score", "classifier", "qa_outputs"),
    *("text_projection", "visual_projection"),
)
_ABSENT = object()
RULE_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)  # raised by invalid values in rules
_HINTS = get_type_hints(Settings)


@dataclass(frozen=True)
class Fetch:
    """The tensors of a checkpoint by template name: without `prefix`, and with {i} for the layer number `layer`.

    `keys` are the tensors that the checkpoint has, `aliases` other spellings inside names.
    """

    keys: frozenset[str]
    prefix: str
    aliases: Mapping[str, str]
    layer: str

    def __call__(self, name: str) -> Recipe:
        """Return the recipe that reads the tensor `name`, whether or not the checkpoint has it."""
        spellings = self._spellings(name)
        # Errors and exports use this name if the checkpoint has no spelling of it.
        usual = spellings[0 if name.startswith(_OUTSIDE) else 1]
        return Source(next((k for k in spellings if k in self.keys), usual))

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has the tensor `name`."""
        return not self.keys.isdisjoint(self._spellings(name))

    def _spellings(self, name: str) -> tuple[str, ...]:
        full = name.replace("{i}", self.layer)
        other = next((full.replace(a, b) for a, b in self.aliases.items() if a in full), full)
        return full, self.prefix + full, other, self.prefix + other


Template = Callable[[Fetch, str, Settings], Recipe]  # fetch, "weight" or "bias", settings -> recipe
Names = dict[str, str | Template]


@dataclass(frozen=True)
class Lookup:
    """A rule that reads the first of the config keys `keys` that is not null; `reciprocal` returns 1/value."""

    keys: tuple[str, ...]
    default: Any = REQUIRED
    reciprocal: bool = False

    def __call__(self, config: Config) -> Any:
        absent = _ABSENT if self.reciprocal else None  # null has no reciprocal: an error rather than the default
        value = next((config[key] for key in self.keys if config.get(key, absent) is not absent), self.default)
        if value is REQUIRED:
            raise WeftError(f"no key {self.keys[0]!r}")
        return 1 / value if self.reciprocal else value


def key(*keys: str, default: Any = REQUIRED, reciprocal: bool = False) -> Lookup:
    """Return the rule that reads the first of `keys` that is present; without a `default`, one must be."""
    return Lookup(keys, default, reciprocal)


def read_required(config: Config, *names: str) -> tuple[Any, ...]:
    """Return the values under the keys `names`; raise WeftError if one is missing."""
    return tuple(key(name)(config) for name in names)


def mask_layers(make: Rule, chosen: Callable[[Config], Iterable[bool]]) -> Rule:
    """Return the rule whose value per layer is `make(config)` if `chosen(config)` is true for the layer, else None."""

    def rule(config: Config) -> tuple[Any, ...]:
        has = list(chosen(config))
        value = make(config) if any(has) else None
        return tuple(value if h else None for h in has)

    return rule


_NOT_INHERITED = ("transformers", "gguf", "loader")  # `derive` drops these fields: another class or loader may differ


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the differences of a family from plain Llama.

    model_types: its names in files. settings: for each setting a config `key`, a constant, or a function of the config.
    names: checkpoint name (or `Template`) of each parameter, with {i} for the layer; a name without its last part
    covers weight and bias. prefix: optional prefix of checkpoint names. aliases: other spellings inside checkpoint
    names.
    from_keys: settings that follow from the checkpoint's keys.
    unused: patterns of checkpoint keys that no model needs (masks, buffers, training heads). idle: those of them that
    an export keeps because transformers asks for them.
    refuse: config keys (`outer.inner` in a mapping) and the only values that the table can express.
    inert: config keys without effect on the outputs.
    """

    model_types: tuple[str, ...]
    settings: Mapping[str, Any]
    names: Mapping[str, str | Template]
    prefix: str = ""
    from_keys: Mapping[str, Callable[[frozenset[str]], Any]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    refuse: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inert: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def derive(self, *model_types: str, **changes: Any) -> Self:
        """Return a copy of this table for other `model_types`, with other settings or fields.

        Fields that are mappings are extended (None removes an entry), all others replaced; fields for export are not
        inherited.
        """
        settings = dict(self.settings)
        values: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name in _NOT_INHERITED}
        for name, change in changes.items():
            if name in _HINTS:
                settings[name] = change
            elif isinstance(change, Mapping):
                values[name] = {k: v for k, v in {**getattr(self, name), **change}.items() if v is not None}
            else:
                values[name] = change
        return replace(self, model_types=model_types, settings=settings, **values)

    def read(self, config: Config, keys: frozenset[str], source: str) -> Settings:
        """Return the settings of a `config` (called `source` in errors) and a checkpoint with the names `keys`.

        Raises:
            WeftError: naming the key that is missing, refused or has an invalid value.
        """
        for name, allowed in self.refuse.items():
            value = _lookup(config, name, source)
            if value is not _ABSENT and value not in allowed:
                raise WeftError(f"{source}: {name}={value!r} is not supported for {self.model_types[0]} models")
        values: dict[str, Any] = {}
        for f in fields(Settings):
            if f.name in self.from_keys:
                values[f.name] = self.from_keys[f.name](keys)
            elif f.name in self.settings:
                rule = partial(_evaluate, f.name, self.settings[f.name])
                try:
                    values[f.name] = rule(config)
                except (WeftError, *RULE_ERRORS) as e:
                    reason = blame_keys(e, rule, config)
                    raise WeftError(f"{source}: {reason} (needed for {f.name} of a {self.model_types[0]} model)") from e
        return Settings(**values | ({"sentence": config[SENTENCE]} if SENTENCE in config else {}))

    def recipe(self, parameter: str, settings: Settings, keys: frozenset[str]) -> Recipe | None:
        """Return the recipe of `parameter` from a checkpoint with `keys`; None if the table has no name for it."""
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "{i}", parameter)
        index = re.search(r"(?<=\.)\d+(?=\.)", parameter)
        stem, _, part = pattern.rpartition(".")
        fetch = Fetch(keys, self.prefix, self.aliases, index.group() if index else "")
        # The full name comes first: bias and weight may have different entries.
        for entry, suffix in ((self.names.get(pattern), ""), (self.names.get(stem), f".{part}")):
            if entry is not None:
                return fetch(entry + suffix) if isinstance(entry, str) else entry(fetch, part, settings)
        return None

    def to_config(self, s: Settings) -> dict[str, Any]:
        """Return the config keys for the settings `s`; a key for several biases is true if one exists."""
        config: dict[str, Any] = {}
        for name, rule in self.settings.items():
            if isinstance(rule, Lookup):
                value = getattr(s, name)
                config[rule.keys[0]] = config.get(rule.keys[0]) or (1 / value if rule.reciprocal and value else value)
        return config


@dataclass(frozen=True)
class Loader:
    """The models that llama.cpp's loader of an architecture supports; the default is dense models as plain as Llama.

    biases, optional_biases: required, and further supported biases, as letters: n norms, q queries (keys and values),
        o attention outputs, f feed-forwards, h the head. experts: none, optional or required.
    head: tied (always the embedding), own (the file must have one), or any.
    """

    biases: str = ""
    optional_biases: str = ""
    experts: str = "none"
    head: str = "any"
    partial_rope: bool = False  # only a part of each head is rotated
    free_heads: bool = False  # heads of another size than the width divided by their number
    qk_norm: bool = False
    windows: bool = False  # without it, a window in the file is read but not applied


@dataclass(frozen=True, kw_only=True)
class GGUFArchitecture(Table):
    """A table of llama.cpp's keys and tensor names; only architectures with a `loader` are export targets."""

    loader: Loader | None = None


@dataclass(frozen=True, kw_only=True)
class Family(Table):
    """A model family: the table of its Hugging Face folders, and its classes and files in other libraries.

    transformers: class that loads an exported folder; without it, nothing is exported to the family.
    gguf: architecture of its GGUF files. tasks: the `Head` of each class, by the suffix of the class name.
    """

    transformers: str = ""
    gguf: GGUFArchitecture | None = None
    tasks: Mapping[str, Any] = field(default_factory=dict)

    def read(self, config: Config, keys: frozenset[str], source: str) -> Settings:
        """Return the settings of a `config`; of two spellings, transformers' choice counts."""
        return super().read(normalize_config(config, self.model_types[0]), keys, source)


class Families(Registry[Family]):
    """Families by the model_type that a config states."""

    def register(self, *tables: object) -> None:
        """Register the families among `tables`, each under all its model_types.

        Raises:
            DeclaredTwice: if a name is taken by another.
        """
        for table in tables:
            if isinstance(table, Family):
                for name in table.model_types:
                    self.add(name, table)


def _lookup(config: Config, path: str, source: str) -> Any:
    """Return the value of the key `path`, else the value at the dotted path `path`, else _ABSENT."""
    *outer, last = [path] if path in config else path.split(".")  # keys of GGUF files contain dots
    for name in outer:
        inner = config.get(name) or {}
        if not isinstance(inner, Mapping):
            raise WeftError(f"{source}: {name}={inner!r} is not a mapping")
        config = inner
    return config.get(last, _ABSENT)


def _evaluate(name: str, rule: Any, config: Config) -> Any:
    """Return the value of `rule` (constant or function) for the setting `name`, type-checked."""
    value = rule(config) if callable(rule) else rule
    if not matches_type(value, _HINTS[name]):
        raise WeftError(f"{name}={quote_value(value)} should be of type {Settings.__annotations__[name]}")
    return value


def blame_keys(e: Exception, make: Rule, config: Config) -> WeftError:
    """Return the error `e` of `make(config)` as a WeftError that names the config keys without which it does not occur.

    A positive integer is valid in itself, so it is named only if the error contains it and changes with another number.
    """
    numbers = set(re.findall(r"\d+", str(e)))
    culprits = []
    for name, value in config.items():
        if isinstance(value, int) and value > 0:
            variant = {**config, name: value + 1} if str(value) in numbers else config
        else:
            variant = {n: v for n, v in config.items() if n != name}
        if variant is not config and _find_error(make, variant) != str(e):
            culprits.append(name)
    values = (f"{k}={reprlib.repr(config[k])}" for k in culprits)
    return WeftError(": ".join((*values, str(e) if isinstance(e, WeftError) else f"{type(e).__name__}: {e}")))


def _find_error(make: Rule, config: Config) -> str | None:
    """Return the error message of `make(config)`; None if it succeeds."""
    try:
        make(config)
    except (WeftError, *RULE_ERRORS) as e:
        return str(e)
    return None
