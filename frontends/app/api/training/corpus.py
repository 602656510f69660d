"""Training text as token ids: plain text, JSON lines, folders of the library datasets, ids; and tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.backends.runtime.text.chat import read_special_token
from weft.backends.runtime.text.tokenizer import Tokenizer as TextTokenizer
from weft.backends.runtime.text.tokenizer import check_text
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes.readers import Array
from weft.ir.storage import scratch_folder
from weft.ir.storage.documents import check_regular, open_regular, parse_json, write_json
from weft.passes.fitting.calibration import ID_FILES, find_vocabulary_size, read_ids

from ....formats.hf.tokens.added import CONFIG, VOCABULARY
from ....formats.hf.tokens.files import copy_tokenizer
from ....model import Model
from ..source.sources import load_source

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"  # the token after each document, in tokenizers that are trained here
MASK = "[MASK]"  # the token in place of another that a model should predict, in tokenizers that are trained here
AT_ONCE = 1 << 22  # characters that are tokenized together
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Corpus:
    """A file or folder of text or token ids. `field` is the name of the text in records of JSON lines or datasets."""

    path: Path
    field: str = "text"

    @property
    def has_ids(self) -> bool:
        """Return whether this is a file of token ids."""
        return self.path.suffix in ID_FILES

    @property
    def has_documents(self) -> bool:
        """Return whether the text consists of documents, after each of which the model should end."""
        return self.path.suffix in (".jsonl", ".ndjson") or self.path.is_dir()

    def documents(self) -> Iterator[str]:
        """Yield the documents; plain text in parts of about `AT_ONCE` characters, which end at the end of a line.

        Raises:
            WeftError: if the file cannot be read, is not UTF-8, or a record has no text in the field.
        """
        check_regular(self.path)
        if self.path.is_dir():
            yield from (self._pick(record, "") for record in _open_dataset(self.path))
            return
        try:
            with open(open_regular(self.path), encoding="utf-8-sig", newline="") as file:
                if not self.has_documents:
                    while lines := file.readlines(AT_ONCE):
                        yield "".join(lines)
                    return
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield self._pick(parse_json(line, f"{self.path}, line {number}"), f", line {number}")
        except (OSError, ValueError) as e:
            reason = e.strerror.lower() if isinstance(e, OSError) and e.strerror else e
            raise WeftError(f"the text {self.path} cannot be read: {reason}") from e

    def _pick(self, record: Any, place: str) -> str:
        text = record.get(self.field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            names = f"only {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
            raise WeftError(f"{self.path}{place} has no text called {self.field!r}, but {names}: name it with --field")
        check_text(f"{self.path}{place}", text)
        return text


def _open_dataset(folder: Path) -> Iterable[Any]:
    """Return the records of a folder that `save_to_disk` of the library datasets wrote, or of its split ``train``."""
    try:
        import datasets
    except ImportError as e:
        raise WeftError(f"{folder} is a folder, which needs the package datasets: pip install datasets") from e
    try:
        data = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, IndexError) as e:  # IndexError: no records
        raise WeftError(
            f"{folder} is not a complete folder that `save_to_disk` of the library datasets wrote: {e}"
        ) from e
    if isinstance(data, dict) and "train" not in data:
        raise WeftError(f"{folder} has no split called train, but {', '.join(data)}: name the folder of a split")
    records: Iterable[Any] = data["train"] if isinstance(data, dict) else data
    return records


def read_sequence(model: Model, corpora: Sequence[Corpus], progress: Progress = lambda *_: None) -> Array:
    """Return the tokens of `corpora` one after the other [tokens], by the tokenizer of `model`; the end-of-text token
    follows each document. `progress` counts files.

    Raises:
        WeftError: if a text cannot be read, an id is outside of the vocabulary, or the model has no tokenizer.
    """
    vocab, parts = find_vocabulary_size(model.graph), list[Array]()
    end: list[int] = list(model.graph.meta.get("eos_token_ids") or [])[:1]
    dtype = np.uint16 if vocab <= 1 << 16 else np.uint32
    for number, corpus in enumerate(corpora):
        progress("tokenizing", number, len(corpora))
        if corpus.has_ids:
            rows: Iterable[Array] = map(np.asarray, read_ids(corpus.path))
        else:
            if model.graph.tokenize is None:
                raise WeftError(f"{model.spec} has no tokenizer for {corpus.path}: give token ids, as .npy or .json")
            rows = _tokenize(model, corpus, end if corpus.has_documents else [])
        for row in rows:
            if len(row) and not 0 <= int(row.min()) <= int(row.max()) < vocab:
                wrong = int(row.min()) if row.min() < 0 else int(row.max())
                raise WeftError(f"{corpus.path} has token {wrong}, but the tokens of the model are 0 to {vocab - 1}")
            parts.append(row.astype(dtype))
        if not sum(map(len, parts)):
            raise WeftError(f"{corpus.path} has no text: use another")
    progress("tokenizing", len(corpora), len(corpora))
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _tokenize(model: Model, corpus: Corpus, end: Sequence[int]) -> Iterator[Array]:
    """Yield the ids of the documents of `corpus`, each with `end` after it."""
    assert model.graph.tokenize is not None
    for group in _group(corpus.documents()):
        yield from (np.array([*ids, *end], np.int64) for ids in model.graph.tokenize(group))


def _group(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield `documents` in groups of about `AT_ONCE` characters."""
    group, size = list[str](), 0
    for document in documents:
        group.append(document)
        size += len(document)
        if size >= AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def attach_tokenizer(model: Model, spec: str | None, corpora: Sequence[Corpus]) -> Model:
    """Return `model` with the tokenizer that `spec` names, and with its number of tokens or more.

    spec: ``bytes``; ``bpe:N`` with N tokens, trained on `corpora` (byte-level; Sennrich 2016, arXiv 1508.07909); a
    tokenizer.json or the folder of one. If None, the model's tokenizer, or without one BPE with the size of the
    model's vocabulary, or bytes below 512.

    Raises:
        WeftError: if the tokenizer cannot be read, or has more tokens than a checkpoint.
    """
    vocab = find_vocabulary_size(model.graph)
    if spec is None and (model.tokenizer is not None or all(corpus.has_ids for corpus in corpora)):
        return model
    spec = spec or (f"bpe:{vocab}" if vocab >= 512 else "bytes")
    trained = spec == "bytes" or spec.startswith("bpe:")
    if spec.startswith("bpe:") and corpora and all(corpus.has_ids for corpus in corpora):
        raise WeftError(f"--tokenizer {spec} is trained on text, and there are token ids only: name a tokenizer.json")
    special = [END, MASK] if predicts_masked(model.graph) else [END]
    tokenizer = _train_tokenizer(spec, special, corpora) if trained else _read_tokenizer(Path(spec))
    write = (
        partial(_write_tokenizer, tokenizer) if trained or Path(spec).is_file() else partial(copy_tokenizer, Path(spec))
    )
    if (size := tokenizer.get_vocab_size()) > vocab:
        if not (model.random_init and hasattr(model.module, "vocab")):
            raise WeftError(
                f"{model.spec} has {vocab} tokens, but the tokenizer has {size}: choose another --tokenizer"
            )
        larger = load_source(replace(model.module, vocab=size), model.seed)
        model = replace(model, graph=larger.graph, module=larger.module)
    if (end := tokenizer.token_to_id(END)) is not None:
        model.graph.meta["eos_token_ids"] = [end]
    return replace(model, tokenizer=write)


