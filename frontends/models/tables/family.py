"""Family tables: map config keys to settings (by rules), and parameters to checkpoint tensors (by names, templates)."""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, get_type_hints

from weft.ir.errors import WeftError
from weft.ir.recipes import Recipe, Source
from weft.ir.registry import Registry
from weft.ir.storage.documents import matches_type, quote_value

from ...dsl import AudioEncoder, Decoder, Encoder, EncoderDecoder, ImageEncoder
from ..config_keys import RULE_ERRORS, normalize_config, try_read
from .settings import Settings

Config = Mapping[str, Any]
Rule = Callable[[Config], Any]  # config -> value of a setting
Model = Decoder | Encoder | EncoderDecoder | ImageEncoder | AudioEncoder
REQUIRED = object()
BIASES = ("qkv_bias", "out_bias", "ffn_bias")  # settings of all linear layers in blocks
SENTENCE = "pooling of sentence-transformers"  # the config key under which the folder's reader puts the pooling
_OUTSIDE = (  # name prefixes of tensors that are not in the base model, so they never have its prefix
    *("lm_head", "embed_out", "decoder.weight", "decoder.bias", "score", "classifier", "qa_outputs"),
    *("text_projection", "visual_projection"),
)
_ABSENT = object()
_HINTS = get_type_hints(Settings)


