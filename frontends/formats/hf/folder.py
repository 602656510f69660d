"""Load the model of a Hugging Face folder: select its family's table, apply it, and collect metadata."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.backends.runtime.core.sampler import read_sampling_defaults
from weft.ir.errors import WeftError
from weft.ir.recipes.readers import TensorReader
from weft.ir.storage.documents import Record, read_json
from weft.passes.library.positions.multimodal_rope import INTERLEAVED, SECTIONS

from ...models.closest import find_closest
from ...models.config_keys import RecordingConfig
from ...models.families import FAMILIES, Family, LoadedModel, load
from ...models.left_out import LeftOut
from ...models.tables.other_types import LANGUAGE_MODELS, MULTIMODAL, PAIRS, REFUSED, SAME
from ...models.task_heads import SEPARABLE_ENCODERS, add_head, add_token_head, extract_encoder, find_unread_head
from . import contents
from .adapter import Adapter
from .merging import load_merged
from .quantized import dequantize_reader, find_unread_scheme
from .safetensors import SafetensorsReader, list_weight_files
from .sentence_transformers import ranking
from .sentence_transformers.sentence import (
    STATIC,
    STATIC_EMBEDDING,
    Sentence,
    find_transformer,
    read_sentence,
    read_static_config,
)
from .tokens.added import find_token
from .tokens.files import list_tokenizer_files

SPECIAL_TOKENS = tuple(f"{name}_token_id" for name in ("bos", "pad", "decoder_start", "forced_bos", "forced_eos"))
NAMED = ("bos_token_id", "eos_token_id", "pad_token_id")  # if no config has them, the tokenizer's ids
QUANTIZED = "quantization_config"
QUANTIZED_BY = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # older files instead of that key


@dataclass(frozen=True)
class Folder:
    """A Hugging Face folder and its configs.

    path: folder of the transformer; with sentence-transformers it may be a subfolder. config: config.json.
    generation: generation_config.json, {} without one. sentence: files of sentence-transformers; None without
    modules.json and for rerankers. ranking: paths of sentence-transformers' files of a reranker, else ().
    """

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    sentence: Sentence | None = None
    ranking: Sequence[Path] = ()

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Read the configs of the folder at `path`.

        Raises:
            WeftError: if the folder or its config.json is missing, or a config is invalid.
        """
        if not path.is_dir():
            raise WeftError(f"{path} is not a folder")
        root, kinds = path, ranking.read_modules(path)
        path = root / kinds.get("Transformer", "") if ranking.LOGIT_SCORE in kinds else find_transformer(root)
        static = read_static_config(root) if STATIC_EMBEDDING in kinds else None
        if static is None and not (path / "config.json").is_file():
            raise WeftError(f"{path} has no config.json, so it is not a Hugging Face model folder")
        generation = path / "generation_config.json"
        config = read_json(path / "config.json") if static is None else static
        for name, method in QUANTIZED_BY.items():
            if QUANTIZED not in config and (path / name).is_file():
                config[QUANTIZED] = {"quant_method": method, **read_json(path / name)}
        if isinstance(scheme := config.get(QUANTIZED), dict):
            config[QUANTIZED] = RecordingConfig(scheme)
        generation_config = read_json(generation) if generation.is_file() else {}
        classes = config.get("architectures")
        scores = isinstance(classes, list) and any(str(name).endswith("ForSequenceClassification") for name in classes)
        pairs = ranking.LOGIT_SCORE in kinds or (scores and [*kinds] == ["Transformer"])  # a cross-encoder
        sentence = None if pairs else read_sentence(root, config)
        return cls(path, config, generation_config, sentence, ranking.list_ranking_files(root) if pairs else ())

    @property
    def tokenizer_files(self) -> list[Path]:
        """Return the paths of the tokenizer's files that exist."""
        return list_tokenizer_files(self.path)

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the paths of all files that are read: configs, tokenizer, weights, files of sentence-transformers."""
        configs = [self.path / name for name in ("config.json", "generation_config.json", *QUANTIZED_BY)]
        base_files = (*(f for f in configs if f.is_file()), *self.tokenizer_files, *list_weight_files(self.path))
        return (*base_files, *self.ranking, *(() if self.sentence is None else self.sentence.files))

    @property
    def notes(self) -> tuple[str, ...]:
        """Return remarks for the user: one if prefixes of module wrappers are removed from tensor names."""
        prefixes = " and ".join(map(repr, SafetensorsReader(self.path).wrappers))
        note = f"{self.path}: tensor names are read without the prefix {prefixes} of module wrappers"
        return (note,) if prefixes else ()

    def open_weights(self) -> TensorReader:
        """Return a reader of the folder's tensors; quantized ones are dequantized.

        Raises:
            WeftError: if there are no weights, a file is invalid, or the quantization method is not supported.
        """
        return dequantize_reader(SafetensorsReader(self.path), self.config, str(self.path / "config.json"))

    def read_tokens(self) -> dict[str, Any]:
        """Return special tokens as entries of graph.meta: from generation_config.json, else config.json, else (BOS, EOS
        and padding) the tokenizer's files. An entry is an id, or a list of ids (eos_token_ids, suppress_tokens, …).
        Missing tokens have no entry, except eos_token_ids: []."""

        def ids(name: str) -> list[int]:
            for file, config in (("generation_config.json", self.generation), ("config.json", self.config)):
                if config.get(name) not in (None, -1):  # -1 means "none" in the first Llamas
                    return Record(self.path / file, config).tokens(name)
            token = find_token(self.path, name.removesuffix("_id")) if name in NAMED else None
            return [] if token is None else [token]

        first = {name: next(iter(ids(name)), None) for name in SPECIAL_TOKENS}
        never = {name: ids(name) for name in ("suppress_tokens", "begin_suppress_tokens")}
        lists = {**never, "begin_tokens": self._list_begin_tokens()}
        single = {k: v for k, v in first.items() if v is not None} | {k: v for k, v in lists.items() if v}
        return {"eos_token_ids": ids("eos_token_id"), **single}

    def read_sampling(self) -> dict[str, Any]:
        """Return the sampling defaults of generation_config.json, with max_new_tokens as max_tokens.

        Raises:
            WeftError: if one is of another type or outside its range.
        """
        record = Record(self.path / "generation_config.json", self.generation)
        max_tokens = record.integer("max_new_tokens", None, least=1)
        return read_sampling_defaults(record) | ({} if max_tokens is None else {"max_tokens": max_tokens})

    def _list_begin_tokens(self) -> list[list[int]]:
        """Return, for each of the first tokens of an answer (Whisper's prompt), the list of ids that it may have. They
        are language, task, and "no timestamps"; [] without a no_timestamps_token_id. If neither language nor task is
        named, forced_decoder_ids states both. Else the language is any by default, the task transcribe."""
        record = Record(self.path / "generation_config.json", self.generation)
        if "no_timestamps_token_id" not in record:
            return []
        languages = record.record("lang_to_id", {})
        tasks, language, task = record.record("task_to_id", {}), record.text("language", ""), record.text("task", "")
        begin: list[list[int]] = []
        if not (language or task):
            forced = self.generation.get("forced_decoder_ids") or self.config.get("forced_decoder_ids") or []
            begin = [[] if token is None else [token] for _, token in forced]
        any_language = sorted(token for name in languages.data for token in languages.tokens(name))
        if language:
            code = f"<|{language.strip('<|>')}|>"
            if code not in languages:
                raise record.build_type_error("language", "it must be a code of lang_to_id, such as en")
            begin[:1] = [languages.tokens(code)]
        elif any_language and not (begin and begin[0]):
            begin[:1] = [any_language]
        if task or language:
            begin.append(tasks.tokens(task or "transcribe"))
        last = record.tokens("no_timestamps_token_id")
        return [alternatives for alternatives in [*begin, *([] if begin[-1:] == [last] else [last])] if alternatives]


def load_folder(
    path: Path, adapters: Sequence[Path] = (), family: str | None = None
) -> tuple[Folder, LoadedModel, list[Adapter]]:
    """Load the Hugging Face folder at `path`; return the folder, its model, and the adapters merged into the model.

    The parameters read the folder's weights on demand. `adapters` are folders of PEFT adapters, merged in order.
    `family` overrides the family that the config names.

    Raises:
        WeftError: naming the file, key or tensor that is missing, invalid or not supported.
    """
    folder = Folder.open(path)
    source, sentence = str(folder.path / "config.json"), folder.sentence
    model_type, config, other_sides = folder.config.get("model_type"), dict(folder.config), list[LeftOut]()
    towers: frozenset[str] | None = None
    if sentence is not None and sentence.static:
        table = STATIC
    elif family is None and isinstance(model_type, str) and model_type in FAMILIES:
        table = FAMILIES[model_type]
    elif (language_model := extract_submodel(folder, family)) is not None:
        table, config, towers = language_model
        for family_name in PAIRS.get(str(model_type), {}).keys() - {*table.model_types}:
            other_sides.append(LeftOut("tensors", FAMILIES[family_name].prefix[:-1], f"--as {family_name} reads them"))
    elif family is not None:
        table = FAMILIES.lookup(family)
    else:
        raise _unknown_type_error(folder, source)
    weights, read_adapters, tokens, head = folder.open_weights(), list[Adapter](), ranking.read_score_tokens(path), None
    # Without modules after an image encoder, the files of sentence-transformers are for text inputs only.
    if sentence is not None and sentence.projects and not sentence.modules:
        sentence = None if table.settings.get("kind") == "image-encoder" else sentence
    if sentence is not None:
        config = sentence.config(config, table)
        config.pop("architectures", None)  # such a folder uses the base model only
        table, weights = sentence.table(table, config), sentence.join_weights(weights)
    elif tokens:
        ranking.check_tokens(tokens, config.get("vocab_size"), source)
        table = add_token_head(table, config, frozenset(weights.keys()), source, tokens)
    else:
        keys = frozenset(weights.keys())
        if model_type in SEPARABLE_ENCODERS and not any("decoder." in key for key in keys):
            table = extract_encoder(table)
        table, head = add_head(table, config, keys, source)
    if adapters:
        loaded, read_adapters = load_merged(table, config, weights, source, adapters)
    else:
        loaded = load(table, config, weights, source)
    if not tokens:
        unread_keys = [*loaded.ignored, *loaded.unread]
        head = head or find_unread_head(table, config, unread_keys, "logits" in loaded.graph.outputs)
    if head:
        loaded.left_out[:] = [head, *(part for part in loaded.left_out if part.name != head.name)]
    if loaded.graph.meta.get("task") == "text-classification":
        loaded.graph.meta["rank"] = ranking.read_ranking(path, config)
    origin: dict[str, Any] = {"format": "safetensors", "path": str(path)}
    if read_adapters:
        origin["adapters"] = [str(adapter.path.absolute()) for adapter in read_adapters]
    if towers is not None:
        _report_towers(towers, loaded, folder.config, config)
    loaded.left_out.extend((*other_sides, *_find_unread(folder, path)))
    if "logits" in loaded.graph.outputs and "task" not in loaded.graph.meta:
        loaded.left_out.extend(contents.find_unread_generation(folder.generation))
        if sampling := folder.read_sampling():
            loaded.graph.meta["sampling"] = sampling
    token_source = replace(folder, config=config) if other_sides else folder  # tokens of a pair are in its text config
    loaded.graph.meta.update(token_source.read_tokens(), **_read_rope_sections(config), source=origin)
    if sentence is not None:
        sentence.describe(loaded.graph)
    return folder, loaded, read_adapters


def extract_submodel(
    folder: Folder, family: str | None = None
) -> tuple[Family, dict[str, Any], frozenset[str] | None] | None:
    """Return (family table, config, names of the other modules) for one submodel of a composite model, None if unknown.

    The submodel is the language model of a multimodal model (LLaVA), or one encoder of a pair (CLIP): that of `family`,
    by default the text encoder. The other modules of the checkpoint are, for example, an image tower; None for a pair.
    """
    kind = folder.config.get("model_type")
    if isinstance(kind, str) and (family or f"{kind}_text_model") in PAIRS.get(kind, ()):
        return *_load_pair_side(folder, family or f"{kind}_text_model"), None
    # Qwen2-VL has no text_config.
    text = folder.config.get("text_config", folder.config if f"{kind}_text" in SAME else None)
    if family is not None or kind not in MULTIMODAL or not isinstance(text, Mapping):
        return None
    text_type = f"{kind}_text" if text is folder.config else text.get("model_type")
    family, defaults, fixed = SAME.get(str(text_type), (str(text_type), {}, {}))
    if family not in FAMILIES:
        return None
    table, keys, text = FAMILIES[family], list(folder.open_weights().keys()), {**defaults, **text, **fixed}
    prefix, head = table.prefix, "lm_head."  # for a language model stored next to the other modules
    for name in LANGUAGE_MODELS:
        prefixes = (p for p in (f"{name}.{table.prefix}", f"model.{name}.", f"{name}.") if _has(keys, p))
        prefix, head = next(((p, f"{name}.lm_head.") for p in prefixes), (prefix, head))
    outer = frozenset(_find_outer_module(k, prefix) for k in keys if not k.startswith((prefix, head, "lm_head.")))
    unused = (*table.unused, *outer, *(f"{module}.*" for module in outer))
    # The inner config may omit this key; a checkpoint without a head ties it to the embedding.
    text["tie_word_embeddings"] = not (_has(keys, head) or _has(keys, "lm_head."))
    inert = (*table.inert, *filter(contents.OF_TOWERS.search, text))
    side = replace(table, prefix=prefix, aliases={**table.aliases, "lm_head.": head}, unused=unused, inert=inert)
    return side, text, outer


def _find_unread(folder: Folder, root: Path) -> Iterator[LeftOut]:
    """Yield the unread files in `root`, and unread keys of quantization_config and of sentence-transformers' files."""
    if isinstance(scheme := folder.config.get(QUANTIZED), RecordingConfig):
        yield from find_unread_scheme(scheme)
    if folder.sentence is not None:
        yield from folder.sentence.left_out
    if folder.ranking:
        yield from ranking.find_unread_ranking(root)
    yield from contents.find_unread_files(root, folder.files)


def _report_towers(
    towers: Collection[str], loaded: LoadedModel, around: Mapping[str, Any], text: Mapping[str, Any]
) -> None:
    """Move ignored tensors in modules `towers` to `loaded.left_out`, by module. If the composite config `around` has a
    text_config, add the unread keys around it; keys of `text`, that inner config, get the prefix text_config."""
    parts = loaded.left_out
    if "text_config" in around:
        read = text.keys() - {part.name for part in parts}
        parts = [replace(p, name=f"text_config.{p.name}") if p.kind == "key" else p for p in parts]
        parts.extend(contents.find_unread_outer(around, read))
    loaded.left_out[:] = [*contents.find_unread_towers(towers, loaded.ignored), *parts]
    # Tensors in towers are listed by tower.
    loaded.ignored[:] = [key for key in loaded.ignored if not contents.is_inside(key, towers)]


def _load_pair_side(folder: Folder, family: str) -> tuple[Family, dict[str, Any]]:
    """Return the table and the config of `family`, one encoder of the pair in `folder`."""
    table, pair_config = FAMILIES[family], folder.config
    side, other_side = ("vision", "text") if "vision" in family else ("text", "vision")
    unused = (*table.unused, f"{other_side}_model.*", "*_projection.*", "logit_scale", "logit_bias")
    # The older key has priority.
    side_config: Any = pair_config.get(f"{side}_config_dict") or pair_config.get(f"{side}_config") or {}
    if not isinstance(side_config, Mapping):
        raise WeftError(f"{folder.path / 'config.json'}: {side}_config={side_config!r:.60} is not a mapping")
    defaults, kind = PAIRS[str(pair_config["model_type"])][family]
    shared_settings = {"projection_dim": pair_config.get("projection_dim", 512), "architectures": [kind]}
    return replace(table, unused=unused), {**defaults, **side_config, **shared_settings}


def _read_rope_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries of graph.meta for the pass multimodal-rope; {} without mrope_section. They are that list, the
    number of rotated pairs of each of three axes, and whether pairs of the axes alternate (in Qwen3 models)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping) or "mrope_section" not in rope:
        return {}
    return {SECTIONS: rope["mrope_section"], INTERLEAVED: str(config.get("model_type")).startswith("qwen3")}


def _has(keys: Iterable[str], prefix: str) -> bool:
    return any(key.startswith(prefix) for key in keys)


def _find_outer_module(key: str, prefix: str) -> str:
    """Return the outermost module on the path `key` that is not also on the path `prefix`; `key` itself if all are."""
    parts = key.split(".")
    paths = (".".join(parts[:i]) for i in range(1, len(parts) + 1))
    return next((path for path in paths if not prefix.startswith(f"{path}.")), key)


def _unknown_type_error(folder: Folder, source: str) -> WeftError:
    """Return the error for an unsupported model_type: the reason, or the families that fit the checkpoint best."""
    kind = folder.config.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        return WeftError(f"{source}: models of type {kind} are not supported: {REFUSED[kind]}")
    fault = f"{source}: model_type {kind!r} is not known"
    try:
        families = find_closest(folder.config, folder.open_weights())
    except WeftError:  # without weights that can be read there is nothing to compare
        families = []
    if not families:
        return WeftError(f"{fault}, and fits none of the {len(FAMILIES)} families that `weft families` lists")
    alternatives = "".join(f", then {r.family}" for r in families[1:])
    return WeftError(f"{fault}; it reads most like {families[0]}{alternatives}: try --as {families[0].family}")
