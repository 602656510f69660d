"""A reader of PEFT adapters (LoRA, https://arxiv.org/abs/2106.09685): the two files in an adapter's folder.

A tensor is named after its module in the base model. The last part of the name is the kind of tensor: one of the two
factors of a low-rank update, a magnitude of DoRA (https://arxiv.org/abs/2402.09353), embedding rows of some tokens, or
a replacement of a base tensor. Code that also needs the base model is in `merging`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft.ir.errors import WeftError
from weft.ir.recipes import Recipe, Source
from weft.ir.storage.documents import read_json

from .safetensors import ADAPTER_WEIGHTS, SafetensorsFile

ADAPTER_CONFIG = "adapter_config.json"
# Prefixes that wrappers add to names, once or more: PEFT, torch.compile, DistributedDataParallel.
_WRAPPERS = re.compile(r"^(?:(?:base_model\.model|base_model(?=\.base_model)|module|_orig_mod)\.)+|(?<=\.)_orig_mod\.")
_PARTS = re.compile(
    r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector(?:\.weight)?|token_adapter\.trainable_tokens_delta)"
)
_FACTORS = {"lora_A.weight": "down", "lora_embedding_A": "down", "lora_B.weight": "up", "lora_embedding_B": "up"}
# Keys about training, or implied by the tensors, such as the list of modules that have an update.
_OF_TRAINING = {
    *("auto_mapping", "bias", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules"),
    *("fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout"),
    *("lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config"),
    *("target_modules", "task_type", "base_model_name_or_path"),
}
_READ = {
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights"),
    *("modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias"),
}
_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")  # these leave the base weights unchanged


@dataclass
class Update:
    """An adapter's low-rank update of one weight, `scale` · B · A: the keys of its tensors ("" if missing).

    down: factor A [rank, in]. up: factor B [out, rank]. embedding: the weight is an embedding table [in, out].
    magnitude: DoRA's vector. bias: vector that is added to the bias. stacked: the weight may be a stack of all experts;
    then the factors of all experts are concatenated along the rank axis, and `rank` is that of one expert.
    """

    down: str = ""
    up: str = ""
    magnitude: str = ""
    bias: str = ""
    scale: float = 1.0
    rank: int = 0
    embedding: bool = False
    stacked: bool = False


class Tokens(NamedTuple):
    """Embedding rows that an adapter replaces: the `key` of the tensor of rows, and the token id of each row."""

    key: str
    indices: tuple[int, ...]


@dataclass
class Adapter:
    """An adapter, with four mappings whose keys are names of weights in the base model.

    number: index among the merged adapters. updates: low-rank updates. tokens: replaced rows of embeddings.
    resaved, replaced: the adapter's tensor that replaces the weight. It is in `resaved` if it was saved as the base
    weight of a module that adapters wrap, else (modules_to_save, biases) in `replaced`.
    """

    path: Path
    number: int
    config: Mapping[str, Any]
    reader: SafetensorsFile
    updates: dict[str, Update] = field(default_factory=dict)
    resaved: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, Tokens] = field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the adapter's config and weights files."""
        return self.path / ADAPTER_CONFIG, self.path / ADAPTER_WEIGHTS

    def tensor(self, key: str) -> Recipe:
        """Return a recipe that reads the tensor `key` of this adapter from a `JoinedReader`."""
        return Source(build_joined_key(self.number, key))

    def error(self, fault: str) -> WeftError:
        """Return an error whose message is "the adapter PATH" followed by `fault`, without a space between them."""
        return WeftError(f"the adapter {self.path}{fault}")

    def describe_tensors(self, *keys: str) -> str:
        """Return the tensor names `keys` with their shapes, joined by "and", for error messages; skip empty names."""
        return " and ".join(f"{key} {list(self.reader.shape(key))}" for key in keys if key)


def build_joined_key(number: int, key: str) -> str:
    """Return the key under which a `JoinedReader` has the tensor `key` of adapter `number`."""
    return f"adapter{number}:{key}"


