"""Folders of sentence-transformers: the modules after the transformer, prompts, limits.

Layout: https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.ir.documents import Record, read_json
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import Recipe, Source
from weft.ir.recipes.readers import TensorReader

from ...dsl import Dense, LayerNorm, SentencePooling, UnitLength
from ...models.tables.family import SENTENCE, Config, Fetch, Table
from ...models.tables.settings import Settings
from .hub import check_inside
from .safetensors import Rerouted, SafetensorsReader, weight_files

MODULES, CONFIG = "modules.json", "config_sentence_transformers.json"
TOKENS, TEXT = "token_embeddings", "sentence_embedding"  # what modules read and write
_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
LIMITS = tuple(f"sentence_{name}_config.json" for name in _FAMILIES)  # today all transformers have the first
POOLING = {  # modes in the order of their vectors: ours, and the flags of older configs
    "cls": ("cls", "cls_token"),
    "max": ("max", "max_tokens"),
    "mean": ("mean", "mean_tokens"),
    "mean_sqrt_len_tokens": ("mean_sqrt_len", "mean_sqrt_len_tokens"),
    "weightedmean": ("weighted", "weightedmean_tokens"),
    "lasttoken": ("last", "lasttoken"),
}
ACTIVATIONS = (
    "Identity",
    "Tanh",
    "ReLU",
    "GELU",
    "SiLU",
    "Sigmoid",
    "ELU",
)  # of torch.nn, by their names in lower case
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
OPTIONS = (("model_args", "model_kwargs"), ("tokenizer_args", "processor_kwargs"), ("config_args", "config_kwargs"))
POSITIONS, HUGE = "max_position_embeddings", 1 << 31  # tokenizers without a limit say 10^30
HARMLESS = {"torch_dtype", "dtype", "attn_implementation", "use_fast", "padding_side", "model_max_length"}
ENCODER_ALONE = ("t5", "mt5", "umt5")  # of these sentence-transformers loads the encoder
DECODERS_ONLY = ("per_layer", "spread", "gather", "embed_norm_first")  # settings that an encoder does not have


@dataclass(frozen=True)
class Sentence:
    """What the files of sentence-transformers in a folder say.

    `source` is its modules.json, `home` the folder of the transformer, `files` are those that were read. `modules` are
    the records of what follows the transformer; `weights` are the folders of modules by the names of their parameters.
    `changes` are those of the transformer's config, `limit` is the most tokens of a text, `lower` says that texts
    are made lower-case, `facts` are prompts and dimensions as in graph.meta.
    """

    source: Path
    home: Path
    pooling: SentencePooling
    modules: list[dict[str, Any]]
    weights: Mapping[str, Path]
    changes: Mapping[str, Any]
    limit: int | None
    lower: bool
    facts: Mapping[str, Any]
    files: tuple[Path, ...]

    def config(self, config: Config) -> dict[str, Any]:
        """Return `config` of the transformer with its changes and the pooling."""
        return {**config, **self.changes, SENTENCE: self.pooling}

    def table(self, table: Table, config: Config) -> Table:
        """Return `table` for the states of its model, and with the parameters of the modules.

        Raises:
            WeftError: if the states are not those of tokens.
        """
        kind, name = table.settings.get("kind", "decoder"), str(config.get("model_type"))
        kind = kind(config) if callable(kind) else kind
        parts = {"": "norm", ".linear": "linear", ".residual": "residual"}
        names: dict[str, Any] = {
            f"{at}{part}": partial(_stored, f"{folder.name}:{stored}")
            for at, folder in self.weights.items()
            for part, stored in parts.items()
        }
        if kind == "encoder":
            return replace(table, names={**table.names, **names})
        if kind == "encoder-decoder" and name in ENCODER_ALONE:
            names |= {key.removeprefix("encoder."): value for key, value in table.names.items()}
            table = table.but(*table.model_types, names=names, kind="encoder", unused=(*table.unused, "decoder.*"))
            return replace(table, refuse={})  # is_encoder_decoder may be false
        if kind != "decoder" or not table.settings.keys().isdisjoint(DECODERS_ONLY):
            raise WeftError(f"{self.source}: a {name} model is not supported as its Transformer")
        halved = name == "gemma3_text" and bool(config.get("use_bidirectional_attention"))
        causal = not halved and config.get("is_causal") is not False
        changes: dict[str, Any] = {"kind": "encoder", "causal": causal, "unused": (*table.unused, "lm_head.*")}
        if not causal and "window" in table.settings:
            changes["window"] = _on_both_sides(table.settings["window"], halved)
        refuse = {key: values for key, values in table.refuse.items() if not halved or "bidirectional" not in key}
        return replace(table.but(*table.model_types, names=names, **changes), refuse=refuse)

    def joined(self, base: TensorReader) -> TensorReader:
        """Return a reader of `base` and of the modules, whose keys are as ``2_Dense:linear.weight``."""
        return _Joined(base, {path.name: SafetensorsReader(path) for path in self.weights.values()})

    def describe(self, graph: Graph) -> None:
        """Record in graph.meta what the files say."""
        if self.limit is not None:
            graph.meta["context"] = min(self.limit, graph.meta.get("max_positions") or self.limit)
        graph.meta["sentence"] = {"modules": self.modules, **self.facts}


@dataclass(frozen=True)
class _Joined(Rerouted):
    """The tensors of `base`, and those of `modules` under ``folder:key``."""

    base: TensorReader
    modules: Mapping[str, SafetensorsReader]

    @property
    def path(self) -> Path:
        return self.base.path

    def keys(self) -> Iterable[str]:
        return [
            *self.base.keys(),
            *(f"{name}:{key}" for name, module in self.modules.items() for key in [*module.keys()]),
        ]

    def find(self, key: str) -> tuple[TensorReader, str]:
        name, _, rest = key.partition(":")
        return (self.modules[name], rest) if name in self.modules else (self.base, key)


def _stored(name: str, fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Return the recipe of the tensor ``name.part``."""
    return Source(f"{name}.{part}")


