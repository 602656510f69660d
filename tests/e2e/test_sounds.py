"""Models that read sound against transformers: encoders of waveforms, and encoder-decoders that write what is said.

Waveforms of unequal lengths are padded; answers of 24 tokens run as one pass, in chunks, and token by token.
`make test` runs each model on one target, by turns.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import transformers
from click.testing import CliRunner

import weft
from weft.backends.runtime.compiled_folder import read_facts
from weft.frontends.app.api.inspect.counting import inspect
from weft.frontends.app.api.verify.verification import verify_folder
from weft.frontends.app.cli import cli
from weft.ir import WeftError

from ..supported import Errors
from .families import LENGTH, VOCAB, error
from .seq2seq import Seq2Seq
from .sounds import BINS, FRAMES, SOUNDS, SPEECH, heard, said, waveforms, written
from .test_families import CHUNKS, note, sampled
from .test_seq2seq import STEPS, Halves
from .unknowns import check_left_out


def outputs(source: Path, target: str, feeds: dict[str, np.ndarray], out: Path) -> dict[str, np.ndarray]:
    """Outputs of the encoder in `source` on `target`, by their names."""
    loaded = weft.load_source(source)
    assert loaded.unread == []
    if target == "torch":
        with torch.inference_mode():
            made = weft.torch(loaded)(*(torch.from_numpy(feeds[name]) for name in loaded.graph.inputs))
        return dict(zip(loaded.graph.outputs, (value.numpy() for value in made), strict=True))
    assert weft.compile(loaded, out, target=target).notes == []
    session = ort.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


@pytest.mark.parametrize(("name", "target"), sampled(SOUNDS))
def test_sound_encoders_equal_transformers(name: str, target: str, errors: Errors, tmp_path: Path) -> None:
    row = SOUNDS[name]
    model: Any = row.save(tmp_path / "hf")
    sound, mask = waveforms(241, 150, 90)
    with torch.inference_mode():
        want = model(torch.from_numpy(sound), attention_mask=torch.from_numpy(mask)).last_hidden_state.numpy()
        theirs = model._get_feature_vector_attention_mask(want.shape[1], torch.from_numpy(mask)).numpy()
    got = outputs(tmp_path / "hf", target, {"input_values": sound, "attention_mask": mask}, tmp_path / "out")
    seen = got["frame_mask"].astype(bool)
    assert np.array_equal(seen, theirs) and not seen.all()
    note(errors, row.family, target, "full", error(got["last_hidden_state"][seen], want[seen]))
    check_left_out(tmp_path / "hf")


def test_older_names_of_the_weight_normed_kernel_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    SOUNDS["wav2vec2"].save(tmp_path / "hf")
    feeds = dict(zip(("input_values", "attention_mask"), waveforms(200), strict=True))
    want = outputs(tmp_path / "hf", "torch", feeds, tmp_path)
    older = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        renamed = {re.sub("|".join(older), lambda m: older[m[0]], k): v for k, v in load_file(file).items()}
        save_file(renamed, file)
    for file in (tmp_path / "hf").glob("*.index.json"):
        file.write_text(re.sub("|".join(older), lambda m: older[m[0]], file.read_text()))
    assert np.array_equal(
        outputs(tmp_path / "hf", "torch", feeds, tmp_path)["last_hidden_state"], want["last_hidden_state"]
    )


@pytest.mark.parametrize(("name", "target"), sampled(SPEECH))
def test_transcriptions_equal_transformers(name: str, target: str, errors: Errors, tmp_path: Path) -> None:
    row = SPEECH[name]
    model = row.save(tmp_path / "hf")
    inputs = said(row)
    passes = "default" if target == "torch" else "default,-last-token-logits"
    report = weft.compile(tmp_path / "hf", tmp_path / "out", target=target, passes=passes)
    assert (report.model.unread, report.notes) == ([], [])
    for way, chunk in CHUNKS.items():
        got = in_torch(report.model, inputs, chunk) if target == "torch" else in_onnx(tmp_path / "out", inputs, chunk)
        note(errors, row.family, target, way, error(got, written(model, inputs, chunk)))
    answers = weft.load(tmp_path / "out", trust=True).generate(sources(inputs), max_tokens=STEPS)
    assert [answer.tokens for answer in answers] == greedy(model, row, inputs)
    check_left_out(tmp_path / "hf")


def in_onnx(folder: Path, inputs: dict[str, np.ndarray], chunk: int) -> np.ndarray:
    """Logits of the answers; chunks of several tokens row by row, which GroupQueryAttention asks for."""
    halves = Halves(folder)
    batches = [inputs] if chunk in (1, LENGTH) else [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(3)]
    return np.concatenate([halves.logits(batch, chunk) for batch in batches])


def in_torch(model: Any, inputs: dict[str, np.ndarray], chunk: int) -> np.ndarray:
    """Logits of the answers, those of later calls without the encoder's inputs."""
    net: Any = weft.torch(model)
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    parts = given.pop("input_ids").split(chunk, 1)
    cache, found = net.new_cache(len(parts[0]), LENGTH), []
    with torch.inference_mode():
        for i, part in enumerate(parts):
            found.append(net(input_ids=part, cache=cache, **({} if i else given)).numpy())
    return np.concatenate(found, 1)