@dataclass(frozen=True)
class Fetch:
    """A lookup of checkpoint tensors by their names in a table, which lack `prefix` and have {i} for a layer number.

    keys: names of all tensors in the checkpoint. aliases: substrings of table names, each with an alternative; the
    first that a name contains applies. layer: the number that replaces {i}.
    """

    keys: frozenset[str]
    prefix: str
    aliases: Mapping[str, str]
    layer: str

    def __call__(self, name: str) -> Recipe:
        """Return the recipe that reads the tensor `name`, in the first spelling that the checkpoint has. If it has
        none, the recipe reads `name` with `prefix`, or without for tensors outside the base model (such as lm_head)."""
        spellings = self._list_spellings(name)
        # Errors and exports use this name if the checkpoint has no spelling of it.
        default = spellings[0 if name.startswith(_OUTSIDE) else 1]
        return Source(next((k for k in spellings if k in self.keys), default))

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has the tensor `name` in one of its spellings."""
        return not self.keys.isdisjoint(self._list_spellings(name))

    def _list_spellings(self, name: str) -> tuple[str, ...]:
        full = name.replace("{i}", self.layer)
        alias = next((full.replace(a, b) for a, b in self.aliases.items() if a in full), full)
        return full, self.prefix + full, alias, self.prefix + alias


Template = Callable[[Fetch, str, Settings], Recipe]  # (fetch, last part of the parameter's name, settings) -> recipe
Names = dict[str, str | Template]
P = ParamSpec("P")
T = TypeVar("T")


def template(read: Callable[Concatenate[Fetch, str, Settings, P], Recipe]) -> Callable[P, Template]:
    """Convert `read` to a function of its arguments after the third, which returns a template that passes them on."""

    @functools.wraps(read)
    def make(*args: P.args, **options: P.kwargs) -> Template:
        return lambda fetch, part, settings: read(fetch, part, settings, *args, **options)

    return make


def rule(read: Callable[Concatenate[Config, P], T]) -> Callable[P, Callable[[Config], T]]:
    """Convert `read` to a function of its arguments after the first, which returns a rule that passes them on."""

    @functools.wraps(read)
    def make(*args: P.args, **options: P.kwargs) -> Callable[[Config], T]:
        return lambda config: read(config, *args, **options)

    return make


@dataclass(frozen=True)
class Lookup:
    """A rule: the value of the first key in `keys` that is not null, else `default`; `REQUIRED` is an error instead.
    With `reciprocal` it is 1 / value, and null is an error."""

    keys: tuple[str, ...]
    default: Any = REQUIRED
    reciprocal: bool = False

    def __call__(self, config: Config) -> Any:
        absent = _ABSENT if self.reciprocal else None  # null has no reciprocal: an error rather than the default
        value = next((config[key] for key in self.keys if config.get(key, absent) is not absent), self.default)
        if value is REQUIRED:
            raise WeftError(f"key {self.keys[0]!r} is missing")
        return 1 / value if self.reciprocal else value


def key(*keys: str, default: Any = REQUIRED, reciprocal: bool = False) -> Lookup:
    """Return the rule whose value is that of the first config key of `keys` that is not null, else `default`, else an
    error. With `reciprocal` the result is 1 / this value, and null is an error."""
    return Lookup(keys, default, reciprocal)


def read_required(config: Config, *names: str) -> tuple[Any, ...]:
    """Return the values of the keys `names` in `config`, in that order; raise WeftError if one is missing or null."""
    return tuple(key(name)(config) for name in names)


@rule
def read_same(config: Config, name: str, other: str) -> Any:
    """Return the value of the key `name`; raise WeftError if the key `other` states another value."""
    value, stated = key(name)(config), config.get(other)
    if stated not in (value, None):
        raise WeftError(f"{other}={stated!r} must be {name}={value}")
    return value


def set_all(value: Any, *names: str) -> dict[str, Any]:
    """Return a dict in which each of the settings `names` has the value `value`."""
    return dict.fromkeys(names, value)


@rule
def read_nested(config: Config, outer: str, name: str, default: Any = None) -> Any:
    """Return the entry `name` of the mapping `outer` in `config`, or `default` if it is missing or null."""
    inner = config.get(outer) or {}
    if not isinstance(inner, Mapping):
        raise WeftError(f"{outer}={inner!r} is not a mapping")
    value = inner.get(name)
    return default if value is None else value


@rule
def mask_layers(config: Config, make: Rule, chosen: Callable[[Config], Iterable[bool]]) -> tuple[Any, ...]:
    """Return one value per layer: `make(config)` where `chosen(config)` yields True, else None."""
    selected = list(chosen(config))
    value = make(config) if any(selected) else None
    return tuple(value if is_selected else None for is_selected in selected)


_NOT_INHERITED = ("transformers", "gguf", "loader")  # `derive` drops these fields: another class or loader may differ


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that describes a model family; settings that it omits have the defaults of `Settings`, those of Llama.

    model_types: names of the family in files, the main name first.
    settings: for each setting a constant or a rule (a function of the config, such as `key` returns).
    names: for each parameter a checkpoint name or a `Template`, with {i} for the layer number; an entry for a.b also
        covers a.b.weight and a.b.bias, unless these have entries of their own.
    prefix: prefix that checkpoint names may have in addition.
    aliases: substrings of checkpoint names, each with an alternative spelling.
    from_keys: for each setting that depends on the tensors in the checkpoint, a function of the set of their names.
    unused: glob patterns of checkpoint keys that no model needs (masks, buffers, training heads).
    idle: glob patterns of unused keys that an export keeps nevertheless, because transformers asks for them.
    refuse: config keys (`outer.inner` in a mapping), each with the only values that the table can express.
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

    def derive(self, *model_types: str, defaults: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> Self:
        """Return a copy of this table for `model_types`, with `changes` of settings or fields, by name.

        `defaults` maps a config key to a new default for the inherited `key` rules that read this key first. A field
        that is a mapping is extended (the value None removes an entry); any other field is replaced. The copy does not
        inherit the fields `transformers`, `gguf` and `loader`.
        """
        settings = {
            name: replace(rule, default=defaults.get(rule.keys[0], rule.default)) if isinstance(rule, Lookup) else rule
            for name, rule in self.settings.items()
        }
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
        """Return the settings of a model with `config` (errors call it `source`) and checkpoint tensors named `keys`.

        Raises:
            WeftError: naming the config key that is missing, refused or has an invalid value.
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
                rule = functools.partial(_evaluate, f.name, self.settings[f.name])
                try:
                    values[f.name] = rule(config)
                except (WeftError, *RULE_ERRORS) as e:
                    reason = blame_keys(e, rule, config)
                    raise WeftError(f"{source}: {reason} (for {f.name} of {self.model_types[0]} models)") from e
        return Settings(**values | ({"sentence": config[SENTENCE]} if SENTENCE in config else {}))

    def recipe(self, parameter: str, settings: Settings, keys: frozenset[str]) -> Recipe | None:
        """Return the recipe of `parameter` for a checkpoint with tensors named `keys`; None without an entry for it."""
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
        """Return a config from which the `Lookup` rules read the settings `s`; it has the first key of each rule. If
        several rules have the same first key, the first truthy value stays."""
        config: dict[str, Any] = {}
        for name, rule in self.settings.items():
            if isinstance(rule, Lookup):
                value = getattr(s, name)
                config[rule.keys[0]] = config.get(rule.keys[0]) or (1 / value if rule.reciprocal and value else value)
        return config


