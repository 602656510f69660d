"""Merge adapters into the weights of a folder's model: every updated weight W becomes the recipe W + s · B · A.

DoRA normalizes each row of the sum and scales it by the learned magnitude m: m · (W + s · B · A) / ‖W + s · B · A‖.
Several adapters are merged in order. The recipes read base and adapters from one reader and compute in float32; the
cast to a target's dtype comes last, as for every recipe.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes import Add, Concat, Map, Permute, Reshape, Scale, Slice, Source, Take
from weft.ir.recipes.matrices import MatMul, Norms
from weft.ir.recipes.readers import TensorReader
from weft.ir.recipes.recipe import Recipe

from ...models.loading import LoadedModel, build_from_table, load
from ...models.tables.family import Family
from .adapter import Adapter, Tokens, Update, build_joined_key, open_adapter, read_adapter
from .safetensors import PatchedReader, RoutedReader, SafetensorsFile


def scale_by(recipe: Recipe, factor: float) -> Recipe:
    """Return the recipe of `factor` times the result of `recipe`; `recipe` itself if `factor` is 1."""
    return recipe if factor == 1 else Scale(recipe, factor)


def transpose_matrix(recipe: Recipe) -> Recipe:
    """Return the recipe of the transposed result of `recipe`, a matrix."""
    return Permute(recipe, (1, 0))


def find_transposed_keys(recipe: Recipe, flipped: bool = False) -> Iterator[str]:
    """Yield the keys of weights that `recipe` reads transposed, because they are stored [in, out] (Conv1D). `flipped`:
    whether the caller also transposes the result of `recipe`."""
    if isinstance(recipe, Source) and flipped:
        yield recipe.key
    if isinstance(recipe, Permute) and recipe.axes in ((1, 0), (0, 2, 1)):
        flipped = not flipped
    for part in recipe.parts:
        yield from find_transposed_keys(part, flipped)


def stack_expert_updates(update: Update, adapter: Adapter, transpose: bool) -> Recipe:
    """Return the recipe of `update` for a stack of experts: [experts, out, in], or [experts, in, out] if `transpose`.

    Factor A [experts · rank, in] has the experts one after another; in factor B [out, rank · experts] experts are the
    inner index.
    """
    (ranks, width), (height, _) = adapter.reader.shape(update.down), adapter.reader.shape(update.up)
    experts, down, up = ranks // update.rank, adapter.tensor(update.down), adapter.tensor(update.up)
    items = []
    for i in range(experts):
        a = Slice(down, 0, i * update.rank, (i + 1) * update.rank)
        b = Slice(up, 1, i, ranks, experts)
        product = MatMul(transpose_matrix(a), transpose_matrix(b)) if transpose else MatMul(b, a)
        items.append(Reshape(product, (1, width, height) if transpose else (1, height, width)))
    return scale_by(Concat(tuple(items)), update.scale)


def replace_rows(table: Recipe, count: int, tokens: Tokens, rows: Recipe) -> Recipe:
    """Return the recipe of `table` [count, width] in which row `tokens.indices[i]` is row i of `rows`, for all i."""
    order = sorted(range(len(tokens.indices)), key=tokens.indices.__getitem__)
    items: list[Recipe] = []
    n_done = 0
    while order:
        first = tokens.indices[order[0]]
        run = [i for at, i in enumerate(order) if tokens.indices[i] == first + at]
        order = order[len(run) :]
        if first > n_done:
            items.append(Slice(table, 0, n_done, first))
        items.append(Take(rows, tuple(run)))
        n_done = first + len(run)
    if n_done < count:
        items.append(Slice(table, 0, n_done, count))
    return Concat(tuple(items)) if len(items) > 1 else items[0]


_EXPERTS = ("gate_up_proj", "down_proj")  # names of the stacked expert weights in transformers


@dataclass(frozen=True)
class JoinedReader(RoutedReader):
    """A reader of the tensors of `base`, and of the adapters' tensors under the keys ``adapter{i}:key``."""

    base: TensorReader
    adapters: tuple[SafetensorsFile, ...]

    @property
    def path(self) -> Path:
        return self.base.path

    def keys(self) -> Iterable[str]:
        added = (build_joined_key(i, key) for i, adapter in enumerate(self.adapters) for key in adapter.tensors)
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


