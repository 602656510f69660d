"""Folders of sentence-transformers: the modules after the transformer, prompts, limits.

Layout: https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes.readers import TensorReader
from weft.ir.storage.documents import Record, read_json

from ....dsl import Dense, LayerNorm, SentencePooling, UnitLength, WeightedLayerPooling, WordWeights
from ....models.heads import ENCODER_ALONE, encoder_alone
from ....models.left_out import LeftOut, unread_entries
from ....models.tables.family import SENTENCE, Config, Family
from ..hub import check_inside
from ..safetensors import Rerouted, SafetensorsReader, weight_files
from .static import STATIC_EMBEDDING, table_config

LAYERS = "all_layer_embeddings"  # that a transformer gives with output_hidden_states
MODULES, CONFIG = "modules.json", "config_sentence_transformers.json"
TOKENS, TEXT = "token_embeddings", "sentence_embedding"  # what modules read and write
OLD_NAMES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")  # sentence_*_config.json
MODES = {"cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "mean_sqrt_len"}
MODES |= {"weightedmean": "weighted", "lasttoken": "last"}  # of pooling, in the order of their vectors
_FLAGS = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
FLAGS = [f"pooling_mode_{flag}" for flag in _FLAGS]  # what older folders have in the place of modes
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "ELU")  # of torch.nn; in lower case, ours
SIZES = ("word_embedding_dimension", "embedding_dimension", "in_features", "dimension")  # which the tensors have
HARMLESS = {"torch_dtype", "dtype", "attn_implementation", "use_fast", "padding_side", "model_max_length"}
FIRST = ("Transformer", "CLIPModel", STATIC_EMBEDDING)
HIDDEN = {"method": "forward", "method_output_name": "last_hidden_state"}  # what is asked of a transformer for texts
FEATURES = {"method": "get_text_features", "method_output_name": "pooler_output"}  # and of one that projects
STORED = {"": "norm", ".linear": "linear", ".residual": "residual", ".layer_weights": "layer_weights"}  # of modules
UNSEEN = {"shared_layers", "sentence"}  # settings of models whose layers' states are others (ALBERT, CLIP)
DECODERS_ONLY = ("per_layer", "spread", "gather", "embed_norm_first")  # settings that an encoder does not have


@dataclass(frozen=True)
class Sentence:
    """The contents of the files of sentence-transformers in a folder.

    `home` is the folder of the transformer, `changes` are those of its config. `modules` are the records of what
    follows it, `weights` the folders of these by the beginning of their parameters' names. `facts` are prompts and
    limits, as in graph.meta. `left_out` are the keys of these files that nothing reads. `projects`: the transformer
    makes the vector of a text, and `pooling` has what follows. `static`: it is a table of vectors, whose config says
    its size.
    """

    files: tuple[Path, ...]
    home: Path
    changes: Mapping[str, Any]
    pooling: SentencePooling
    modules: list[dict[str, Any]]
    weights: Mapping[str, Path]
    facts: Mapping[str, Any]
    left_out: Sequence[LeftOut]
    projects: bool = False
    static: bool = False

    def config(self, config: Config, table: Family) -> dict[str, Any]:
        """Return `config` of the transformer, which `table` describes, with its changes and the pooling.

        Raises:
            WeftError: if the transformer should make the vector of a text, but has none that depends on it alone, or
                tokens have no weight.
        """
        changed, pooling = {**config, **self.changes}, self.pooling
        rule = table.settings["vocab"]
        vocab = rule(changed) if callable(rule) else rule
        for count in (len(module.weights) for module in pooling.before if isinstance(module, WordWeights)):
            if count < vocab:
                reason = f"its WordWeights has {count} words, but each of the model's {vocab} tokens needs a weight"
                raise WeftError(f"{self.files[0]}: {reason}")
        if self.projects:
            own = table.settings["sentence"](changed) if "sentence" in table.settings else None
            if own is None or own.mode == "end":
                why = "" if own is None else ", since they depend on the padding of a batch"
                told = f"{self.files[0]}: features of a {table.model_types[0]} with modules are not supported{why}"
                raise WeftError(f"{told}; without {MODULES}, the folder is a transformer alone")
            pooling = replace(own, after=(*own.after, *pooling.after), normalize=pooling.normalize)
        return {**changed, SENTENCE: pooling}

    @property
    def alone(self) -> bool:
        """Return whether no module follows a transformer that projects."""
        return self.projects and not self.modules

    def table(self, table: Family, config: Config) -> Family:
        """Return `table` for the states of its model, with the parameters of the modules.

        Raises:
            WeftError: if it has no states of tokens, or is not known to have them here.
        """
        kind, name = table.settings.get("kind", "decoder"), str(config.get("model_type"))
        averages = any(isinstance(module, WeightedLayerPooling) for module in self.pooling.before)
        if averages and not UNSEEN.isdisjoint(table.settings):
            told = f"a {name} model before a WeightedLayerPooling is not supported"
            raise WeftError(f"{self.files[0]}: {told}: weft knows other states of its layers than transformers gives")
        kind = kind(config) if callable(kind) else kind
        names: dict[str, Any] = {
            f"{at}{part}": f"{folder.name}:{stored}"
            for at, folder in self.weights.items()
            for part, stored in STORED.items()
        }
        if kind == "encoder":
            return replace(table, names={**table.names, **names})
        changes: dict[str, Any] = {"kind": "encoder", "unused": (*table.unused, "lm_head.*", "decoder.*")}
        if kind == "encoder-decoder" and name in ENCODER_ALONE:
            return encoder_alone(table).but(*table.model_types, names=names)
        if kind == "decoder" and table.settings.keys().isdisjoint(DECODERS_ONLY):
            halved = name == "gemma3_text" and bool(config.get("use_bidirectional_attention"))
            changes["causal"] = not halved and config.get("is_causal") is not False
            if not changes["causal"] and "window" in table.settings:
                changes["window"] = _on_both_sides(table.settings["window"], halved)
            passed = "use_bidirectional_attention" if halved else ""
        else:
            raise WeftError(f"{self.files[0]}: a {name} model is not supported as its Transformer")
        refuse = {key: values for key, values in table.refuse.items() if key != passed}
        return replace(table.but(*table.model_types, names=names, **changes), refuse=refuse)

    def joined(self, base: TensorReader) -> TensorReader:
        """Return a reader of `base` and of the modules, whose keys are as ``2_Dense:linear.weight``."""
        return _Joined(base, {path.name: SafetensorsReader(path) for path in self.weights.values()})

    def describe(self, graph: Graph) -> None:
        """Record in graph.meta what the files say."""
        if (limit := self.facts["max_seq_length"]) is not None:
            graph.meta["context"] = min(limit, graph.meta.get("max_positions") or limit)
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
        return [*self.base.keys(), *(f"{name}:{key}" for name, m in self.modules.items() for key in [*m.keys()])]

    def find(self, key: str) -> tuple[TensorReader, str]:
        name, _, rest = key.partition(":")
        return (self.modules[name], rest) if name in self.modules else (self.base, key)


def _on_both_sides(rule: Any, halved: bool) -> Callable[[Config], Any]:
    """Return the rule for windows that hold a token and w others on each side, or (`halved`) on both together."""

    def windows(config: Config) -> Any:
        found = rule(config) if callable(rule) else rule
        many = found if isinstance(found, tuple) else (found,)
        wide = tuple(w and (w // 2 if halved else w) + 1 for w in many)
        return wide if isinstance(found, tuple) else wide[0]

    return windows


# -- reading


class _Step(NamedTuple):
    """A module, which `reads` what other modules or the transformer write, and `writes`; None has no effect."""

    reads: str
    writes: str
    module: Any
    record: dict[str, Any]
    folder: Path


def transformer_home(root: Path) -> Path:
    """Return the folder of the transformer in `root`: itself, unless modules.json says more.

    Raises:
        WeftError: if modules.json is unsound, or names a module that weft does not read.
    """
    return _listed(root)[0][1] if (root / MODULES).is_file() else root


def read_sentence(root: Path, config: Config) -> Sentence | None:
    """Return what sentence-transformers reads in the folder `root`, whose transformer has `config`; None if there is no
    modules.json.

    Raises:
        WeftError: naming the module, key or file that is not supported, missing or unsound.
    """
    if not (root / MODULES).is_file():
        return None
    (first, home), *others = _listed(root)
    files, records, steps, needed = [root / MODULES], list[Record](), list[_Step](), TEXT
    static = first == STATIC_EMBEDDING
    changes, limits, gives = _table_alone(home) if static else _transformer(first, home, config, files, records)
    for kind, folder in reversed(others):
        said = _read(folder / "config.json", files)
        step = _Step(*_READERS[kind](said), {"type": kind, "config": dict(said.data)}, folder)
        if step.writes == needed and step.module is not None:  # else later modules put another in its place
            steps.insert(0, step)
            records.append(said)
            needed = step.reads
    if needed == LAYERS and gives == TOKENS and {**config, **changes}.get("output_hidden_states"):
        needed = TOKENS
    projects = gives == needed == TEXT and not static  # the vector of a table is a mean, as a Pooling's
    if gives == needed == TEXT:
        steps.insert(0, _Step(TOKENS, TEXT, SentencePooling(), {}, home))
        gives = needed = TOKENS
    at = next((i for i, step in enumerate(steps) if isinstance(step.module, SentencePooling)), None)
    if needed != gives or at is None:
        told = f"no Pooling makes {TEXT} of {TOKENS}, which the Transformer gives"
        told = f"WeightedLayerPooling reads {LAYERS}: set output_hidden_states" if needed == LAYERS else told
        raise WeftError(f"{root / MODULES}: {told}")
    weights: dict[str, Path] = {}
    for i, step in enumerate(steps):
        if isinstance(step.module, (Dense, LayerNorm, WeightedLayerPooling)):
            step.record["at"] = f"sentence.before_{i}" if i < at else f"sentence.after_{i - at - 1 + projects}"
            weights[step.record["at"]] = step.folder
    last = len(steps) - isinstance(steps[-1].module, UnitLength)
    before, after = (tuple(step.module for step in some) for some in (steps[:at], steps[at + 1 : last]))
    pooling = replace(steps[at].module, before=before, after=after, normalize=last < len(steps))
    facts = {**_facts(root, files, records), **limits, "include_prompt": pooling.include_prompt}
    files += [file for folder in weights.values() for file in weight_files(folder)]
    left_out = list[LeftOut]()
    for said in records:
        known = said.asked.union(SIZES, FLAGS, ["__version__"])
        left_out.extend(unread_entries(said.data, known, str(Path(said.source).relative_to(root))))
    listed = [step.record for step in steps if step.record]
    return Sentence(tuple(files), home, changes, pooling, listed, weights, facts, left_out, projects, static)


def static_config(root: Path) -> dict[str, Any] | None:
    """Return the config of the table of vectors that stands for the transformer in `root`; None if another does.

    Raises:
        WeftError: if its rows are shared by tokens, or there are none.
    """
    kind, folder = _listed(root)[0]
    return table_config(folder) if kind == STATIC_EMBEDDING else None


def _listed(root: Path) -> list[tuple[str, Path]]:
    """Return the modules that `root` lists, the transformer first, and their folders."""
    source, found = root / MODULES, list[tuple[str, Path]]()
    for number, module in enumerate(Record(source, {"modules": read_json(source, list)}).records("modules")):
        spelled, folder = module.text("type"), root / module.text("path", "")
        home, _, kind = spelled.rpartition(".")
        if not home.startswith("sentence_transformers.") or kind not in (_READERS if number else FIRST):
            raise WeftError(
                f"{source}: module {number}, {spelled}, is not supported: weft reads a Transformer or a CLIPModel and "
                f"after it {', '.join(_READERS)} of sentence_transformers; "
                f"without {MODULES}, the folder is a transformer alone"
            )
        check_inside(root, folder / "config.json")
        found.append((kind, folder))
    if not found:
        raise WeftError(f"{source} lists no modules: remove it, or fetch the folder again")
    return found


def _read(path: Path, files: list[Path]) -> Record:
    """Return what the file at `path` says, which is added to `files`; nothing if there is none."""
    if not path.is_file():
        return Record(path, {})
    files.append(path)
    return Record.read(path)


def _pooling(said: Record) -> tuple[str, str, SentencePooling]:
    if "embedding_dimension" not in said:
        said.integer("word_embedding_dimension")
    modes = said.get("pooling_mode", str | list[str], [])
    if "pooling_mode" not in said:
        flags = (said.flag(flag, False) for flag in FLAGS)
        modes = [mode for mode, on in zip(MODES, flags, strict=True) if on] or "mean"
    modes = [modes] if isinstance(modes, str) else modes
    if not modes or not set(modes) <= MODES.keys():
        raise said.misfit("pooling_mode", f"it must be one or several of {', '.join(MODES)}")
    ours = tuple(MODES[mode] for mode in modes)
    return (
        TOKENS,
        TEXT,
        SentencePooling(ours if len(ours) > 1 else ours[0], include_prompt=said.flag("include_prompt", True)),
    )


def _dense(said: Record) -> tuple[str, str, Dense]:
    spelled = said.text("activation_function", "torch.nn.Tanh")
    name = spelled.rpartition(".")[2]
    if not spelled.startswith("torch.nn.") or name not in ACTIVATIONS:
        raise said.misfit("activation_function", f"weft reads {', '.join(ACTIVATIONS)} of torch.nn")
    width, bias, residual = (
        said.integer("out_features", least=1),
        said.flag("bias", True),
        said.flag("use_residual", False),
    )
    return *_places(said), Dense(width, name.lower(), bias, residual)


def _layers(said: Record) -> tuple[str, str, WeightedLayerPooling]:
    return LAYERS, TOKENS, WeightedLayerPooling(said.integer("layer_start", 4, least=0))


def _words(said: Record) -> tuple[str, str, WordWeights]:
    known, other = said.get("word_weights", dict[str, float]), said.get("unknown_word_weight", float, 1.0)
    words = said.get("vocab", list[str])
    return TOKENS, TOKENS, WordWeights(tuple(known.get(w, known.get(w.lower(), other)) for w in words))


def _places(said: Record) -> tuple[str, str]:
    """Return what a module reads and what it writes."""
    reads = said.text("module_input_name", TEXT)
    return reads, said.text("module_output_name", reads)


_READERS: dict[str, Callable[[Record], tuple[str, str, Any]]] = {
    "Pooling": _pooling,
    "Dense": _dense,
    "WeightedLayerPooling": _layers,
    "WordWeights": _words,
    "Normalize": lambda said: (*_places(said), UnitLength()),
    "LayerNorm": lambda said: (TEXT, TEXT, LayerNorm()),
    "Dropout": lambda said: (TEXT, TEXT, None),  # of training
}


def _table_alone(home: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return what `_transformer` does, of a table: the tokenizer may cut texts."""
    cut = _read(home / "tokenizer.json", []).get("truncation", dict | None, None) or {}
    return {}, {"max_seq_length": cut.get("max_length"), "do_lower_case": False}, TEXT