def _read_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = path / VOCABULARY if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as e:  # tokenizers raises nothing more specific
        raise WeftError(
            f"{file} is not a tokenizer ({e}); other choices: bytes, or bpe:8192 trained on the text"
        ) from e


def predicts_masked(graph: Graph) -> bool:
    """Return whether `graph` is an encoder that predicts masked tokens."""
    return graph.meta.get("kind") == "encoder" and graph.meta.get("task") == "fill-mask" and "logits" in graph.outputs


def find_mask_token(model: Model) -> int:
    """Return the id of the token in place of another that `model` should predict; raise WeftError if there is none."""
    with scratch_folder() as folder:
        if model.tokenizer is not None:
            model.tokenizer(folder)
        text = read_special_token(folder, "mask_token")
        token = None if text is None else TextTokenizer(folder).find_id(text)
    if token is None:
        raise WeftError(f"{model.spec} predicts masked tokens, but has no tokenizer with a mask_token: name another")
    return token


def find_special_tokens(graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (ids before, ids after) that the tokenizer of `graph` adds to a text; empty without a tokenizer."""
    if graph.tokenize is None:
        return (), ()
    special, text = map(tuple, graph.tokenize(["", "a"]))
    length = next((i for i, (a, b) in enumerate(zip(special, text, strict=False)) if a != b), len(special))
    return special[:length], special[length:]


def _train_tokenizer(spec: str, special: Sequence[str], corpora: Sequence[Corpus]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = 256 + len(special)
    size = least if spec == "bytes" else int(spec[4:]) if spec[4:].isdigit() else 0
    if size < least:
        raise WeftError(
            f"--tokenizer {spec}: bpe:N needs at least {least} tokens, for all bytes and {' '.join(special)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=spec != "bytes")
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[*special], show_progress=False
    )
    documents = (document for corpus in corpora if not corpus.has_ids for document in corpus.documents())
    tokenizer.train_from_iterator(documents if size > least else (), trainer)
    return tokenizer


def _write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / VOCABULARY))
    special = {"eos_token": END, "mask_token": MASK}
    special = {name: token for name, token in special.items() if tokenizer.token_to_id(token) is not None}
    write_json(out / CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **special})
