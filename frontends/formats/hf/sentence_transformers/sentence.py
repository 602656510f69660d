"""Read a folder of sentence-transformers: the modules after the transformer, prompts, limits.

Layout: https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import Recipe, Scale
from weft.ir.recipes.readers import TensorReader
from weft.ir.storage.documents import Record, read_json

from ....dsl import Dense, LayerNorm, SentencePooling, Unchanged, UnitLength, WeightedLayerPooling, WordWeights
from ....models.left_out import LeftOut, find_unread_entries
from ....models.tables.family import SENTENCE, Config, Family, Fetch, key
from ....models.tables.settings import Settings
from ....models.task_heads import SEPARABLE_ENCODERS, extract_encoder
from ..hub import check_inside
from ..safetensors import PatchedReader, SafetensorsReader, list_weight_files

STATIC_EMBEDDING = "StaticEmbedding"  # class of the module


def _read_rows(fetch: Fetch, part: str, settings: Settings) -> Recipe:
    """Return the recipe of the embedding table, times the weights of its rows if the folder has them (model2vec)."""
    if fetch.has("embedding.weight"):
        return fetch("embedding.weight")
    return Scale(fetch("embeddings"), fetch("weights")) if fetch.has("weights") else fetch("embeddings")


STATIC = Family(  # an embedding table, expressed as a transformer whose layer has no effect
    model_types=("static",),
    settings={
        **{"kind": "encoder", "vocab": key("vocab_size"), "dim": key("hidden_size")},
        **{"layers": 1, "block": lambda config: Unchanged(), "arrangement": "post"},
    },
    names={"embed": _read_rows},
)


def build_table_config(folder: Path) -> dict[str, Any]:
    """Return a config of model_type "static" with the sizes of the embedding table in `folder`.

    Raises:
        WeftError: if several tokens share a table row, or there is no table.
    """
    reader = SafetensorsReader(folder)
    keys = {*reader.keys()}
    if "mapping" in keys:
        remedy = "save the folder with sentence-transformers, which writes a row per token"
        raise WeftError(f"{reader.path}: tokens that share rows (tensor 'mapping') are not supported: {remedy}")
    name = next((key for key in ("embedding.weight", "embeddings") if key in keys), None)
    if name is None or len(shape := reader.shape(name)) != 2:
        raise WeftError(f"{reader.path} lacks the matrix 'embedding.weight', which a StaticEmbedding needs")
    return {"model_type": "static", "vocab_size": shape[0], "hidden_size": shape[1]}


LAYERS = "all_layer_embeddings"  # an output of transformers with output_hidden_states
MODULES, CONFIG = "modules.json", "config_sentence_transformers.json"
TOKENS, TEXT = "token_embeddings", "sentence_embedding"  # names that modules read and write
OLD_NAMES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")  # sentence_*_config.json
MODES = {"cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "mean_sqrt_len"}
MODES |= {"weightedmean": "weighted", "lasttoken": "last"}  # of pooling, in the order of their concatenation
_FLAGS = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
FLAGS = [f"pooling_mode_{flag}" for flag in _FLAGS]  # older folders have these instead of modes
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "ELU")  # torch.nn's names; ours are lower case
SIZES = ("word_embedding_dimension", "embedding_dimension", "in_features", "dimension")  # implied by the tensors
HARMLESS = {"torch_dtype", "dtype", "attn_implementation", "use_fast", "padding_side", "model_max_length"}
FIRST = ("Transformer", "CLIPModel", STATIC_EMBEDDING)
HIDDEN = {"method": "forward", "method_output_name": "last_hidden_state"}  # modality_config for token embeddings
FEATURES = {"method": "get_text_features", "method_output_name": "pooler_output"}  # and for text features (CLIP)
STORED = {"": "norm", ".linear": "linear", ".residual": "residual", ".layer_weights": "layer_weights"}  # by our suffix
UNSEEN = {"shared_layers", "sentence"}  # of models whose layer outputs differ from transformers' (ALBERT, CLIP)
DECODERS_ONLY = ("per_layer", "spread", "gather", "embed_norm_first")  # settings that encoders do not support


@dataclass(frozen=True)
class Sentence:
    """The contents of the files of sentence-transformers in a folder, whose paths are `files`.

    changes: entries that replace those of the transformer's config. pooling: the modules after it.
    modules: records of these modules for the manifest. weights: prefix of parameter names → folder of their module.
    meta: prompts and limits, as in graph.meta. left_out: keys of these files that nothing reads.
    projects: the transformer itself computes the sentence embedding, and `pooling` has only the modules after it.
    static: the transformer is an embedding table.
    """

    files: tuple[Path, ...]
    changes: Mapping[str, Any]
    pooling: SentencePooling
    modules: list[dict[str, Any]]
    weights: Mapping[str, Path]
    meta: Mapping[str, Any]
    left_out: Sequence[LeftOut]
    projects: bool = False
    static: bool = False

    def config(self, config: Config, table: Family) -> dict[str, Any]:
        """Return the transformer's `config`, which `table` describes, with `changes`, and the pooling under `SENTENCE`.

        Raises:
            WeftError: if `projects`, but models of `table` have no sentence embedding or one that depends on the
                padding of a batch; or if a WordWeights module has fewer weights than the model has tokens.
        """
        changed, pooling = {**config, **self.changes}, self.pooling
        rule = table.settings["vocab"]
        vocab = rule(changed) if callable(rule) else rule
        for count in (len(module.weights) for module in pooling.before if isinstance(module, WordWeights)):
            if count < vocab:
                reason = f"WordWeights has {count} words, but needs one for each of the model's {vocab} tokens"
                raise WeftError(f"{self.files[0]}: {reason}")
        if self.projects:
            projection = table.settings["sentence"](changed) if "sentence" in table.settings else None
            if projection is None or projection.mode == "end":
                reason = "" if projection is None else ", as they depend on the padding of a batch"
                fault = f"modules after features of {table.model_types[0]} models are not supported{reason}"
                raise WeftError(f"{self.files[0]}: {fault}: remove {MODULES} to read the transformer alone")
            pooling = replace(projection, after=(*projection.after, *pooling.after), normalize=pooling.normalize)
        return {**changed, SENTENCE: pooling}

    def table(self, table: Family, config: Config) -> Family:
        """Return `table` as an encoder that outputs hidden states of tokens, with the parameters of the modules.

        Raises:
            WeftError: if models of `table` with `config` cannot output them.
        """
        kind, name = table.settings.get("kind", "decoder"), str(config.get("model_type"))
        averages = any(isinstance(module, WeightedLayerPooling) for module in self.pooling.before)
        if averages and not UNSEEN.isdisjoint(table.settings):
            fault = f"WeightedLayerPooling is not supported for {name} models"
            raise WeftError(f"{self.files[0]}: {fault}, whose layer outputs differ between weft and transformers")
        kind = kind(config) if callable(kind) else kind
        names: dict[str, Any] = {
            f"{prefix}{part}": f"{folder.name}:{stored}"
            for prefix, folder in self.weights.items()
            for part, stored in STORED.items()
        }
        if kind == "encoder":
            return replace(table, names={**table.names, **names})
        changes: dict[str, Any] = {"kind": "encoder", "unused": (*table.unused, "lm_head.*", "decoder.*")}
        if kind == "encoder-decoder" and name in SEPARABLE_ENCODERS:
            return extract_encoder(table).derive(*table.model_types, names=names)
        if kind == "decoder" and table.settings.keys().isdisjoint(DECODERS_ONLY):
            is_split = name == "gemma3_text" and bool(config.get("use_bidirectional_attention"))
            changes["causal"] = not is_split and config.get("is_causal") is not False
            if not changes["causal"] and "window" in table.settings:
                changes["window"] = _widen_windows(table.settings["window"], is_split)
            supported = "use_bidirectional_attention" if is_split else ""
        else:
            raise WeftError(f"{self.files[0]}: {name} models are not supported as Transformer")
        refuse = {key: values for key, values in table.refuse.items() if key != supported}
        return replace(table.derive(*table.model_types, names=names, **changes), refuse=refuse)

    def join_weights(self, base: TensorReader) -> TensorReader:
        """Return a reader of `base`, and of the modules' tensors under ``folder:key`` (2_Dense:linear.weight)."""
        readers = {path.name: SafetensorsReader(path) for path in self.weights.values()}
        return PatchedReader(base, {f"{name}:{key}": (r, key) for name, r in readers.items() for key in [*r.keys()]})

    def describe(self, graph: Graph) -> None:
        """Record the context limit, the modules and the prompts in `graph.meta`."""
        if (limit := self.meta["max_seq_length"]) is not None:
            graph.meta["context"] = min(limit, graph.meta.get("max_positions") or limit)
        graph.meta["sentence"] = {"modules": self.modules, **self.meta}


