"""Family tables: where the settings and the parameters of a model family are found."""

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
from weft.ir.storage.documents import fits, shown

from ...dsl import AudioEncoder, Decoder, Encoder, EncoderDecoder, ImageEncoder
from ..config_keys import normalized
from .settings import Settings

Config = Mapping[str, Any]
Rule = Callable[[Config], Any]  # of a setting
Model = Decoder | Encoder | EncoderDecoder | ImageEncoder | AudioEncoder
REQUIRED = object()
SENTENCE = "pooling of sentence-transformers"  # the key of a config under which its folder's reader puts it
_OUTSIDE = (  # of base models
    *("lm_head", "embed_out", "decoder.weight", "decoder.bias", "score", "classifier", "qa_outputs"),
    *("text_projection", "visual_projection"),
)
_ABSENT = object()
UNFIT = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)  # what a wrong value raises somewhere
_HINTS = get_type_hints(Settings)


@dataclass(frozen=True)
class Fetch:
    """The tensors that a checkpoint has under `keys`, by names without `prefix` and with {i} for `layer`."""

    keys: frozenset[str]
    prefix: str
    aliases: Mapping[str, str]
    layer: str

    def __call__(self, name: str) -> Recipe:
        """The tensor `name`, whether or not the checkpoint has it."""
        tried = self._spellings(name)
        # Where the checkpoint has no spelling of it, this is the name that errors and exports use.
        usual = tried[0 if name.startswith(_OUTSIDE) else 1]
        return Source(next((k for k in tried if k in self.keys), usual))

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
    """A setting read from the first of the config keys `keys` that is there and not null, or its `reciprocal`."""

    keys: tuple[str, ...]
    default: Any = REQUIRED
    reciprocal: bool = False

    def __call__(self, config: Config) -> Any:
        absent = _ABSENT if self.reciprocal else None  # null has no reciprocal: that is an error, no default
        value = next((config[key] for key in self.keys if config.get(key, absent) is not absent), self.default)
        if value is REQUIRED:
            raise WeftError(f"no key {self.keys[0]!r}")
        return 1 / value if self.reciprocal else value


def key(*keys: str, default: Any = REQUIRED, reciprocal: bool = False) -> Lookup:
    """The setting under the first of `keys` that is present; required unless there is a `default`."""
    return Lookup(keys, default, reciprocal)


def required(config: Config, *names: str) -> tuple[Any, ...]:
    """The values under the keys `names`, all of which must be there."""
    return tuple(key(name)(config) for name in names)


def in_layers(make: Rule, chosen: Callable[[Config], Iterable[bool]]) -> Rule:
    """The rule for a setting that is what `make` says in the layers that are `chosen`, and None in the others."""

    def rule(config: Config) -> tuple[Any, ...]:
        has = list(chosen(config))
        made = make(config) if any(has) else None
        return tuple(made if h else None for h in has)

    return rule


_OWN = ("transformers", "gguf", "loader")  # fields that `but` does not inherit: another class or loader may differ


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of differences.

    `model_types`: its names in files. `settings`: each setting's `key` in the config, a constant, or a function of the
    config. `names`: checkpoint name (or `Template`) of each parameter, {i} being the layer; a name without its last
    part stands for weight and bias. Checkpoint names may stand with or without `prefix`. `found`: settings that the
    checkpoint's keys decide. `unused`: patterns of checkpoint keys that are known to be of no use (masks, buffers,
    training heads), `idle` of those that an export keeps all the same, as transformers asks for them. `refuse`: config
    keys (`outer.inner` for one inside a mapping) and the values of each that the table can express. `inert`: config
    keys that change nothing of what such models compute. `aliases`: other spellings inside checkpoint names.
    """

    model_types: tuple[str, ...]
    settings: Mapping[str, Any]
    names: Mapping[str, str | Template]
    prefix: str = ""
    found: Mapping[str, Callable[[frozenset[str]], Any]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    refuse: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inert: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def but(self, *model_types: str, **changes: Any) -> Self:
        """Return this table for other `model_types` with other settings or fields.

        Fields that are mappings are added to (None takes an entry out), others replaced; those of export are not
        inherited.
        """
        settings = dict(self.settings)
        values: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name in _OWN}
        for name, change in changes.items():
            if name in _HINTS:
                settings[name] = change
            elif isinstance(change, Mapping):
                values[name] = {k: v for k, v in {**getattr(self, name), **change}.items() if v is not None}
            else:
                values[name] = change
        return replace(self, model_types=model_types, settings=settings, **values)

    def read(self, config: Config, keys: frozenset[str], source: str) -> Settings:
        """The settings of a `config` (called `source` in errors) and the checkpoint names `keys`.

        Raises:
            WeftError: naming the key that is missing, refused or has a value of no use.
        """
        for name, allowed in self.refuse.items():
            given = _lookup(config, name, source)
            if given is not _ABSENT and given not in allowed:
                raise WeftError(f"{source}: {name}={given!r} is not supported for {self.model_types[0]} models")
        values: dict[str, Any] = {}
        for f in fields(Settings):
            if f.name in self.found:
                values[f.name] = self.found[f.name](keys)
            elif f.name in self.settings:
                rule = partial(_setting, f.name, self.settings[f.name])
                try:
                    values[f.name] = rule(config)
                except (WeftError, *UNFIT) as e:
                    told = blaming(e, rule, config)
                    raise WeftError(f"{source}: {told} (needed for {f.name} of a {self.model_types[0]} model)") from e
        return Settings(**values | ({"sentence": config[SENTENCE]} if SENTENCE in config else {}))

    def recipe(self, parameter: str, settings: Settings, keys: frozenset[str]) -> Recipe | None:
        """The recipe of `parameter` from a checkpoint that has `keys`; None if the table has no name for it."""
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "{i}", parameter)
        index = re.search(r"(?<=\.)\d+(?=\.)", parameter)
        stem, _, part = pattern.rpartition(".")
        fetch = Fetch(keys, self.prefix, self.aliases, index.group() if index else "")
        # The full name goes first: it may say something else of a bias than of the weight.
        for found, suffix in ((self.names.get(pattern), ""), (self.names.get(stem), f".{part}")):
            if found is not None:
                return fetch(found + suffix) if isinstance(found, str) else found(fetch, part, settings)
        return None

    def says(self, s: Settings) -> dict[str, Any]:
        """Return the config keys that settings of `s` stand under; one for several biases is true if any is there."""
        said: dict[str, Any] = {}
        for name, rule in self.settings.items():
            if isinstance(rule, Lookup):
                value = getattr(s, name)
                said[rule.keys[0]] = said.get(rule.keys[0]) or (1 / value if rule.reciprocal and value else value)
        return said


@dataclass(frozen=True)
class Loader:
    """The models that llama.cpp's loader of an architecture takes; the default is dense and as plain as Llama.

    `biases` are those it needs, `optional_biases` those it takes besides: letters for those of n norms, q queries (keys
    and values), o attention outputs, f feed-forwards, h the head. `experts` are none, optional or required. `head` is
    tied, if the embedding is always read as the head too, own, if the file must have one, or any.
    """

    biases: str = ""
    optional_biases: str = ""
    experts: str = "none"
    head: str = "any"
    partial_rope: bool = False  # heads that rotate in part
    free_heads: bool = False  # heads of another size than the width divided by their number
    qk_norm: bool = False
    windows: bool = False  # others read a window from the file, but do not apply it


@dataclass(frozen=True, kw_only=True)
class Architecture(Table):
    """A table of llama.cpp's keys and tensor names; models are exported to it if it has a `loader`."""

    loader: Loader | None = None


