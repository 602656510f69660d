"""Merging adapters into the model of a folder with weights: every weight W becomes the recipe W + s · B · A.

With DoRA the columns of the sum get the lengths that the adapter has learned: m · (W + s · B · A) / ‖W + s · B · A‖.
Several adapters are merged one after the other. The recipes read base and adapters from one reader; their arithmetic
is in float32, and the cast to what a target stores comes last, as for every recipe.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes import Add, Map, Scale, Source
from weft.ir.recipes.matrices import MatMul, Norms
from weft.ir.recipes.readers import TensorReader
from weft.ir.recipes.recipe import Recipe

from ...models.loading import Loaded, describe, load
from ...models.tables.family import Family
from .adapter import Adapter, Tokens, Update, key_of, open_reader, read_adapter
from .safetensors import Rerouted, SafetensorsFile
from .updates import scaled, stacked, transposed, transposed_keys, with_rows

_EXPERTS = ("gate_up_proj", "down_proj")  # as transformers calls the weights of all experts


@dataclass(frozen=True)
class JoinedReader(Rerouted):
    """The tensors of `base`, and those of the adapters under ``adapter0:key``, ``adapter1:key`` …"""

    base: TensorReader
    adapters: tuple[SafetensorsFile, ...]

    @property
    def path(self) -> Path:
        return self.base.path

    def keys(self) -> Iterable[str]:
        added = (key_of(number, key) for number, adapter in enumerate(self.adapters) for key in adapter.tensors)
        return [*self.base.keys(), *added]

    def find(self, key: str) -> tuple[TensorReader, str]:
        prefix, colon, rest = key.partition(":")
        number = prefix.removeprefix("adapter")
        if colon and prefix != number and number.isdecimal() and int(number) < len(self.adapters):
            reader = self.adapters[int(number)]
            if rest not in reader.tensors:
                raise WeftError(f"the adapter {reader.path.parent} has no tensor {rest!r}")
            return reader, rest
        return self.base, key


@dataclass(frozen=True)
class _Replaced(Rerouted):
    """The reader `base` with other tensors in the place of some, or besides its own: `others` by key."""

    base: TensorReader
    others: Mapping[str, tuple[TensorReader, str]]

    @property
    def path(self) -> Path:
        return self.base.path

    def keys(self) -> Iterable[str]:
        return dict.fromkeys((*self.base.keys(), *self.others))

    def find(self, key: str) -> tuple[TensorReader, str]:
        return self.others.get(key, (self.base, key))


def join_adapters(base: TensorReader, folders: Sequence[Path]) -> TensorReader:
    """Join the tensors of `base` and those of the adapters in `folders`, for a graph that was merged before."""
    return JoinedReader(base, tuple(map(open_reader, folders)))


def load_merged(
    family: Family, config: Mapping[str, Any], base: TensorReader, source: str, folders: Sequence[Path]
) -> tuple[Loaded, list[Adapter]]:
    """Load the model of `config` and `base` with the adapters in `folders` merged into it, in that order.

    Where an adapter changes the embedding or the head of a model that ties them, they become two weights: that is what
    PEFT computes before it merges. Where one brings an embedding of more or fewer tokens, the model has as many.

    Raises:
        WeftError: naming the adapter, and the key or tensor that is unsound, that does not fit the base model, or that
            nothing reads.
    """
    adapters = [read_adapter(folder, number) for number, folder in enumerate(folders)]
    resized = _FamilyMerger(family, config, base, source, load(family, config, base, source))
    for adapter in adapters:
        resized = resized.resized(adapter)
    merger = merge(resized, adapters)
    assert isinstance(merger, _FamilyMerger)
    return merger.loaded, adapters


def merge(merger: Merger, adapters: Sequence[Adapter]) -> Merger:
    """Merge `adapters` into the model of `merger`, in that order; return the merger whose graph reads them all.

    Raises:
        WeftError: naming the adapter that does not fit the model.
    """
    if merger.tied and any(merger.unties(adapter) for adapter in adapters):
        merger = merger.untied()
    joined = JoinedReader(merger.base, tuple(adapter.reader for adapter in adapters))
    for adapter in adapters:
        merger.add(adapter, joined)
    merger.apply(joined)
    return merger


class Merger(abc.ABC):
    """The weights of a model, by checkpoint key, while adapters are merged into them.

    If it is `tied`, one weight is embedding and head; `head` is the key of a head that the checkpoint does not have
    because it was.
    """

    def __init__(self, graph: Graph, base: TensorReader, source: str, tied: bool, head: str = "") -> None:
        self.graph, self.base, self.source, self.tied, self.head = graph, base, source, tied, head
        self.keys = frozenset(base.keys()) | ({head} if head else set())
        self.layout = base  # the shapes of the weights, where an adapter changes those of the base
        self.weights: dict[str, Recipe] = {}
        self.owner: dict[str, str] = {}  # of a weight that is not the base's: what said so
        self.stacks: dict[str, tuple[Adapter, list[Recipe]]] = {}  # updates of what the checkpoint has by expert
        self.turned = {key for p in graph.params.values() for key in transposed_keys(p.recipe)}
        self.read = {key for p in graph.params.values() for key in p.recipe.sources()}

    @property
    def embed(self) -> str:
        """The key of the token embedding; "" if there is none."""
        param = self.embedding
        return next(param.recipe.sources(), "") if param else ""

    @property
    def embedding(self) -> Param | None:
        """The token embedding."""
        return self.graph.params.get("embed.weight")

    def unties(self, adapter: Adapter) -> bool:
        """Return whether `adapter` changes the embedding or head of a tied model, which must then be untied."""
        names = (*adapter.updates, *adapter.replaced)
        heads = (*names, *adapter.resaved)
        return any(self.find(name) == self.embed for name in names) or any(map(self.is_head, heads))

    @abc.abstractmethod
    def is_head(self, name: str) -> bool:
        """Return whether `name` is the weight of the head."""

    @abc.abstractmethod
    def untied(self) -> Merger:
        """The same model with a head of its own, whose weight is the embedding's."""

    @abc.abstractmethod
    def spellings(self, name: str) -> Iterator[str]:
        """Yield the keys by which a checkpoint may have the weight that an adapter calls `name`."""

    def imagined(self, keys: frozenset[str]) -> Graph | None:
        """The graph of a checkpoint that has `keys`; None if the model has no checkpoints of several layouts."""
        return None

    def find(self, name: str) -> str | None:
        """The checkpoint key of the weight that an adapter calls `name`."""
        return next((key for key in self.spellings(name) if key in self.keys), None)

    def known(self, name: str, key: str, adapter: Adapter) -> str:
        """As `find`, for the tensor `key` of `adapter`; raises WeftError if the model does not read such a weight."""
        found = self.find(name)
        if found is None or found not in self.read:
            raise adapter.error(
                f": nothing in {self.source} reads what {key!r} belongs to; is it an adapter of this model?"
            )
        return found

    def add(self, adapter: Adapter, reader: TensorReader) -> None:
        """Merge `adapter`, whose tensors are among those of `reader`."""
        self._check_saved(adapter)
        # A copy of what earlier adapters changed: several tensors of this one may belong to one weight.
        changed = dict(self.owner)
        for names in (adapter.resaved, adapter.replaced, adapter.updates):
            homes = [home for home in map(self.find, names) if home is not None]
            if doubled := [home for home in homes if homes.count(home) > 1]:
                raise adapter.error(f" has two tensors for {doubled[0]}")
        for name, key in adapter.resaved.items():
            home = self.known(name, key, adapter)
            self._put(home, key, adapter, changed)
            if self.head and home == self.embed and not changed.get(self.head):
                self.weights[self.head] = self.weights[home]  # one tensor, while they were tied
        for name, key in adapter.replaced.items():
            self._put(self.known(name, key, adapter), key, adapter, changed)
        for name, tokens in adapter.tokens.items():
            home = self.known(name, tokens.key, adapter)
            untied = self.head and not {self.embed, self.head} <= set(map(self.find, adapter.tokens))
            if untied or home in map(self.find, (*adapter.updates, *adapter.replaced)):
                raise adapter.error(
                    ": trainable_token_indices beside other changes of the embedding, or "
                    "of a head that is tied to it, cannot be merged"
                )
            self._put_tokens(home, tokens, adapter)
        for name, update in adapter.updates.items():
            if update.stacked and self.find(name) is None:
                self.stacks.setdefault(name, (adapter, []))[1].append(stacked(update, adapter, False))
                continue
            home = self.known(name, update.down, adapter)
            self.weights[home] = self._updated(home, update, adapter)
            self.owner[home] = str(adapter.path)
            self._check(home, reader, adapter, update.up, update.down, update.magnitude)
            if update.bias:
                bias = self.find(name.removesuffix("weight") + "bias")
                if bias is None or bias not in self.read:
                    raise adapter.error(
                        f" has {update.bias!r} (lora_bias), but {home} has no bias it could be added to"
                    )
                added = scaled(adapter.tensor(update.bias), update.scale)
                self.weights[bias] = Add((self.weight(bias), added))
                self._check(bias, reader, adapter, update.bias)

    def weight(self, key: str) -> Recipe:
        """The weight `key` as it is so far."""
        return self.weights.get(key, Source(key))

    def _updated(self, home: str, update: Update, adapter: Adapter) -> Recipe:
        """The weight `home` after `update`."""
        turned = home in self.turned
        if len(self._shape(home)) == 3:
            return Add((self.weight(home), stacked(update, adapter, turned)))
        if adapter.reader.shape(update.down)[0] != update.rank:
            raise adapter.error(f": {adapter.shown(update.down)} is not of rank {update.rank}, which its config says")
        turned = turned or update.embedding
        down, up = adapter.tensor(update.down), adapter.tensor(update.up)
        product = MatMul(transposed(down), transposed(up)) if turned else MatMul(up, down)
        merged = Add((self.weight(home), scaled(product, update.scale)))
        if not update.magnitude:
            return merged
        axis = 1 if turned else 0
        lengths = Map(Norms(merged, axis), "reciprocal")
        return Scale(merged, Scale(adapter.tensor(update.magnitude), lengths), axis)

    def _put(self, home: str, key: str, adapter: Adapter, changed: Mapping[str, str]) -> None:
        """Let the tensor `key` of `adapter` take the place of the weight `home`, unless an earlier one `changed` it."""
        if home in changed:
            raise adapter.error(f" replaces {home}, which {changed[home]} has changed before")
        if adapter.reader.shape(key) != self._shape(home):
            raise adapter.error(
                f": {adapter.shown(key)} does not fit {home} {list(self._shape(home))}; "
                "was it trained after the vocabulary was resized, or on another model?"
            )
        self.weights[home] = adapter.tensor(key)
        self.owner[home] = str(adapter.path)

    def _put_tokens(self, home: str, tokens: Tokens, adapter: Adapter) -> None:
        """Let rows of `adapter` take the place of those of the weight `home`."""
        rows, *widths = self._shape(home)
        if list(adapter.reader.shape(tokens.key)[1:]) != widths or max(tokens.indices, default=0) >= rows:
            raise adapter.error(
                f": {adapter.shown(tokens.key)} for the tokens {list(tokens.indices)} does "
                f"not fit {home} {[rows, *widths]}"
            )
        self.weights[home] = with_rows(self.weight(home), rows, tokens, adapter.tensor(tokens.key))
        self.owner[home] = str(adapter.path)

    def _shape(self, home: str) -> tuple[int, ...]:
        return self.layout.shape(self.embed if home == self.head else home)

    def _check(self, home: str, reader: TensorReader, adapter: Adapter, *keys: str) -> None:
        """Check that the weight `home` has kept its shape."""
        if not _is_shaped(self.weights[home], self._shape(home), reader):
            raise adapter.error(
                f": {adapter.shown(*keys)} do not fit {home} {list(self._shape(home))}; is it an adapter of this model?"
            )

    def _check_saved(self, adapter: Adapter) -> None:
        """Check that every tensor of the modules that `adapter` says it has saved is there."""
        saved = tuple(adapter.config.get("modules_to_save") or ())
        replaced = {self.find(name) for name in adapter.replaced}
        for key in self.read - replaced if saved else ():
            parts = key.split(".")
            if any(".".join(parts[:i]).endswith(saved) for i in range(1, len(parts))):
                raise adapter.error(f" lacks {key!r}, though modules_to_save names its module")

    def apply(self, reader: TensorReader) -> None:
        """Let the parameters read the merged weights from `reader`."""
        added = self._of_stacks()
        for param in self.graph.params.values():
            param.recipe = param.recipe.substituted(self.weights)
            if param.name in added:
                adapter, update = added[param.name]
                param.recipe = Add((param.recipe, update))
                if not _is_shaped(param.recipe, param.shape, reader):
                    raise adapter.error(f" does not fit {param.name} {list(param.shape)}")
        self.graph.reader = reader

    def _of_stacks(self) -> dict[str, tuple[Adapter, Recipe]]:
        """Map stacked parameters, whose checkpoint tensors are per expert, to the updates of adapters that stack
        experts too.

        Which parts of the one make which parameter is what the family says of a checkpoint that has it.
        """
        if not self.stacks:
            return {}
        siblings = {f"{name.rpartition('.')[0]}.{expert}" for name in self.stacks for expert in _EXPERTS}
        imagined = self.imagined(self.keys | siblings)
        updates = {name: parts[0] if len(parts) == 1 else Add(tuple(parts)) for name, (_, parts) in self.stacks.items()}
        updated, read = {}, set()
        for param in imagined.params.values() if imagined else ():
            mine = self.stacks.keys() & set(param.recipe.sources())
            for name in mine:
                updated[param.name] = self.stacks[name][0], param.recipe.substituted(updates)
                read.add(name)
        for name in self.stacks.keys() - read:
            adapter = self.stacks[name][0]
            raise adapter.error(f": nothing in {self.source} reads {name!r}, which it updates")
        return updated