def _widen_windows(rule: Any, is_split: bool) -> Callable[[Config], Any]:
    """Return a rule for the windows of bidirectional layers, which see w tokens on each side (w // 2 if `is_split`) if
    `rule` states w."""

    def windows(config: Config) -> Any:
        window = rule(config) if callable(rule) else rule
        windows = window if isinstance(window, tuple) else (window,)
        widened = tuple(w and (w // 2 if is_split else w) + 1 for w in windows)
        return widened if isinstance(window, tuple) else widened[0]

    return windows


# -- reading


class _Step(NamedTuple):
    """A module of a folder (None if it has no effect), and the names of the values that it reads and writes."""

    reads: str
    writes: str
    module: Any
    record: dict[str, Any]
    folder: Path


def find_transformer(root: Path) -> Path:
    """Return the folder of the transformer in `root`: that of the first module, or `root` itself without modules.json.

    Raises:
        WeftError: if modules.json is invalid, or names a module that weft does not read.
    """
    return _list_modules(root)[0][1] if (root / MODULES).is_file() else root


def read_sentence(root: Path, config: Config) -> Sentence | None:
    """Read the files of sentence-transformers in the folder `root`, whose transformer has `config`.

    Return None if there is no modules.json.

    Raises:
        WeftError: naming the module, key or file that is not supported, missing or invalid.
    """
    if not (root / MODULES).is_file():
        return None
    (first, home), *later_modules = _list_modules(root)
    files, records, steps, value = [root / MODULES], list[Record](), list[_Step](), TEXT
    static = first == STATIC_EMBEDDING
    changes, limits, output = _read_static(home) if static else _read_transformer(first, home, config, files, records)
    for kind, folder in reversed(later_modules):
        record = _read_record(folder / "config.json", files)
        step = _Step(*_READERS[kind](record), {"type": kind, "config": dict(record.data)}, folder)
        if step.writes == value and step.module is not None:  # else a later module overwrites its output
            steps.insert(0, step)
            records.append(record)
            value = step.reads
    if value == LAYERS and output == TOKENS and {**config, **changes}.get("output_hidden_states"):
        value = TOKENS
    projects = output == value == TEXT and not static  # an embedding table outputs a mean, as a Pooling does
    if output == value == TEXT:
        steps.insert(0, _Step(TOKENS, TEXT, SentencePooling(), {}, home))
        output = value = TOKENS
    pooling_index = next((i for i, step in enumerate(steps) if isinstance(step.module, SentencePooling)), None)
    if value != output or pooling_index is None:
        fault = f"a Pooling module is missing, which computes {TEXT} from the Transformer's {TOKENS}"
        fault = f"WeightedLayerPooling reads {LAYERS}: set output_hidden_states" if value == LAYERS else fault
        raise WeftError(f"{root / MODULES}: {fault}")
    weights: dict[str, Path] = {}
    for i, step in enumerate(steps):
        if isinstance(step.module, (Dense, LayerNorm, WeightedLayerPooling)):
            place = f"before_{i}" if i < pooling_index else f"after_{i - pooling_index - 1 + projects}"
            step.record["at"] = f"sentence.{place}"
            weights[step.record["at"]] = step.folder
    last = len(steps) - isinstance(steps[-1].module, UnitLength)
    before, after = (tuple(s.module for s in part) for part in (steps[:pooling_index], steps[pooling_index + 1 : last]))
    pooling = replace(steps[pooling_index].module, before=before, after=after, normalize=last < len(steps))
    meta = {**_read_prompts(root, files, records), **limits, "include_prompt": pooling.include_prompt}
    files += [file for folder in weights.values() for file in list_weight_files(folder)]
    left_out = list[LeftOut]()
    for record in records:
        known_keys = record.read_keys.union(SIZES, FLAGS, ["__version__"])
        left_out.extend(find_unread_entries(record.data, known_keys, str(Path(record.source).relative_to(root))))
    module_records = [step.record for step in steps if step.record]
    return Sentence(tuple(files), changes, pooling, module_records, weights, meta, left_out, projects, static)


def read_static_config(root: Path) -> dict[str, Any] | None:
    """Return a config for the embedding table that is the first module in `root`; None if that is a transformer.

    Raises:
        WeftError: if modules.json lists no modules, or the table is missing, or tokens share its rows.
    """
    kind, folder = _list_modules(root)[0]
    return build_table_config(folder) if kind == STATIC_EMBEDDING else None


def _list_modules(root: Path) -> list[tuple[str, Path]]:
    """Return the class and folder of each module that modules.json in `root` lists, the transformer first."""
    source, listed = root / MODULES, list[tuple[str, Path]]()
    for number, module in enumerate(Record(source, {"modules": read_json(source, list)}).records("modules")):
        class_name, folder = module.text("type"), root / module.text("path", "")
        home, _, kind = class_name.rpartition(".")
        if not home.startswith("sentence_transformers.") or kind not in (_READERS if number else FIRST):
            raise WeftError(
                f"{source}: module {number}, {class_name}, is not supported, only Transformer or CLIPModel and then "
                f"{', '.join(_READERS)}: remove {MODULES} to read the transformer alone"
            )
        check_inside(root, folder / "config.json")
        listed.append((kind, folder))
    if not listed:
        raise WeftError(f"{source} lists no modules: remove it, or fetch the folder again")
    return listed


def _read_record(path: Path, files: list[Path]) -> Record:
    """Return the JSON object in the file at `path`, and append `path` to `files`; an empty one if there is no file."""
    if not path.is_file():
        return Record(path, {})
    files.append(path)
    return Record.read(path)


def _read_pooling(record: Record) -> tuple[str, str, SentencePooling]:
    if "embedding_dimension" not in record:
        record.integer("word_embedding_dimension")
    modes = record.get("pooling_mode", str | list[str], [])
    if "pooling_mode" not in record:
        flags = (record.flag(flag, False) for flag in FLAGS)
        modes = [mode for mode, on in zip(MODES, flags, strict=True) if on] or "mean"
    modes = [modes] if isinstance(modes, str) else modes
    if not modes or not set(modes) <= MODES.keys():
        raise record.build_type_error("pooling_mode", f"it must be one or several of {', '.join(MODES)}")
    names = tuple(MODES[mode] for mode in modes)
    include_prompt = record.flag("include_prompt", True)
    return TOKENS, TEXT, SentencePooling(names if len(names) > 1 else names[0], include_prompt=include_prompt)


def _read_dense(record: Record) -> tuple[str, str, Dense]:
    class_name = record.text("activation_function", "torch.nn.Tanh")
    name = class_name.rpartition(".")[2]
    if not class_name.startswith("torch.nn.") or name not in ACTIVATIONS:
        raise record.build_type_error("activation_function", f"supported are {', '.join(ACTIVATIONS)} of torch.nn")
    width, bias = record.integer("out_features", least=1), record.flag("bias", True)
    return *_read_names(record), Dense(width, name.lower(), bias, record.flag("use_residual", False))


def _read_word_weights(record: Record) -> tuple[str, str, WordWeights]:
    weights, default = record.get("word_weights", dict[str, float]), record.get("unknown_word_weight", float, 1.0)
    words = record.get("vocab", list[str])
    return TOKENS, TOKENS, WordWeights(tuple(weights.get(w, weights.get(w.lower(), default)) for w in words))


def _read_names(record: Record) -> tuple[str, str]:
    reads = record.text("module_input_name", TEXT)
    return reads, record.text("module_output_name", reads)


_READERS: dict[str, Callable[[Record], tuple[str, str, Any]]] = {
    "Pooling": _read_pooling,
    "Dense": _read_dense,
    "WeightedLayerPooling": lambda r: (LAYERS, TOKENS, WeightedLayerPooling(r.integer("layer_start", 4, least=0))),
    "WordWeights": _read_word_weights,
    "Normalize": lambda record: (*_read_names(record), UnitLength()),
    "LayerNorm": lambda record: (TEXT, TEXT, LayerNorm()),
    "Dropout": lambda record: (TEXT, TEXT, None),  # for training only
}


def _read_static(home: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the results of `_read_transformer` for an embedding table; the tokenizer's truncation is its limit."""
    truncation = _read_record(home / "tokenizer.json", []).get("truncation", dict | None, None) or {}
    return {}, {"max_seq_length": truncation.get("max_length"), "do_lower_case": False}, TEXT


def _read_transformer(
    kind: str, home: Path, config: Config, files: list[Path], records: list[Record]
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return changes of the transformer's config, limits of the input as entries of graph.meta, and its output's name.
    `kind` is the class of the module. The files and records that are read are appended to `files` and `records`. Raise
    WeftError for outputs other than token states or text features, and for unknown options."""
    records_found = (_read_record(home / f"sentence_{name}_config.json", files) for name in OLD_NAMES)
    record = next((r for r in records_found if r.data), Record(home / "sentence_bert_config.json", {}))
    records.append(record)
    record.choice("transformer_task", ("feature-extraction",), "feature-extraction")
    output = record.choice("module_output_name", (TOKENS, TEXT), TEXT if kind == "CLIPModel" else TOKENS)
    expected = HIDDEN if output == TOKENS else FEATURES
    modalities = record.get("modality_config", dict, {"text": expected})
    if "message" in modalities or modalities.get("text") != expected:
        fault = f"only {expected['method_output_name']} of {expected['method']} without a chat template is supported"
        raise record.build_type_error("modality_config", fault)
    options: dict[str, Any] = {}
    for name in ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs"):
        options |= record.get(name, dict, {})
        if unknown := options.keys() - HARMLESS:
            raise record.build_type_error(name, f"weft does not support {', '.join(sorted(unknown))}")
    if record.get("tokenizer_name_or_path", Any, None):
        raise record.build_type_error("tokenizer_name_or_path", "the tokenizer must be that of the folder")
    limit = options.get("model_max_length", record.integer("max_seq_length", None, least=1))
    if limit is None:  # tokenizers without a limit have 10^30
        limits_known = [_read_record(home / "tokenizer_config.json", []).data.get("model_max_length")]
        limits_known.append(config.get("max_position_embeddings"))
        limit = min((n for n in limits_known if isinstance(n, int) and 0 < n < 1 << 31), default=None)
    changes = {**record.get("config_args", dict, {}), **record.get("config_kwargs", dict, {})}
    limits = {"max_seq_length": limit, "do_lower_case": record.flag("do_lower_case", False)}
    return {key: value for key, value in changes.items() if key not in HARMLESS}, limits, output


def _read_prompts(root: Path, files: list[Path], records: list[Record]) -> dict[str, Any]:
    """Return entries of graph.meta from config_sentence_transformers.json; add its path and record to the lists."""
    record = _read_record(root / CONFIG, files)
    records.append(record)
    record.choice("model_type", ("SentenceTransformer",), "SentenceTransformer")
    prompts = {name: text or "" for name, text in record.get("prompts", dict[str, str | None], {}).items()}
    return {
        "prompts": prompts,
        "default_prompt_name": record.choice("default_prompt_name", ("query", "document", *prompts), None),
        "similarity_fn_name": record.text("similarity_fn_name", None),
        "truncate_dim": record.integer("truncate_dim", None, least=1),
    }