def join_adapters(base: TensorReader, folders: Sequence[Path]) -> TensorReader:
    """Return a `JoinedReader` of `base` and the adapters in `folders`, for a graph whose recipes already merge them."""
    return JoinedReader(base, tuple(map(open_adapter, folders)))


def load_merged(
    family: Family, config: Mapping[str, Any], base: TensorReader, source: str, folders: Sequence[Path]
) -> tuple[LoadedModel, list[Adapter]]:
    """Load the model of `config` and `base`, and merge the adapters in `folders` in order; return model and adapters.

    If an adapter changes the embedding or a head that is tied to it, they become two weights, as in PEFT. An adapter
    that stores an embedding with another number of rows changes the model's vocabulary size to that number.

    Raises:
        WeftError: naming the adapter, and the key or tensor that is invalid, does not fit the base model, or is
            not read by the model.
    """
    adapters = [read_adapter(folder, number) for number, folder in enumerate(folders)]
    merger = _FamilyMerger(family, config, base, source)
    for adapter in adapters:
        merger = merger.resize(adapter)
    merged = merge(merger, adapters)
    assert isinstance(merged, _FamilyMerger)
    return merged.loaded, adapters


def merge(merger: Merger, adapters: Sequence[Adapter]) -> Merger:
    """Merge `adapters` in order into the graph of `merger`, in place; return `merger`.

    If the head must be untied from the embedding, merge into and return `merger.untie()` instead.

    Raises:
        WeftError: naming the adapter that does not fit the model.
    """
    if merger.tied and any(merger.changes_tie(adapter) for adapter in adapters):
        merger = merger.untie()
    joined = JoinedReader(merger.base, tuple(adapter.reader for adapter in adapters))
    for adapter in adapters:
        merger.add(adapter, joined)
    merger.apply(joined)
    return merger