def _transformer(
    kind: str, home: Path, config: Config, files: list[Path], records: list[Record]
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the changes of the config of the transformer, a module of `kind`, the limits of texts, and what it gives.

    Raises:
        WeftError: if other outputs than the states of texts are asked for, or it is loaded in another way.
    """
    known = (_read(home / f"sentence_{name}_config.json", files) for name in OLD_NAMES)
    said = next((record for record in known if record.data), Record(home / "sentence_bert_config.json", {}))
    records.append(said)
    said.choice("transformer_task", ("feature-extraction",), "feature-extraction")
    gives = said.choice("module_output_name", (TOKENS, TEXT), TEXT if kind == "CLIPModel" else TOKENS)
    wanted = HIDDEN if gives == TOKENS else FEATURES
    asked = said.get("modality_config", dict, {"text": wanted})
    if "message" in asked or asked.get("text") != wanted:
        told = f"weft reads the {wanted['method_output_name']} of texts by {wanted['method']}, without a chat template"
        raise said.misfit("modality_config", told)
    options: dict[str, Any] = {}
    for name in ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs"):
        options |= said.get(name, dict, {})
        if unknown := options.keys() - HARMLESS:
            raise said.misfit(name, f"weft does not know {', '.join(sorted(unknown))}")
    if said.get("tokenizer_name_or_path", Any, None):
        raise said.misfit("tokenizer_name_or_path", "the tokenizer must be that of the folder")
    limit = options.get("model_max_length", said.integer("max_seq_length", None, least=1))
    if limit is None:  # tokenizers without a limit say 10^30
        most = [_read(home / "tokenizer_config.json", []).data.get("model_max_length")]
        most.append(config.get("max_position_embeddings"))
        limit = min((n for n in most if isinstance(n, int) and 0 < n < 1 << 31), default=None)
    changes = {**said.get("config_args", dict, {}), **said.get("config_kwargs", dict, {})}
    limits = {"max_seq_length": limit, "do_lower_case": said.flag("do_lower_case", False)}
    return {key: value for key, value in changes.items() if key not in HARMLESS}, limits, gives


def _facts(root: Path, files: list[Path], records: list[Record]) -> dict[str, Any]:
    """Return what config_sentence_transformers.json says of prompts, dimensions and similarity."""
    said = _read(root / CONFIG, files)
    records.append(said)
    said.choice("model_type", ("SentenceTransformer",), "SentenceTransformer")
    prompts = {name: text or "" for name, text in said.get("prompts", dict[str, str | None], {}).items()}
    return {
        "prompts": prompts,
        "default_prompt_name": said.choice("default_prompt_name", ("query", "document", *prompts), None),
        "similarity_fn_name": said.text("similarity_fn_name", None),
        "truncate_dim": said.integer("truncate_dim", None, least=1),
    }