def sources(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The sounds, without padding."""
    (sound, *masks) = (array for name, array in inputs.items() if name != "input_ids")
    return [row[..., : mask.sum()] for row, mask in zip(sound, masks[0], strict=True)] if masks else list(sound)


def greedy(model: Any, row: Seq2Seq, inputs: dict[str, np.ndarray]) -> list[list[int]]:
    """The answers of transformers, token by token."""
    ids = torch.full((3, 1), row.config["decoder_start_token_id"])
    with torch.inference_mode():
        for _ in range(STEPS):
            logits = model(**heard(inputs), decoder_input_ids=ids).logits
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    answers = [line[1:].tolist() for line in ids]
    return [answer[: answer.index(2) + 1] if 2 in answer else answer for answer in answers]


LANGUAGES = {"<|en|>": 85, "<|de|>": 86, "<|fr|>": 87}
LAST = VOCAB - 1  # transformers takes tokens behind it for times
WHISPERS: dict[str, dict[str, Any]] = {
    "any language": {"lang_to_id": LANGUAGES},
    "a language and a task": {"lang_to_id": LANGUAGES, "language": "de", "task": "translate"},
    "a language": {"lang_to_id": LANGUAGES, "language": "fr"},
    "older": {"lang_to_id": LANGUAGES, "forced_decoder_ids": [[1, None], [2, 88]]},
    "one language": {"forced_decoder_ids": [[1, LAST]]},
}


@pytest.mark.halved
@pytest.mark.parametrize("target", ["ort-cpu", "torch"])
@pytest.mark.parametrize("name", WHISPERS)
def test_whisper_prompt_equals_transformers(name: str, target: str, tmp_path: Path) -> None:
    """With the language that it hears or is told, the task and no times; and it does not say what it must not."""
    row = SPEECH["whisper"]
    row.save(tmp_path / "hf")
    known = {"no_timestamps_token_id": LAST, "task_to_id": {"transcribe": 88, "translate": 89}}
    never = {"suppress_tokens": [5, 6, 7, 88, 89], "begin_suppress_tokens": [2, 8, 40]}
    tokens = {"decoder_start_token_id": 84, "eos_token_id": 2, "pad_token_id": 1, "bos_token_id": 0}
    facts = {**known, **never, **tokens, **WHISPERS[name], "is_multilingual": True}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(facts))
    theirs: Any = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "hf")
    inputs = said(row)
    with torch.inference_mode():
        made = theirs.generate(torch.from_numpy(inputs["input_features"]), max_new_tokens=12, return_timestamps=False)
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target)
    answers = weft.load(tmp_path / "out", trust=True).generate(sources(inputs), max_tokens=16)
    found = [answer.tokens[answer.tokens.index(LAST) + 1 :][:12] for answer in answers]
    assert found == [[token for token in line if token not in (1, 2)] for line in made.tolist()]
    prompts = {"any language": 2, "a language and a task": 3, "a language": 3, "older": 3, "one language": 1}
    assert {answer.tokens.index(LAST) + 1 for answer in answers} == {prompts[name]}


def test_unknown_whisper_language_is_refused(tmp_path: Path) -> None:
    SPEECH["whisper"].save(tmp_path / "hf")
    facts = {"no_timestamps_token_id": LAST, "lang_to_id": LANGUAGES, "language": "english"}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(facts))
    with pytest.raises(WeftError, match="language is 'english', but it must be a code of lang_to_id, such as en"):
        weft.load_source(tmp_path / "hf")


@pytest.mark.parametrize("name", ["whisper", "moonshine"])
def test_onnx_target_uses_standard_operators(name: str, tmp_path: Path) -> None:
    SPEECH[name].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", target="onnx")
    for half in ("encoder", "model"):
        onnx.checker.check_model(tmp_path / "out" / f"{half}.onnx", full_check=True)
        proto = onnx.load(tmp_path / "out" / f"{half}.onnx", load_external_data=False)
        assert {n.domain for n in proto.graph.node} == {""}


def test_invalid_sound_is_refused(tmp_path: Path) -> None:
    for name in ("whisper", "moonshine"):
        SPEECH[name].save(tmp_path / f"{name}-hf")
        weft.compile(tmp_path / f"{name}-hf", tmp_path / name)
    whisper, moonshine = (weft.load(tmp_path / name) for name in ("whisper", "moonshine"))
    reads = rf"a spectrogram \[{BINS}, {FRAMES}\], mel bins by frames"
    for model, prompt, reason in (
        (whisper, "hello", f"a prompt is 'hello', but the model takes sound: an array of floats, {reads}"),
        (whisper, [1, 2], r"a prompt is \[1, 2\], but the model takes sound"),
        (whisper, np.zeros((BINS + 1, FRAMES)), rf"a prompt is an array \[7, 18\], but the model takes {reads}"),
        (whisper, np.zeros((BINS, 5), np.float32), rf"a prompt is an array \[6, 5\], but the model takes {reads}"),
        (moonshine, np.zeros((2, 900)), r"a prompt is an array \[2, 900\], but the model takes a waveform \[samples\]"),
        (moonshine, np.zeros(5), "has 0 frames, but the model takes 1 to 4096: use a longer sound"),
    ):
        with pytest.raises(WeftError, match=reason):
            model.generate([prompt])
    with pytest.raises(WeftError, match="takes sound, but weft verify supports models that take tokens only"):
        verify_folder(tmp_path / "whisper")
    with pytest.raises(WeftError, match="target transformers supports only text encoders; that of whisper reads sound"):
        weft.compile(tmp_path / "whisper-hf", tmp_path / "no", target="transformers")


def test_the_command_line_reads_sound(tmp_path: Path) -> None:
    row = SPEECH["whisper"]
    model = row.save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out")
    inputs = said(row)
    np.save(tmp_path / "sound.npy", inputs["input_features"][:1])
    ran = CliRunner().invoke(
        cli, ["run", f"{tmp_path / 'out'}", "--sound", f"{tmp_path / 'sound.npy'}", "--max-tokens", f"{STEPS}"]
    )
    assert ran.exit_code == 0, ran.output
    assert ",".join(map(str, greedy(model, row, inputs)[0])) in ran.output and "18 frames" in ran.output
    for file, told in (
        ("no.npy", "No such file or directory"),
        ("out/weft.json", "is not a .npy file, or has no numbers"),
    ):
        refused = CliRunner().invoke(cli, ["run", f"{tmp_path / 'out'}", "--sound", f"{tmp_path / file}"])
        assert refused.exit_code == 2 and told in refused.output and "pickle" not in refused.output
    assert inspect(weft.load_source(tmp_path / "hf")).layers == len(model.model.encoder.layers) + len(
        model.model.decoder.layers
    )
    SOUNDS["hubert"].save(tmp_path / "hubert")
    weft.compile(tmp_path / "hubert", tmp_path / "encoder")
    assert json.loads((tmp_path / "encoder" / "weft.json").read_text())["kind"] == "audio-encoder"
    with pytest.raises(WeftError, match="encodes sound, not texts: run its model with ONNX Runtime or PyTorch itself"):
        read_facts(tmp_path / "encoder")