class Merger(abc.ABC):
    """The state of a merge: `weights` maps checkpoint keys of a graph to the recipes of weights changed so far.

    source: name of the model in errors. tied: one weight is embedding and head.
    head: key of the head if it was untied, so that the checkpoint lacks it, else "".
    """

    def __init__(self, graph: Graph, base: TensorReader, source: str, tied: bool, head: str = "") -> None:
        self.graph, self.base, self.source, self.tied, self.head = graph, base, source, tied, head
        self.keys = frozenset(base.keys()) | ({head} if head else set())
        self.layout = base  # reader with the shapes of the weights, which differ from the base's after a resize
        self.weights: dict[str, Recipe] = {}  # of weights that were changed
        self.changed_by: dict[str, str] = {}  # the folder of the adapter that last changed a weight
        # Updates of stacks of experts whose checkpoint has a tensor per expert, by the name of the stack.
        self.stacks: dict[str, tuple[Adapter, list[Recipe]]] = {}
        self.stored_transposed = {key for p in graph.params.values() for key in find_transposed_keys(p.recipe)}
        self.read = {key for p in graph.params.values() for key in p.recipe.sources()}

    @property
    def embed(self) -> str:
        """Return the checkpoint key of the token embedding, or "" if there is none."""
        param = self.embedding
        return next(param.recipe.sources(), "") if param else ""

    @property
    def embedding(self) -> Param | None:
        """Return the parameter of the graph that is the token embedding, or None."""
        return self.graph.params.get("embed.weight")

    def changes_tie(self, adapter: Adapter) -> bool:
        """Return whether `adapter` changes the embedding or the head of a tied model, so that they must be untied."""
        names = (*adapter.updates, *adapter.replaced)
        heads = (*names, *adapter.resaved)
        return any(self.find(name) == self.embed for name in names) or any(map(self.is_head, heads))

    @abc.abstractmethod
    def is_head(self, name: str) -> bool:
        """Return whether `name` is an adapter's name of the head's weight."""

    @abc.abstractmethod
    def untie(self) -> Merger:
        """Return a merger of the same model with a separate head, whose weight starts as a copy of the embedding."""

    @abc.abstractmethod
    def list_spellings(self, name: str) -> Iterator[str]:
        """Yield the possible checkpoint keys of the weight that adapters call `name`, the likeliest first."""

    def build_graph(self, keys: frozenset[str]) -> Graph | None:
        """Return the model's graph for a checkpoint with `keys`; None if the model has a single checkpoint layout."""
        return None

    def find(self, name: str) -> str | None:
        """Return the checkpoint key of the weight that adapters call `name`, or None."""
        return next((key for key in self.list_spellings(name) if key in self.keys), None)

    def require_read(self, name: str, key: str, adapter: Adapter) -> str:
        """Return `find(name)`; raise WeftError, naming `adapter` and its tensor `key`, if the model lacks it."""
        home = self.find(name)
        if home is None or home not in self.read:
            raise adapter.error(f": {key!r} changes a weight that {self.source} does not read; is it for this model?")
        return home

    def add(self, adapter: Adapter, reader: TensorReader) -> None:
        """Merge `adapter` into `weights` and `stacks`; `reader` has its tensors. Raise WeftError if it does not fit."""
        self._check_saved(adapter)
        # A copy, as several tensors of this adapter may belong to one weight: only earlier adapters count as conflicts.
        changed = dict(self.changed_by)
        for names in (adapter.resaved, adapter.replaced, adapter.updates):
            homes = [home for home in map(self.find, names) if home is not None]
            if repeated := [home for home in homes if homes.count(home) > 1]:
                raise adapter.error(f" has two tensors for {repeated[0]}: remove one of them")
        for name, key in adapter.resaved.items():
            home = self.require_read(name, key, adapter)
            self._put(home, key, adapter, changed)
            if self.head and home == self.embed and not changed.get(self.head):
                self.weights[self.head] = self.weights[home]  # they were one tensor while tied
        for name, key in adapter.replaced.items():
            self._put(self.require_read(name, key, adapter), key, adapter, changed)
        for name, tokens in adapter.tokens.items():
            home = self.require_read(name, tokens.key, adapter)
            splits_tie = self.head and not {self.embed, self.head} <= set(map(self.find, adapter.tokens))
            if splits_tie or home in map(self.find, (*adapter.updates, *adapter.replaced)):
                raise adapter.error(
                    ": trainable_token_indices cannot be merged together with other changes of the embedding or of a "
                    "head tied to it: merge it with PEFT"
                )
            self._put_tokens(home, tokens, adapter)
        for name, update in adapter.updates.items():
            if update.stacked and self.find(name) is None:
                self.stacks.setdefault(name, (adapter, []))[1].append(stack_expert_updates(update, adapter, False))
                continue
            home = self.require_read(name, update.down, adapter)
            self.weights[home] = self._apply_update(home, update, adapter)
            self.changed_by[home] = str(adapter.path)
            self._check(home, reader, adapter, update.up, update.down, update.magnitude)
            if update.bias:
                bias = self.find(name.removesuffix("weight") + "bias")
                if bias is None or bias not in self.read:
                    raise adapter.error(f": tensor {update.bias!r} (lora_bias) cannot be added: {home} has no bias")
                self.weights[bias] = Add((self.weight(bias), scale_by(adapter.tensor(update.bias), update.scale)))
                self._check(bias, reader, adapter, update.bias)

    def weight(self, key: str) -> Recipe:
        """Return the recipe of the weight with the checkpoint key `key` after the merges so far."""
        return self.weights.get(key, Source(key))

    def _apply_update(self, home: str, update: Update, adapter: Adapter) -> Recipe:
        """Return the recipe of the weight `home` after the low-rank `update` of `adapter`."""
        is_transposed = home in self.stored_transposed
        if len(self._shape(home)) == 3:
            return Add((self.weight(home), stack_expert_updates(update, adapter, is_transposed)))
        if adapter.reader.shape(update.down)[0] != update.rank:
            raise adapter.error(f": {adapter.describe_tensors(update.down)} must have rank {update.rank} by its config")
        is_transposed = is_transposed or update.embedding
        down, up = adapter.tensor(update.down), adapter.tensor(update.up)
        product = MatMul(transpose_matrix(down), transpose_matrix(up)) if is_transposed else MatMul(up, down)
        merged = Add((self.weight(home), scale_by(product, update.scale)))
        if not update.magnitude:
            return merged
        axis = 1 if is_transposed else 0
        lengths = Map(Norms(merged, axis), "reciprocal")
        return Scale(merged, Scale(adapter.tensor(update.magnitude), lengths), axis)

    def _put(self, home: str, key: str, adapter: Adapter, changed: Mapping[str, str]) -> None:
        """Replace the weight `home` by tensor `key` of `adapter`; raise WeftError if their shapes differ, or if an
        earlier adapter changed the weight, so that it is in `changed`."""
        if home in changed:
            raise adapter.error(f" replaces {home}, which {changed[home]} has already changed: merge one of them")
        if adapter.reader.shape(key) != self._shape(home):
            raise adapter.error(
                f": {adapter.describe_tensors(key)} does not fit {home} {list(self._shape(home))}; "
                "was it trained after the vocabulary was resized, or on another model?"
            )
        self.weights[home] = adapter.tensor(key)
        self.changed_by[home] = str(adapter.path)

    def _put_tokens(self, home: str, tokens: Tokens, adapter: Adapter) -> None:
        rows, *widths = self._shape(home)
        if list(adapter.reader.shape(tokens.key)[1:]) != widths or max(tokens.indices, default=0) >= rows:
            raise adapter.error(
                f": {adapter.describe_tensors(tokens.key)} with trainable_token_indices={list(tokens.indices)} does "
                f"not fit {home} {[rows, *widths]}"
            )
        self.weights[home] = replace_rows(self.weight(home), rows, tokens, adapter.tensor(tokens.key))
        self.changed_by[home] = str(adapter.path)

    def _shape(self, home: str) -> tuple[int, ...]:
        return self.layout.shape(self.embed if home == self.head else home)

    def _check(self, home: str, reader: TensorReader, adapter: Adapter, *keys: str) -> None:
        """Check that the merged weight `home` has its original shape; errors name the tensors `keys` of `adapter`."""
        if not _has_shape(self.weights[home], self._shape(home), reader):
            raise adapter.error(
                f": {adapter.describe_tensors(*keys)} do not fit {home} {list(self._shape(home))}; "
                "is it an adapter of this model?"
            )

    def _check_saved(self, adapter: Adapter) -> None:
        """Check that `adapter` has every tensor of the modules in its modules_to_save."""
        saved = tuple(adapter.config.get("modules_to_save") or ())
        replaced = {self.find(name) for name in adapter.replaced}
        for key in self.read - replaced if saved else ():
            parts = key.split(".")
            if any(".".join(parts[:i]).endswith(saved) for i in range(1, len(parts))):
                raise adapter.error(f" lacks tensor {key!r} of a module in modules_to_save: the file is incomplete")

    def apply(self, reader: TensorReader) -> None:
        """Replace the weights in the recipes of all parameters by the merged ones; `reader` becomes the graph's."""
        added = self._merge_stacks()
        for param in self.graph.params.values():
            param.recipe = param.recipe.substitute(self.weights)
            if param.name in added:
                adapter, update = added[param.name]
                param.recipe = Add((param.recipe, update))
                if not _has_shape(param.recipe, param.shape, reader):
                    raise adapter.error(f" does not fit parameter {param.name} {list(param.shape)} of the model")
        self.graph.reader = reader

    def _merge_stacks(self) -> dict[str, tuple[Adapter, Recipe]]:
        """Return parameter name → (adapter, update) for the parameters to which `stacks` apply. The graph of a
        checkpoint with stacked experts shows which slice of a stack belongs to which parameter."""
        if not self.stacks:
            return {}
        siblings = {f"{name.rpartition('.')[0]}.{expert}" for name in self.stacks for expert in _EXPERTS}
        stacked_graph = self.build_graph(self.keys | siblings)
        updates = {name: parts[0] if len(parts) == 1 else Add(tuple(parts)) for name, (_, parts) in self.stacks.items()}
        merged, names_read = {}, set()
        for param in stacked_graph.params.values() if stacked_graph else ():
            names = self.stacks.keys() & set(param.recipe.sources())
            for name in names:
                merged[param.name] = self.stacks[name][0], param.recipe.substitute(updates)
                names_read.add(name)
        for name in self.stacks.keys() - names_read:
            raise self.stacks[name][0].error(f" updates {name!r}, which {self.source} does not read")
        return merged