def is_adapter(folder: Path) -> bool:
    """Return whether `folder` contains an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def open_adapter(folder: Path) -> SafetensorsFile:
    """Return a reader of the tensors of the adapter in `folder`.

    Raises:
        WeftError: if the safetensors file is missing or invalid.
    """
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        hint = ", only pickled weights: load it with PEFT and save it as safetensors" if pickled else ""
        raise WeftError(f"the adapter {folder} has no {ADAPTER_WEIGHTS}{hint}")
    return SafetensorsFile(folder / ADAPTER_WEIGHTS)


def read_adapter(folder: Path, number: int = 0) -> Adapter:
    """Read the adapter in `folder`; `number` is its index among the merged adapters.

    Raises:
        WeftError: naming the file, key or tensor that is missing, invalid or cannot be merged.
    """
    if not is_adapter(folder):
        raise WeftError(f"{folder} is not an adapter: it has no {ADAPTER_CONFIG}")
    config = read_json(folder / ADAPTER_CONFIG)
    _check_config(config, folder / ADAPTER_CONFIG)
    adapter = Adapter(folder, number, config, open_adapter(folder))
    modules: dict[tuple[str, int], Update] = {}
    for key in adapter.reader.tensors:
        if not adapter.reader.dtype(key).is_float:
            raise adapter.error(f": tensor {key!r} has dtype {adapter.reader.dtype(key)}, but must be floats")
        _add_tensor(adapter, key, modules)
    n_wrappers: dict[str, int] = {}
    for module, depth in modules:
        n_wrappers[module] = max(n_wrappers.get(module, 0), depth + 1)
    for (module, depth), update in modules.items():
        _check_complete(adapter, module, update)
        name = f"{module}.weight"
        if parameters := _find_targets(config, module):
            if len(parameters) != (n := n_wrappers[module]):
                raise adapter.error(f": target_parameters names {', '.join(parameters)}, but {module} has {n} updates")
            name = f"{module}.{parameters[-1 - depth]}"  # the last parameter is wrapped last, so it is outermost
        elif depth:
            raise adapter.error(f": no target_parameters in its config names the parameter of tensor {update.down!r}")
        update.stacked = bool(parameters)
        if parameters and (extra := update.magnitude or update.bias):
            raise adapter.error(f": tensor {extra!r} cannot be merged: {name} is in target_parameters")
        _set_scale(adapter, name if parameters else module, update)
        adapter.updates[name] = update
    if not (adapter.updates or adapter.replaced or adapter.tokens):
        raise adapter.error(" has no tensors")
    return adapter


def _add_tensor(adapter: Adapter, key: str, modules: dict[tuple[str, int], Update]) -> None:
    """Add the tensor `key` to a mapping of `adapter`, or to `modules` if it is part of a low-rank update. Keys of
    `modules` are (module name, number of base_layer wrappers around the updated parameter)."""
    name = _WRAPPERS.sub("", key).replace(".token_adapter.base_layer.", ".base_layer.")
    match = _PARTS.fullmatch(name)
    if match is None:
        if ".lora_" in name or ".token_adapter." in name:
            raise adapter.error(f": tensor {key!r} is of an unknown kind: save the adapter with save_pretrained")
        # PEFT with resized embeddings also saves the modules that it replaced, and their replacements once more.
        if ".original_module." in name or (name_in_base := name.replace(".modules_to_save.", ".")) in adapter.replaced:
            return
        weight = name_in_base.replace(".base_layer.", ".")
        table = adapter.replaced if weight == name_in_base else adapter.resaved
        if weight in table and name_in_base == name and ".modules_to_save." not in table[weight]:
            raise adapter.error(f": {table[weight]!r} and {key!r} both replace {weight}")
        table[weight] = key
        return
    module, part = match.groups()
    if part.startswith("token_adapter"):
        adapter.tokens[f"{module}.weight"] = Tokens(key, _read_indices(adapter, module, key))
        return
    depth = 0
    # PEFT wraps a module once for every parameter that it targets; the inner wrappers are called base_layer.
    while module.endswith(".base_layer"):
        module, depth = module.removesuffix(".base_layer"), depth + 1
    update = modules.setdefault((module, depth), Update())
    part_name = _FACTORS.get(part) or ("bias" if part == "lora_B.bias" else "magnitude")
    if existing := getattr(update, part_name):
        raise adapter.error(f": {existing!r} and {key!r} are the same part of {module}: remove one")
    setattr(update, part_name, key)
    update.embedding |= "embedding" in part


def _read_indices(adapter: Adapter, module: str, key: str) -> tuple[int, ...]:
    """Return the token ids of the rows that the tensor `key` stores for the embedding `module`."""
    indices: Any = adapter.config.get("trainable_token_indices")
    if isinstance(indices, Mapping):
        indices = next((listed for name, listed in indices.items() if module.endswith(name)), None)
    shape = adapter.reader.shape(key)
    are_ids = isinstance(indices, list) and all(type(i) is int and i >= 0 for i in indices)
    if not are_ids or len(set(indices)) != len(indices) or len(shape) != 2 or shape[0] != len(indices):
        tensor = adapter.describe_tensors(key)
        raise adapter.error(f": trainable_token_indices={indices!r} must list a token for each row of {tensor}")
    return tuple(indices)


def _check_complete(adapter: Adapter, module: str, update: Update) -> None:
    """Check that `update` of `module` has two factors of one rank, and a magnitude if and only if use_dora is set."""
    if not (update.down and update.up):
        present, missing = (update.down, "B") if update.down else (update.up or update.bias or update.magnitude, "A")
        raise adapter.error(f": lora_{missing} of {module} is missing, but {present!r} exists: the file is incomplete")
    down, up = adapter.reader.shape(update.down), adapter.reader.shape(update.up)
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not down[0]:
        raise adapter.error(f": {adapter.describe_tensors(update.up, update.down)} must be [out, rank] and [rank, in]")
    dora = bool(adapter.config.get("use_dora"))
    if dora != bool(update.magnitude):
        fault = "has no magnitude, but the config sets" if dora else "has a magnitude, but the config does not set"
        raise adapter.error(f": {module} {fault} use_dora")


def _set_scale(adapter: Adapter, name: str, update: Update) -> None:
    """Set `rank` (r) and `scale` of `update`: α/r, or α/√r for rsLoRA (https://arxiv.org/abs/2312.03732). A pattern in
    rank_pattern or alpha_pattern that matches `name` overrides the config's r or α."""
    config = adapter.config
    update.rank = _match_pattern(config, "rank_pattern", name, config.get("r", 8))
    alpha = _match_pattern(config, "alpha_pattern", name, config.get("lora_alpha", 8))
    rows = adapter.reader.shape(update.down)[0]
    if rows % update.rank or (rows != update.rank and not update.stacked):
        raise adapter.error(f": {adapter.describe_tensors(update.down)} must have rank {update.rank} by its config")
    update.scale = alpha / (update.rank**0.5 if config.get("use_rslora") else update.rank)


def _match_pattern(config: Mapping[str, Any], key: str, name: str, default: Any) -> Any:
    for pattern, value in (config.get(key) or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return value
    return default


def _find_targets(config: Mapping[str, Any], module: str) -> list[str]:
    """Return the parameters of `module` that target_parameters names, in the order in which PEFT wraps them (down_proj
    last). In modules called experts every named parameter except `weight` matches, in other modules only `weight`."""
    targets = config.get("target_parameters") or ()
    names = {target.rpartition(".")[2] for target in targets}
    matches = {name for name in names if any(f".{module}.{name}".endswith(f".{target}") for target in targets)}
    matches = matches - {"weight"} if module.endswith("experts") else matches & {"weight"}
    return sorted(matches, key=lambda name: (name.startswith("down"), name))


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    """Check that weft can merge an adapter with `config` (the file at `path`), and that its values have valid types."""
    if (kind := config.get("peft_type")) != "LORA":
        raise WeftError(
            f"{path}: peft_type is {kind!r}, but weft merges LORA only: merge it with PEFT (merge_and_unload) and "
            "give the folder of the result to weft"
        )
    for key, value in config.items():
        if value and key not in _OF_TRAINING | _READ:
            raise WeftError(f"{path}: {key}={value!r} is not supported: merge the adapter with PEFT (merge_and_unload)")
    if (start := config.get("init_lora_weights", True)) not in _INITIALIZATIONS:
        raise WeftError(
            f"{path}: init_lora_weights={start!r} also changes the weights of the base model: convert the adapter to "
            "plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for key, fault in _find_faults(config):
        raise WeftError(f"{path}: {key}={config[key]!r} {fault}")


def _find_faults(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key of `config` whose value is invalid, with the fault as a phrase that follows key=value."""
    for key, fits, expected in (
        ("r", _is_positive, "is not a positive integer"),
        ("lora_alpha", _is_number, "is not a number"),
        ("rank_pattern", lambda ranks: _are_values(ranks, _is_positive), "does not map names to ranks"),
        ("alpha_pattern", lambda alphas: _are_values(alphas, _is_number), "does not map names to numbers"),
        ("modules_to_save", _are_names, "is not a list of names"),
        ("target_parameters", _are_names, "is not a list of names"),
    ):
        is_unset = key not in ("r", "lora_alpha") and config.get(key) is None
        if key in config and not is_unset and not fits(config[key]):
            yield key, expected
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in config.get(key) or {}:
            if fault := _check_pattern(pattern):
                yield key, f"has the pattern {pattern!r}, which {fault}"


def _check_pattern(pattern: str) -> str:
    """Return the reason to reject the regular expression `pattern`: it does not compile, or may be slow; else ""."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as e:
        return f"is not a regular expression ({e})"
    # Escaped characters repeat nothing, and a class in brackets counts as one character.
    bare = re.sub(r"\\.", "", pattern)
    if re.search(r"[)\]][*+{]", re.sub(r"\[[^\]]*\]", "x", bare)) or len(re.findall(r"[*+{]", bare)) > 3:
        return "is too complex: at most three of * + { are supported, none of them after a group"
    return ""


def _is_positive(value: Any) -> bool:
    # type(): isinstance accepts True as an integer.
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e30


def _are_values(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(map(fits, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)