def _on_both_sides(rule: Any, halved: bool) -> Callable[[Config], Any]:
    """Return the rule for windows w that hold w tokens on each side, or together (`halved`), and the token itself."""

    def widened(window: int | None) -> int | None:
        return window and (window // 2 if halved else window) + 1

    def windows(config: Config) -> Any:
        found = rule(config) if callable(rule) else rule
        return tuple(map(widened, found)) if isinstance(found, tuple) else widened(found)

    return windows


# -- reading


def transformer_home(root: Path) -> Path:
    """Return the folder of the transformer in `root`, which may be inside: modules.json says so."""
    if (root / "config.json").is_file() or not (root / MODULES).is_file():
        return root
    return next((root / module.text("path", "") for module in _modules(root)), root)


def read_sentence(root: Path, config: Config) -> Sentence | None:
    """Return what sentence-transformers reads in the folder `root`, whose transformer has `config`; None if it has no
    modules.json.

    Raises:
        WeftError: naming the module, key or file that is not supported, missing or unsound.
    """
    if not (root / MODULES).is_file():
        return None
    source, home, files = root / MODULES, root, [root / MODULES]
    steps: list[tuple[str, str, Any, dict[str, Any], Path]] = []  # what it reads and writes, module, record, folder
    for number, module in enumerate(_modules(root)):
        kind, folder = module.text("type"), root / module.text("path", "")
        namespace, _, name = kind.rpartition(".")
        if not namespace.startswith("sentence_transformers") or name not in ("Transformer", *_READERS):
            raise WeftError(
                f"{source}: the module {kind} is not supported; weft reads Transformer, {', '.join(_READERS)} of "
                f"sentence_transformers, and without {MODULES} the transformer alone"
            )
        if (number == 0) != (name == "Transformer"):
            raise WeftError(f"{source}: {name} is module {number}, but the first must be the only Transformer")
        check_inside(root, folder / "config.json")
        if name == "Transformer":
            home = folder
            continue
        said = _optional(folder / "config.json", files)
        steps.append((*_READERS[name](said), {"type": name, "config": dict(said.data)}, folder))
    steps = _live(steps, source)
    at = next(i for i, (_, _, module, *_) in enumerate(steps) if isinstance(module, SentencePooling))
    normalize = isinstance(steps[-1][2], UnitLength)
    before, after = steps[:at], steps[at + 1 : len(steps) - normalize]
    weights: dict[str, Path] = {}
    for place, some in (("before", before), ("after", after)):
        for i, (_, _, module, record, folder) in enumerate(some):
            if not isinstance(module, UnitLength):
                record["at"] = f"sentence.{place}_{i}"
                weights[record["at"]] = folder
    layers = {name: tuple(module for _, _, module, *_ in some) for name, some in (("before", before), ("after", after))}
    pooling = replace(steps[at][2], normalize=normalize, **layers)
    changes, limit, lower = _transformer(home, config, files)
    facts = {**_facts(root, files), "max_seq_length": limit, "do_lower_case": lower}
    files += [file for folder in weights.values() for file in weight_files(folder)]
    facts["include_prompt"] = pooling.include_prompt
    modules = [record for *_, record, _ in steps]
    return Sentence(source, home, pooling, modules, weights, changes, limit, lower, facts, tuple(files))


def _modules(root: Path) -> list[Record]:
    source = root / MODULES
    listed = read_json(source, list)
    if not listed or not all(isinstance(module, Mapping) for module in listed):
        raise WeftError(f"{source} must be a list of modules, each a JSON object")
    return [Record(source, module, f"{i}.") for i, module in enumerate(listed)]


def _optional(path: Path, files: list[Path]) -> Record:
    """Return what the file at `path` says, which is added to `files`; nothing if there is none."""
    if not path.is_file():
        return Record(path, {})
    files.append(path)
    return Record.read(path)


def _live(steps: list[Any], source: Path) -> list[Any]:
    """Return the steps that the last sentence_embedding is made by.

    Raises:
        WeftError: if no Pooling makes it of token_embeddings.
    """
    needed, live = TEXT, list[Any]()
    for step in reversed(steps):
        if step[1] == needed and step[2] is not None:
            live.insert(0, step)
            needed = step[0]
    if needed != TOKENS or not any(isinstance(step[2], SentencePooling) for step in live):
        raise WeftError(f"{source}: no Pooling makes {TEXT} of {TOKENS}, which the Transformer gives")
    return live


def _pooling(said: Record) -> tuple[str, str, SentencePooling]:
    if "pooling_mode" in said:
        modes = said.get("pooling_mode", str | list[str])
        modes = [modes] if isinstance(modes, str) else modes
    else:
        modes = [mode for mode, (_, flag) in POOLING.items() if said.flag(f"pooling_mode_{flag}", False)] or ["mean"]
    if not modes or not set(modes) <= POOLING.keys():
        raise said.misfit("pooling_mode", f"it must be one or several of {', '.join(POOLING)}")
    ours = tuple(POOLING[mode][0] for mode in modes)
    return (
        TOKENS,
        TEXT,
        SentencePooling(ours[0] if len(ours) == 1 else ours, include_prompt=said.flag("include_prompt", True)),
    )


def _dense(said: Record) -> tuple[str, str, Dense]:
    spelled = said.text("activation_function", "torch.nn.Tanh")
    name = spelled.rpartition(".")[2]
    if not spelled.startswith("torch.nn.") or name not in ACTIVATIONS:
        raise said.misfit("activation_function", f"weft knows {', '.join(ACTIVATIONS)} of torch.nn")
    dense = Dense(
        said.integer("out_features", least=1),
        name.lower(),
        said.flag("bias", True),
        said.flag("use_residual", False),
    )
    return *_places(said), dense


def _places(said: Record) -> tuple[str, str]:
    """Return what a module reads and what it writes."""
    reads = said.text("module_input_name", TEXT)
    return reads, said.text("module_output_name", reads)


_READERS: dict[str, Callable[[Record], tuple[str, str, Any]]] = {
    "Pooling": _pooling,
    "Dense": _dense,
    "Normalize": lambda said: (*_places(said), UnitLength()),
    "LayerNorm": lambda said: (TEXT, TEXT, LayerNorm()),
    "Dropout": lambda said: (TEXT, TEXT, None),  # of training
}


def _transformer(home: Path, config: Config, files: list[Path]) -> tuple[dict[str, Any], int | None, bool]:
    """Return the changes of the transformer's config, the most tokens of a text, and whether it is made lower-case.

    Raises:
        WeftError: if it is asked for other outputs than the states of texts, or loaded in another way.
    """
    known = (_optional(home / name, files) for name in LIMITS if (home / name).is_file())
    said = next((record for record in known if record.data), Record(home / LIMITS[0], {}))
    said.choice("transformer_task", ("feature-extraction",), "feature-extraction")
    said.choice("module_output_name", (TOKENS,), TOKENS)
    asked = said.record("modality_config", {"text": {"method": "forward", "method_output_name": "last_hidden_state"}})
    if "message" in asked:
        raise said.misfit("modality_config", "weft embeds texts, not messages of a chat template")
    text = asked.record("text")
    text.choice("method", ("forward",))
    text.choice("method_output_name", ("last_hidden_state",))
    if said.data.get("tokenizer_name_or_path"):
        raise said.misfit("tokenizer_name_or_path", "the tokenizer must be in the folder itself")
    options = {name: said.get(name, dict, {}) for pair in OPTIONS for name in pair}
    changes = {**options.pop("config_args"), **options.pop("config_kwargs")}
    for name, given in options.items():
        if unknown := given.keys() - HARMLESS:
            raise said.misfit(name, f"weft does not know {', '.join(sorted(unknown))}")
    longest = [options[name].get("model_max_length") for name in OPTIONS[1]] + [said.integer("max_seq_length", None, 1)]
    limit = next((int(number) for number in longest if isinstance(number, int)), None)
    if limit is None:
        most = [_optional(home / "tokenizer_config.json", []).data.get("model_max_length"), config.get(POSITIONS)]
        limit = min((number for number in most if isinstance(number, int) and 0 < number < HUGE), default=None)
    return {k: v for k, v in changes.items() if k not in HARMLESS}, limit, said.flag("do_lower_case", False)


def _facts(root: Path, files: list[Path]) -> dict[str, Any]:
    """Return what config_sentence_transformers.json says of prompts, dimensions and similarity."""
    said = _optional(root / CONFIG, files)
    said.choice("model_type", ("SentenceTransformer",), "SentenceTransformer")
    prompts = {name: text or "" for name, text in said.get("prompts", dict[str, str | None], {}).items()}
    facts = {
        "prompts": prompts,
        "default_prompt_name": said.text("default_prompt_name", None),
        "similarity_fn_name": said.choice("similarity_fn_name", SIMILARITIES, None),
        "truncate_dim": said.integer("truncate_dim", None, least=1),
    }
    if facts["default_prompt_name"] not in (None, "query", "document", *prompts):
        raise said.misfit("default_prompt_name", "it must be a name of prompts")
    return facts
