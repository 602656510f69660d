"""A Hugging Face folder: what its files say beside the weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.backends.runtime.core.sampling import defaults_of
from weft.ir.errors import WeftError
from weft.ir.recipes.readers import TensorReader
from weft.ir.storage.documents import Record, read_json
from weft.passes.library.positions.multimodal_rope import INTERLEAVED, SECTIONS

from ...models.closest import closest
from ...models.config_keys import Recorded
from ...models.families import FAMILIES, Family, Loaded, load
from ...models.heads import ENCODER_ALONE, encoder_alone, unread_head, with_head, with_tokens
from ...models.left_out import LeftOut
from ...models.tables.other_types import LANGUAGE_MODELS, MULTIMODAL, PAIRS, REFUSED, SAME
from .adapter import Adapter
from .contents import OF_TOWERS, lies_in, unread_around, unread_files, unread_generation, unread_towers
from .merging import load_merged
from .quantized import dequantized, unread_scheme
from .safetensors import SafetensorsReader, weight_files
from .sentence_transformers.ranking import (
    LOGIT_SCORE,
    check_tokens,
    modules,
    rank_facts,
    rank_files,
    score_tokens,
    unread_ranking,
)
from .sentence_transformers.sentence import Sentence, read_sentence, static_config, transformer_home
from .sentence_transformers.static import STATIC, STATIC_EMBEDDING
from .tokens.added import named_token
from .tokens.files import tokenizer_files

SPECIAL_TOKENS = tuple(f"{name}_token_id" for name in ("bos", "pad", "decoder_start", "forced_bos", "forced_eos"))
NAMED = ("bos_token_id", "eos_token_id", "pad_token_id")  # where no config has an id, the tokenizer's name counts
QUANTIZED = "quantization_config"
QUANTIZED_BY = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # in place of a part of config.json, once


@dataclass(frozen=True)
class Folder:
    """A folder and its configs; `generation` is empty if it has no generation_config.json.

    `sentence` is what sentence-transformers reads, `ranking` its files of a reranker; `path` then is the folder of the
    transformer, which may be inside.
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
            WeftError: if the folder or its config.json is missing or no JSON object.
        """
        if not path.is_dir():
            raise WeftError(f"{path} is no folder")
        root, kinds = path, modules(path)
        path = root / kinds.get("Transformer", "") if LOGIT_SCORE in kinds else transformer_home(root)
        static = static_config(root) if STATIC_EMBEDDING in kinds else None
        if static is None and not (path / "config.json").is_file():
            raise WeftError(f"{path} has no config.json, so it is not a Hugging Face model folder")
        generation = path / "generation_config.json"
        config = read_json(path / "config.json") if static is None else static
        for name, method in QUANTIZED_BY.items():
            if QUANTIZED not in config and (path / name).is_file():
                config[QUANTIZED] = {"quant_method": method, **read_json(path / name)}
        if isinstance(how := config.get(QUANTIZED), dict):
            config[QUANTIZED] = Recorded(how)
        said = read_json(generation) if generation.is_file() else {}
        classes = config.get("architectures")
        scores = isinstance(classes, list) and any(str(name).endswith("ForSequenceClassification") for name in classes)
        pairs = LOGIT_SCORE in kinds or (scores and [*kinds] == ["Transformer"])  # a cross-encoder
        sentence = None if pairs else read_sentence(root, config)
        return cls(path, config, said, sentence, rank_files(root) if pairs else ())

    @property
    def tokenizer_files(self) -> list[Path]:
        """The tokenizer's files that are there."""
        return tokenizer_files(self.path)

    @property
    def files(self) -> tuple[Path, ...]:
        """Everything that is read: config, generation config, tokenizer, weights."""
        configs = [self.path / name for name in ("config.json", "generation_config.json", *QUANTIZED_BY)]
        own = (*(file for file in configs if file.is_file()), *self.tokenizer_files, *weight_files(self.path))
        return (*own, *self.ranking, *(() if self.sentence is None else self.sentence.files))

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for users on how the folder is read."""
        wrappers = SafetensorsReader(self.path).wrappers
        said = " and ".join(map(repr, wrappers))
        return (
            (f"{self.path}: names of tensors are read without {said}, which wrappers of modules add",) if said else ()
        )

    def weights(self) -> TensorReader:
        """The tensors; quantized ones as the numbers they stand for.

        Raises:
            WeftError: if there are none, a file is unsound, or they are quantized in a way that cannot be read.
        """
        return dequantized(SafetensorsReader(self.path), self.config, str(self.path / "config.json"))

    def token_facts(self) -> dict[str, Any]:
        """Special tokens in the form of graph.meta: generation_config.json before config.json."""

        def ids(name: str) -> list[int]:
            for file, config in (("generation_config.json", self.generation), ("config.json", self.config)):
                if config.get(name) not in (None, -1):  # -1 is how the first Llamas say that there is none
                    return Record(self.path / file, config).tokens(name)
            token = named_token(self.path, name.removesuffix("_id")) if name in NAMED else None
            return [] if token is None else [token]

        single = {name: next(iter(ids(name)), None) for name in SPECIAL_TOKENS}
        never = {name: ids(name) for name in ("suppress_tokens", "begin_suppress_tokens")}
        more = {**never, "begin_tokens": self._begin_tokens()}
        known = {k: v for k, v in single.items() if v is not None} | {k: v for k, v in more.items() if v}
        return {"eos_token_ids": ids("eos_token_id"), **known}

    def sampling(self) -> dict[str, Any]:
        """Return the defaults of sampling in generation_config.json, and of the length of an answer, max_tokens.

        Raises:
            WeftError: if one is of another type or outside its range.
        """
        said = Record(self.path / "generation_config.json", self.generation)
        most = said.integer("max_new_tokens", None, least=1)
        return defaults_of(said) | ({} if most is None else {"max_tokens": most})

    def _begin_tokens(self) -> list[list[int]]:
        """The tokens that each of the first of an answer may be, as Whisper's prompt says: the language, one of all
        unless it is told, the task, and that there are no times."""
        said = Record(self.path / "generation_config.json", self.generation)
        if "no_timestamps_token_id" not in said:
            return []
        languages = said.record("lang_to_id", {})
        tasks, language, task = said.record("task_to_id", {}), said.text("language", ""), said.text("task", "")
        begin: list[list[int]] = []
        if not (language or task):
            forced = self.generation.get("forced_decoder_ids") or self.config.get("forced_decoder_ids") or []
            begin = [[] if token is None else [token] for _, token in forced]
        any_language = sorted(token for name in languages.data for token in languages.tokens(name))
        if language:
            code = f"<|{language.strip('<|>')}|>"
            if code not in languages:
                raise said.misfit("language", "it must be a code of lang_to_id, such as en")
            begin[:1] = [languages.tokens(code)]
        elif any_language and not (begin and begin[0]):
            begin[:1] = [any_language]
        if task or language:
            begin.append(tasks.tokens(task or "transcribe"))
        last = said.tokens("no_timestamps_token_id")
        return [place for place in [*begin, *([] if begin[-1:] == [last] else [last])] if place]


def load_folder(
    path: Path, adapters: Sequence[Path] = (), family: str | None = None
) -> tuple[Folder, Loaded, list[Adapter]]:
    """Load the model of the Hugging Face folder at `path`, its parameters pointing at the weights.

    The PEFT adapters in the folders `adapters` are merged into it, one after the other, and returned too. It is read as
    a model of `family` instead of the one that its config says, if given.

    Raises:
        WeftError: naming the file, key or tensor that is missing, unsound or not supported.
    """
    folder = Folder.open(path)
    source, sentence = str(folder.path / "config.json"), folder.sentence
    model_type, config, left = folder.config.get("model_type"), dict(folder.config), list[LeftOut]()
    towers: frozenset[str] | None = None
    if sentence is not None and sentence.static:
        table = STATIC
    elif family is None and isinstance(model_type, str) and model_type in FAMILIES:
        table = FAMILIES[model_type]
    elif (side := one_side(folder, family)) is not None:
        table, config, towers = side
        for other in PAIRS.get(str(model_type), {}).keys() - {*table.model_types}:
            left.append(LeftOut("tensors", FAMILIES[other].prefix[:-1], f"--as {other} reads them"))
    elif family is not None:
        table = FAMILIES.lookup(family)
    else:
        raise _unknown(folder, source)
    weights, merged, tokens, head = folder.weights(), list[Adapter](), score_tokens(path), None
    if sentence is not None and sentence.alone and table.settings.get("kind") == "image-encoder":
        sentence = None  # its files are those of texts
    if sentence is not None:
        config = sentence.config(config, table)
        config.pop("architectures", None)  # the base model is what such a folder uses
        table, weights = sentence.table(table, config), sentence.joined(weights)
    elif tokens:
        check_tokens(tokens, config.get("vocab_size"), source)
        table = with_tokens(table, config, frozenset(weights.keys()), source, tokens)
    else:
        keys = frozenset(weights.keys())
        if model_type in ENCODER_ALONE and not any("decoder." in key for key in keys):
            table = encoder_alone(table)
        table, head = with_head(table, config, keys, source)
    if adapters:
        loaded, merged = load_merged(table, config, weights, source, adapters)
    else:
        loaded = load(table, config, weights, source)
    if not tokens:
        over = [*loaded.ignored, *loaded.unread]
        head = head or unread_head(table, config, over, "logits" in loaded.graph.outputs)
    if head:
        loaded.left_out[:] = [head, *(part for part in loaded.left_out if part.name != head.name)]
    if loaded.graph.meta.get("task") == "text-classification":
        loaded.graph.meta["rank"] = rank_facts(path, config)
    origin: dict[str, Any] = {"format": "safetensors", "path": str(path)}
    if merged:
        origin["adapters"] = [str(adapter.path.absolute()) for adapter in merged]
    if towers is not None:
        _leave_out(towers, loaded, folder.config, config)
    loaded.left_out.extend((*left, *_unread(folder, path)))
    if "logits" in loaded.graph.outputs and "task" not in loaded.graph.meta:
        loaded.left_out.extend(unread_generation(folder.generation))
        if sampling := folder.sampling():
            loaded.graph.meta["sampling"] = sampling
    own = replace(folder, config=config) if left else folder  # the tokens of a pair are those of its texts
    loaded.graph.meta.update(own.token_facts(), **_rope_facts(config), source=origin)
    if sentence is not None:
        sentence.describe(loaded.graph)
    return folder, loaded, merged


def one_side(folder: Folder, family: str | None = None) -> tuple[Family, dict[str, Any], frozenset[str] | None] | None:
    """The table and the config of the language model in a model of texts and more (LLaVA), or of one encoder of a pair
    (CLIP): that of texts, or `family`; and the other modules of the first, whose tensors are left unread. None if there
    is none of a known family."""
    kind = folder.config.get("model_type")
    if isinstance(kind, str) and (family or f"{kind}_text_model") in PAIRS.get(kind, ()):
        return *_one_of_two(folder, family or f"{kind}_text_model"), None
    text = folder.config.get("text_config", folder.config if f"{kind}_text" in SAME else None)  # Qwen2-VL's is around
    if family is not None or kind not in MULTIMODAL or not isinstance(text, Mapping):
        return None
    said = f"{kind}_text" if text is folder.config else text.get("model_type")
    family, defaults, fixed = SAME.get(str(said), (str(said), {}, {}))
    if family not in FAMILIES:
        return None
    table, keys, text = FAMILIES[family], list(folder.weights().keys()), {**defaults, **text, **fixed}
    prefix, head = table.prefix, "lm_head."  # alone, beside the rest
    for name in LANGUAGE_MODELS:
        found = (p for p in (f"{name}.{table.prefix}", f"model.{name}.", f"{name}.") if _has(keys, p))
        prefix, head = next(((p, f"{name}.lm_head.") for p in found), (prefix, head))
    others = frozenset(_outside(key, prefix) for key in keys if not key.startswith((prefix, head, "lm_head.")))
    unused = (*table.unused, *others, *(f"{other}.*" for other in others))
    # The config inside may not say it: what a checkpoint has no head for, it is tied.
    text["tie_word_embeddings"] = not (_has(keys, head) or _has(keys, "lm_head."))
    inert = (*table.inert, *filter(OF_TOWERS.search, text))
    side = replace(table, prefix=prefix, aliases={**table.aliases, "lm_head.": head}, unused=unused, inert=inert)
    return side, text, others


def _unread(folder: Folder, root: Path) -> Iterator[LeftOut]:
    """Yield the unread keys and files of `folder`, stored in `root`, except the keys of config.json."""
    if isinstance(how := folder.config.get(QUANTIZED), Recorded):
        yield from unread_scheme(how)
    if folder.sentence is not None:
        yield from folder.sentence.left_out
    if folder.ranking:
        yield from unread_ranking(root)
    yield from unread_files(root, folder.files)


def _leave_out(towers: Collection[str], loaded: Loaded, around: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Add to `loaded.left_out` the modules in `towers`, and the unread keys of the composite config `around`.

    `text` is the config of the language model, whose unread keys get the prefix text_config.
    """
    inside = loaded.left_out
    if "text_config" in around:
        read = text.keys() - {part.name for part in inside}
        inside = [replace(p, name=f"text_config.{p.name}") if p.kind == "key" else p for p in inside]
        inside.extend(unread_around(around, read))
    loaded.left_out[:] = [*unread_towers(towers, loaded.ignored), *inside]
    loaded.ignored[:] = [key for key in loaded.ignored if not lies_in(key, towers)]  # these are listed by tower