@dataclass(frozen=True)
class Loader:
    """The models that llama.cpp's loader of an architecture supports; by default dense models without biases.

    biases: letters of required biases: n (norms), q (queries, keys and values), o (attention outputs), f
        (feed-forwards), h (the head).
    optional_biases: letters of further biases that it supports. experts: none, optional or required.
    head: tied (the loader always uses the embedding), own (the file must have a separate head), or any.
    """

    biases: str = ""
    optional_biases: str = ""
    experts: str = "none"
    head: str = "any"
    partial_rope: bool = False  # supports heads of which only a part is rotated
    free_heads: bool = False  # supports heads of another size than the model's width divided by their number
    qk_norm: bool = False
    windows: bool = False  # if False, the loader reads a window from the file but does not apply it


@dataclass(frozen=True, kw_only=True)
class GGUFArchitecture(Table):
    """A table of an architecture of llama.cpp: GGUF metadata keys and tensor names. `loader`: the models that llama.cpp
    loads as this architecture; None: weft reads such files but does not write them."""

    loader: Loader | None = None


@dataclass(frozen=True, kw_only=True)
class Family(Table):
    """A model family: the table of its Hugging Face folders, its class in transformers and its GGUF architecture.

    transformers: class that loads an exported folder; if "", no model is exported as this family.
    gguf: table of its GGUF files, or None. tasks: the `Head` of each task class, keyed by the suffix of the
    class name (ForTokenClassification).
    """

    transformers: str = ""
    gguf: GGUFArchitecture | None = None
    tasks: Mapping[str, Any] = field(default_factory=dict)

    def read(self, config: Config, keys: frozenset[str], source: str) -> Settings:
        """Return the settings of `config`, as `Table.read`; if a setting is spelled twice, as transformers reads it."""
        return super().read(normalize_config(config, self.model_types[0]), keys, source)


class Families(Registry[Family]):
    """The registry of families, keyed by the model_type that a config states."""

    def register(self, *tables: object) -> None:
        """Register each `Family` in `tables` under all its model_types, and skip objects of other types; raise
        DeclaredTwice if a family already has the name."""
        for table in tables:
            if isinstance(table, Family):
                for name in table.model_types:
                    self.add(name, table)


def _lookup(config: Config, path: str, source: str) -> Any:
    *outer, last = [path] if path in config else path.split(".")  # keys of GGUF files contain dots
    for name in outer:
        inner = config.get(name) or {}
        if not isinstance(inner, Mapping):
            raise WeftError(f"{source}: {name}={inner!r} is not a mapping")
        config = inner
    return config.get(last, _ABSENT)


def _evaluate(name: str, rule: Any, config: Config) -> Any:
    """Return `rule`, or `rule(config)` if it is a function; raise WeftError if it does not fit the setting `name`."""
    value = rule(config) if callable(rule) else rule
    if not matches_type(value, _HINTS[name]):
        raise WeftError(f"the value {quote_value(value)} must be of type {Settings.__annotations__[name]}")
    return value


def blame_keys(e: Exception, make: Rule, config: Config) -> WeftError:
    """Return `e`, the error of `make(config)`, as a WeftError whose message starts with the config keys that cause it.
    A key whose value is a positive integer n causes it if the message contains n and changes when the value is n + 1;
    any other key, if the message changes without the key."""
    numbers = set(re.findall(r"\d+", str(e)))
    culprits = []
    for name, value in config.items():
        if isinstance(value, int) and value > 0:
            variant = {**config, name: value + 1} if str(value) in numbers else config
        else:
            variant = {n: v for n, v in config.items() if n != name}
        if variant is not config and str(try_read(make, variant)) != str(e):
            culprits.append(name)
    values = (f"{k}={reprlib.repr(config[k])}" for k in culprits if f" {k}=" not in f" {e}")
    return WeftError(": ".join((*values, str(e) if isinstance(e, WeftError) else f"{type(e).__name__}: {e}")))


def tabulate_families(families: Mapping[str, Family]) -> list[tuple[str, str, str]]:
    """Return the titles, then a row (model_type, class, GGUF architecture) per family; "+": weft also exports to it."""
    rows = [("family", "exported", "GGUF")]
    for name, family in sorted(families.items()):
        gguf = "" if family.gguf is None else family.gguf.model_types[0] + ("+" if family.gguf.loader else "")
        rows.append((name, family.transformers, gguf))
    return rows
