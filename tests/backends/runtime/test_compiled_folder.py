"""Compiled folders: manifests and files that are damaged, and folders of the builder of onnxruntime-genai."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

import weft
from weft.backends.runtime.compiled_folder import get_growth
from weft.backends.runtime.core.generation import Generator
from weft.backends.torch.lib import caches
from weft.backends.torch.lib.recurrent_states import RecurrentState
from weft.ir.errors import WeftError
from weft.ir.schema.states import Growth

from ..handmade import LONGEST, MANIFEST, VOCAB, decoder, opened, save


def test_genai_builder_folder_opens(tmp_path: Path) -> None:
    cache = (1, ["batch", 1, "past", "width"])  # the builder leaves the head size open
    names = [f"{a}.0.{b}" for a in ("past_key_values", "present") for b in ("key", "value")]
    onnx.save(decoder(**dict.fromkeys(names, cache)), tmp_path / "other.onnx")
    config: dict[str, Any] = {"vocab_size": VOCAB, "context_length": LONGEST, "eos_token_id": 7}
    config["decoder"] = {"filename": "other.onnx", "head_size": 8}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": config}))
    model = opened(tmp_path)
    assert isinstance(model, Generator) and model.stop_ids == {7} and model.decoder.max_length == LONGEST
    assert model.generate([1, 2], max_tokens=2)[0].finish in ("length", "stop")


def test_rolling_caches_of_the_genai_builder(tmp_path: Path) -> None:
    """Without our manifest its configuration tells that caches of a fixed size roll, hence do not bound the text."""
    cache = (1, ["batch", 1, 4, 8])
    names = [f"{a}.0.{b}" for a in ("past_key_values", "present") for b in ("key", "value")]
    onnx.save(decoder(**dict.fromkeys(names, cache)), tmp_path / "model.onnx")
    config: dict[str, Any] = {"vocab_size": VOCAB, "context_length": LONGEST}
    config["decoder"] = {"filename": "model.onnx", "sliding_window": {"window_size": 4, "layers": [0]}}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": config}))
    assert len(opened(tmp_path).generate([1, 2], max_tokens=5)[0].tokens) == 5


def break_manifest(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "weft.json").write_text(text)


def cut(name: str, count: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:count])


def changed(**facts: Any) -> Callable[[Path], object]:
    kept = {k: v for k, v in (MANIFEST | facts).items() if v is not None}
    return break_manifest(json.dumps(kept))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "weft.json").unlink(), "no weft.json in it, so it is not a compiled model"),
        (break_manifest("{"), "weft.json: not valid JSON"),
        (break_manifest("[1]"), "weft.json: a JSON object was expected, not array"),
        (lambda f: (f / "weft.json").write_bytes(b"\xff\xfe\x00"), "weft.json: not valid JSON"),
        (changed(kind=None), "weft.json: the key 'kind' is missing"),
        (changed(kind="diffusion"), "kind is 'diffusion'"),
        (changed(vocab="many"), "vocab is 'many', but it must be of type int"),
        (changed(max_length=0), "max_length is 0, but it must be at least 1"),
        (changed(eos_token_ids=["</s>"]), "eos_token_ids is"),
        (lambda f: (f / "model.onnx").unlink(), "model.onnx: no such file"),
        (lambda f: (f / "model.onnx").write_bytes(b"not a model"), "model.onnx: ONNX Runtime cannot open it"),
        (cut("model.onnx", 100), "model.onnx: ONNX Runtime cannot open it"),
        (lambda f: (f / "model.onnx").write_bytes(b""), "model.onnx: ONNX Runtime cannot open it"),
        (lambda f: (f / "model.onnx.data").unlink(), "model.onnx: ONNX Runtime cannot open it"),
        (cut("model.onnx.data", 10), "model.onnx: ONNX Runtime cannot open it"),
    ],
)
def test_damaged_folder_is_reported(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    save(tmp_path, decoder(), external=True)
    assert isinstance(opened(tmp_path), Generator)
    damage(tmp_path)
    with pytest.raises(WeftError, match=words) as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="nowhere: no such folder"):
        weft.load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(WeftError, match="file: not a folder"):
        weft.load(tmp_path / "file")


def test_manifest_records_override_inferred_states(tmp_path: Path) -> None:
    """Without a record, as in older folders, the names of the inputs tell."""
    cache = (1, ["batch", 1, 4, 8])
    names = [f"{a}.0.{b}" for a in ("past_key_values", "present") for b in ("key", "value")]
    model = decoder(**dict.fromkeys(names, cache))

    def record(growth: str) -> list[dict[str, str]]:
        return [{"input": a, "output": b, "growth": growth} for a, b in zip(names[:2], names[2:], strict=True)]

    def rewinds(**manifest: Any) -> bool:
        return opened(save(tmp_path, model, **manifest)).decoder.can_rewind

    assert rewinds() and rewinds(carried=record("text"))
    assert not rewinds(cache=[{"rolling": True}]) and not rewinds(carried=record("window"))
    with pytest.raises(WeftError, match="growth is 'sideways'"):
        rewinds(carried=record("sideways"))
    extra = {"input": "past_states.0.ssm", "output": "present_states.0.ssm", "growth": "constant"}
    with pytest.raises(WeftError, match=r"has no input past_states\.0\.ssm, although weft\.json lists it"):
        rewinds(carried=[*record("text"), extra])
    with pytest.raises(WeftError, match=rf"has the input {names[1]}, which the runtime cannot provide"):
        rewinds(carried=record("text")[:1])


def test_cache_classes_of_older_modules_are_known_by_name() -> None:
    for name in ("KVCache", "KeyCache", "RollingKVCache", "RollingKeyCache", "CrossCache"):
        assert get_growth(type(name, (), {})()) is get_growth(object.__new__(getattr(caches, name)))
    assert get_growth(type("State", (), {})()) is get_growth(RecurrentState()) is Growth.CONSTANT