def _one_of_two(folder: Folder, family: str) -> tuple[Family, dict[str, Any]]:
    """The table and the config of `family`, one encoder of the pair in `folder`."""
    table, whole = FAMILIES[family], folder.config
    ours, theirs = ("vision", "text") if "vision" in family else ("text", "vision")
    unused = (*table.unused, f"{theirs}_model.*", "*_projection.*", "logit_scale", "logit_bias")
    said: Any = whole.get(f"{ours}_config_dict") or whole.get(f"{ours}_config") or {}  # the older replaces the newer
    if not isinstance(said, Mapping):
        raise WeftError(f"{folder.path / 'config.json'}: {ours}_config={said!r:.60} is no mapping")
    defaults, kind = PAIRS[str(whole["model_type"])][family]
    own = {"projection_dim": whole.get("projection_dim", 512), "architectures": [kind]}
    return replace(table, unused=unused), {**defaults, **said, **own}


def _rope_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Say how the pairs of a head turn along three axes, in the form of graph.meta (pass multimodal-rope), where
    `config` says it; Qwen3's code knows one order only."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping) or "mrope_section" not in rope:
        return {}
    return {SECTIONS: rope["mrope_section"], INTERLEAVED: str(config.get("model_type")).startswith("qwen3")}


def _has(keys: Iterable[str], prefix: str) -> bool:
    return any(key.startswith(prefix) for key in keys)


def _outside(key: str, prefix: str) -> str:
    """The shortest path of modules that leads to `key` and not to `prefix`."""
    parts = key.split(".")
    paths = (".".join(parts[:i]) for i in range(1, len(parts) + 1))
    return next((path for path in paths if not prefix.startswith(f"{path}.")), key)


def _unknown(folder: Folder, source: str) -> WeftError:
    """The error for a folder whose model_type no table has: it says why, or names the families that read it best."""
    kind = folder.config.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        return WeftError(f"{source}: models of type {kind} are not supported: {REFUSED[kind]}")
    told = f"{source}: model_type {kind!r} is not known"
    try:
        near = closest(folder.config, folder.weights())
    except WeftError:  # without weights that can be read there is nothing to compare
        near = []
    if not near:
        return WeftError(f"{told}, and no family reads it; `weft families` lists the {len(FAMILIES)} that there are")
    others = "".join(f", then {r.family}" for r in near[1:])
    return WeftError(f"{told}; it reads most like {near[0]}{others}: try --as {near[0].family}")