@dataclass(frozen=True, kw_only=True)
class Family(Table):
    """All that weft knows of a model family: the table of its Hugging Face folders and what it is elsewhere.

    `transformers` is the class that loads an exported folder (without one nothing is exported to the family), `gguf`
    the architecture of its GGUF files, `tasks` the `Head` of each class, by what its name ends with.
    """

    transformers: str = ""
    gguf: Architecture | None = None
    tasks: Mapping[str, Any] = field(default_factory=dict)

    def read(self, config: Config, keys: frozenset[str], source: str) -> Settings:
        """The settings of a `config`; of a setting spelled twice the spelling that counts in transformers."""
        return super().read(normalized(config, self.model_types[0]), keys, source)


class Families(Registry[Family]):
    """Families by the model_type that a config states."""

    def register(self, *tables: object) -> None:
        """Add the families among `tables`, each under all its model_types.

        Raises:
            DeclaredTwice: if a name is taken by another.
        """
        for table in tables:
            if isinstance(table, Family):
                for name in table.model_types:
                    self.add(name, table)


def _lookup(config: Config, path: str, source: str) -> Any:
    """The value under `path`, or at the dotted `path`, or _ABSENT."""
    *outer, last = [path] if path in config else path.split(".")  # keys of GGUF files have dots of their own
    for name in outer:
        inner = config.get(name) or {}
        if not isinstance(inner, Mapping):
            raise WeftError(f"{source}: {name}={inner!r} is no mapping")
        config = inner
    return config.get(last, _ABSENT)


def _setting(name: str, rule: Any, config: Config) -> Any:
    """Evaluate `rule`, a constant or a function of the config, for the setting `name`."""
    value = rule(config) if callable(rule) else rule
    if not fits(value, _HINTS[name]):
        raise WeftError(f"{name}={shown(value)} should be of type {Settings.__annotations__[name]}")
    return value


def blaming(e: Exception, make: Rule, config: Config) -> WeftError:
    """`e`, which `make(config)` raised, after the keys to blame: without them there is no such failure.

    Positive whole numbers, which are of the right type, are blamed where the error has them and another number changes
    it.
    """
    numbers = set(re.findall(r"\d+", str(e)))
    blamed = []
    for name, value in config.items():
        if isinstance(value, int) and value > 0:
            other = {**config, name: value + 1} if str(value) in numbers else config
        else:
            other = {n: v for n, v in config.items() if n != name}
        if other is not config and _failure(make, other) != str(e):
            blamed.append(name)
    values = (f"{k}={reprlib.repr(config[k])}" for k in blamed)
    return WeftError(": ".join((*values, str(e) if isinstance(e, WeftError) else f"{type(e).__name__}: {e}")))


def _failure(make: Rule, config: Config) -> str | None:
    """Return the error of `make(config)`; None if it succeeds."""
    try:
        make(config)
    except (WeftError, *UNFIT) as e:
        return str(e)
    return None