class _FamilyMerger(Merger):
    """A model of a family's table, whose keys are those of transformers."""

    def __init__(
        self, family: Family, config: Mapping[str, Any], base: TensorReader, source: str, loaded: Loaded, head: str = ""
    ) -> None:
        super().__init__(loaded.graph, base, source, loaded.settings.tie, head)
        self.family, self.config, self.loaded = family, config, loaded

    def resized(self, adapter: Adapter) -> _FamilyMerger:
        """The model with as many tokens as the embedding that `adapter` brings, if it brings one of another size.

        Raises:
            WeftError: if it brings no head of that size.
        """
        brought = {home: key for name, key in (adapter.resaved | adapter.replaced).items() if (home := self.find(name))}
        rows = adapter.reader.shape(brought[self.embed])[0] if self.embed in brought else 0
        before = self._shape(self.embed)[0] if rows else 0
        if rows == before:
            return self
        others: dict[str, tuple[TensorReader, str]] = {
            home: (adapter.reader, key)
            for home, key in brought.items()
            if (rows, *self._shape(home)[1:]) == adapter.reader.shape(key) and self._shape(home)[0] == before
        }
        heads = [key for key in self.keys if self.is_head(key) and key in self.read]
        if "vocab_size" not in self.config or not others.keys() >= {self.embed, *heads}:
            missing = f" but no {heads[0]} of as many" if heads else " and the config of the model has no vocab_size"
            raise adapter.error(f" has an embedding of {rows} tokens in the place of {before},{missing}")
        config, layout = {**self.config, "vocab_size": rows}, _Replaced(self.layout, others)
        merger = _FamilyMerger(
            self.family, config, self.base, self.source, load(self.family, config, layout, self.source)
        )
        merger.layout = layout
        return merger

    def is_head(self, name: str) -> bool:
        head = self.family.names.get("lm_head")
        return isinstance(head, str) and name.removeprefix(self.family.prefix) == f"{head}.weight"

    def untied(self) -> _FamilyMerger:
        head, embed = f"{self.family.names.get('lm_head')}.weight", self.embed
        config = {**self.config, "tie_word_embeddings": False}
        layout = _Replaced(self.layout, {head: (self.layout, embed)})
        loaded = load(self.family, config, layout, self.source)
        if replace(loaded.settings, tie=True) != self.loaded.settings or "lm_head.weight" not in loaded.graph.params:
            raise WeftError(
                f"{self.source}: an adapter changes the embedding or the head, which this model ties; "
                f"weft cannot part them in {self.family.model_types[0]} models"
            )
        merger = _FamilyMerger(self.family, config, self.base, self.source, loaded, head)
        merger.layout = self.layout
        merger.weights[head] = Source(embed)
        return merger

    def spellings(self, name: str) -> Iterator[str]:
        aliases, prefix = self.family.aliases.items(), self.family.prefix
        head = self.family.names.get("lm_head")
        if isinstance(head, str) and name.startswith("lm_head."):  # the module in transformers, whatever the file says
            yield name.replace("lm_head", head)
        for s in (name, *(name.replace(a, b) for a, b in aliases), *(name.replace(b, a) for a, b in aliases)):
            yield from (s, prefix + s, s.removeprefix(prefix))

    def imagined(self, keys: frozenset[str]) -> Graph | None:
        return describe(self.family, self.config, keys, self.source).graph


def _is_shaped(recipe: Recipe, shape: tuple[int, ...], reader: TensorReader) -> bool:
    """Return whether what `recipe` makes of the tensors in `reader` has that `shape`, or any."""
    try:
        return recipe.shape(reader) == shape
    except WeftError:
        return False