class _FamilyMerger(Merger):
    """A merger for a model that was built by a family's table, with transformers' checkpoint keys."""

    def __init__(
        self,
        family: Family,
        config: Mapping[str, Any],
        base: TensorReader,
        source: str,
        layout: TensorReader | None = None,
        head: str = "",
    ) -> None:
        self.family, self.config, self.loaded = family, config, load(family, config, layout or base, source)
        super().__init__(self.loaded.graph, base, source, self.loaded.settings.tie, head)
        self.layout = layout or base

    def resize(self, adapter: Adapter) -> _FamilyMerger:
        """Return a merger with the vocabulary size of the embedding that `adapter` stores, if any; else self.

        Raises:
            WeftError: if it differs, and the adapter stores no head of that size or the config has no vocab_size.
        """
        stored = {home: key for name, key in (adapter.resaved | adapter.replaced).items() if (home := self.find(name))}
        n_rows = adapter.reader.shape(stored[self.embed])[0] if self.embed in stored else 0
        n_before = self._shape(self.embed)[0] if n_rows else 0
        if n_rows == n_before:
            return self
        replacements: dict[str, tuple[TensorReader, str]] = {
            home: (adapter.reader, key)
            for home, key in stored.items()
            if (n_rows, *self._shape(home)[1:]) == adapter.reader.shape(key) and self._shape(home)[0] == n_before
        }
        heads = [key for key in self.keys if self.is_head(key) and key in self.read]
        if "vocab_size" not in self.config or not replacements.keys() >= {self.embed, *heads}:
            missing = f"it lacks {heads[0]} of that size" if heads else "the model's config lacks vocab_size"
            raise adapter.error(f" resizes the embedding from {n_before} to {n_rows} tokens, but {missing}")
        config, layout = {**self.config, "vocab_size": n_rows}, PatchedReader(self.layout, replacements)
        return _FamilyMerger(self.family, config, self.base, self.source, layout)

    def is_head(self, name: str) -> bool:
        head = self.family.names.get("lm_head")
        return isinstance(head, str) and name.removeprefix(self.family.prefix) == f"{head}.weight"

    def untie(self) -> _FamilyMerger:
        head, embed = f"{self.family.names.get('lm_head')}.weight", self.embed
        config = {**self.config, "tie_word_embeddings": False}
        layout = PatchedReader(self.layout, {head: (self.layout, embed)})
        merger = _FamilyMerger(self.family, config, self.base, self.source, layout, head)
        settings = replace(merger.loaded.settings, tie=True)
        if settings != self.loaded.settings or "lm_head.weight" not in merger.graph.params:
            raise WeftError(
                f"{self.source}: an adapter changes only one of embedding and head, which are tied; "
                f"{self.family.model_types[0]} models cannot untie them"
            )
        merger.weights[head] = Source(embed)
        return merger

    def list_spellings(self, name: str) -> Iterator[str]:
        aliases, prefix = self.family.aliases.items(), self.family.prefix
        head = self.family.names.get("lm_head")
        if isinstance(head, str) and name.startswith("lm_head."):  # its name in transformers
            yield name.replace("lm_head", head)
        for s in (name, *(name.replace(a, b) for a, b in aliases), *(name.replace(b, a) for a, b in aliases)):
            yield from (s, prefix + s, s.removeprefix(prefix))

    def build_graph(self, keys: frozenset[str]) -> Graph | None:
        return build_from_table(self.family, self.config, keys, self.source).graph


def _has_shape(recipe: Recipe, shape: tuple[int, ...], reader: TensorReader) -> bool:
    try:
        return recipe.shape(reader) == shape
    except WeftError:
        return False
