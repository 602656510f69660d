"""The table test of encoder-decoders: tiny random models against transformers, on every target.

Sources of unequal lengths are padded; answers of 24 tokens run as one pass, in chunks, and token by token, in
transformers too, since the tokens of a call compete for the capacity of experts. `make test` runs each model on one
target, by turns.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from safetensors.numpy import load_file, save_file

import weft
from weft import Attention, Block, CrossAttention, Decoder, Encoder, EncoderDecoder, RMSNorm
from weft.frontends import load_source
from weft.frontends.app.api.verify.verification import verify_folder
from weft.frontends.dsl import MoE, Router
from weft.ir import WeftError, interpret

from ..backends.onnx.cuda_placement import cuda_problems
from ..caches import empty_caches
from ..frontends.formats.weft.sealing import seal_again
from ..sampling import by_turns, each, others_long
from ..supported import Errors
from .families import LENGTH, error
from .seq2seq import SEQ2SEQ, answered, pairs
from .test_families import CHUNKS, TARGETS, note, sampled
from .unknowns import check_left_out

CAPACITY = 32  # of the caches
STEPS = 12  # of generation


class Halves:
    """The two models of a compiled folder in plain ONNX Runtime."""

    def __init__(self, folder: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # the caches are copied here, which it warns of
        self.encoder, self.decoder = (
            ort.InferenceSession(folder / f"{name}.onnx", options, providers=["CPUExecutionProvider"])
            for name in ("encoder", "model")
        )

    def logits(self, inputs: dict[str, np.ndarray], chunk: int) -> np.ndarray:
        """Logits [batch, seq, vocab] of the answers, `chunk` tokens at a time."""
        ids = inputs["input_ids"]
        crossed = _run(self.encoder, inputs)
        state = empty_caches(self.decoder, len(ids), CAPACITY)
        found = []
        for start in range(0, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            end = start + part.shape[1]
            call = {
                "input_ids": part,
                "attention_mask": np.ones((len(ids), end), np.int64),
                "position_ids": np.broadcast_to(np.arange(start, end), part.shape),
            }
            made = _run(self.decoder, {**inputs, **crossed, **state, **call})
            state = {name.replace("present", "past_key_values"): v for name, v in made.items() if name != "logits"}
            found.append(made["logits"])
        return np.concatenate(found, 1)


def _run(session: ort.InferenceSession, known: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(None, {i.name: known[i.name] for i in session.get_inputs()}), strict=True))


@pytest.mark.halved
@pytest.mark.parametrize(("name", "target"), sampled(SEQ2SEQ, TARGETS))
def test_encoder_decoder_answers_equal_transformers(name: str, target: str, errors: Errors, tmp_path: Path) -> None:
    row = SEQ2SEQ[name]
    model = row.save(tmp_path / "hf")
    inputs = pairs(row)
    report = weft.compile(tmp_path / "hf", tmp_path / "out", target=target, passes="default,-last-token-logits")
    assert report.model.unread == []
    halves = Halves(tmp_path / "out")
    for way, chunk in CHUNKS.items():
        want = answered(model, inputs, chunk)
        batches = [inputs] if chunk in (1, LENGTH) else [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(3)]
        got = np.concatenate([halves.logits(batch, chunk) for batch in batches])
        note(errors, row.family, target, way, error(got, want))
    answers = weft.load(tmp_path / "out").generate(_sources(inputs), max_tokens=STEPS)
    assert [answer.tokens for answer in answers] == _generated(model, inputs)
    check_left_out(tmp_path / "hf")


@pytest.mark.parametrize("name", each(3, SEQ2SEQ))
def test_pytorch_modules_generate_the_tokens_of_transformers(name: str, errors: Errors, tmp_path: Path) -> None:
    row = SEQ2SEQ[name]
    model, inputs = row.save(tmp_path / "hf"), pairs(row)
    module: Any = weft.torch(load_source(tmp_path / "hf"))
    for way, chunk in CHUNKS.items():
        want = answered(model, inputs, chunk)
        batches = [inputs] if chunk in (1, LENGTH) else [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(3)]
        got = np.concatenate([_called(module, batch, chunk) for batch in batches])
        note(errors, row.family, "torch", way, error(got, want))


def _called(module: Any, inputs: dict[str, np.ndarray], chunk: int) -> np.ndarray:
    """Logits [batch, seq, vocab] of the answers by a module of PyTorch, `chunk` tokens a call; the source is given to
    the first."""
    given = {name: torch.from_numpy(x) for name, x in inputs.items()}
    ids, source = given["input_ids"], {name: x for name, x in given.items() if name.startswith("encoder")}
    cache, made = module.new_cache(len(ids), CAPACITY), []
    with torch.inference_mode():
        for part in ids.split(chunk, 1):
            out = module(input_ids=part, cache=cache, **source)
            made.append(out if isinstance(out, torch.Tensor) else out[0])
            source = {}
    return torch.cat(made, 1).numpy()


def test_overflowing_experts_drop_tokens_as_in_transformers(tmp_path: Path) -> None:
    """The row that is about their capacity does exceed it: tokens one at a time never do."""
    for name, differs in (("switch", False), ("switch-overflow", True)):
        row = SEQ2SEQ[name]
        model = row.save(tmp_path / name)
        together, apart = (answered(model, pairs(row), chunk) for chunk in (LENGTH, 1))
        assert (error(together, apart) > 1e-2) == differs


def _sources(inputs: dict[str, np.ndarray]) -> list[list[int]]:
    """The sources without their padding."""
    rows = zip(inputs["encoder_input_ids"], inputs["encoder_attention_mask"], strict=True)
    return [ids[mask > 0].tolist() for ids, mask in rows]


def _generated(model: torch.nn.Module, inputs: dict[str, np.ndarray]) -> list[list[int]]:
    """The greedy answers of transformers, with the token that ends them."""
    net: Any = model
    ids, mask = (torch.from_numpy(inputs[f"encoder_{name}"]) for name in ("input_ids", "attention_mask"))
    with torch.inference_mode():
        found = net.generate(ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
    stop = net.generation_config.eos_token_id
    rows = (row[1:].tolist() for row in found)  # without the start token
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]


@pytest.mark.parametrize("target", others_long(TARGETS))
def test_compiled_folders_generate_the_same_tokens(target: str, tmp_path: Path) -> None:
    """The default pipeline, which is checked pass by pass, with logits of the last token only."""
    row = SEQ2SEQ["bart"]
    model, inputs = row.save(tmp_path / "hf"), pairs(row)
    model.generation_config.forced_bos_token_id = 7
    model.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target, verify=True)
    found = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert (found["kind"], found["logits"], found["max_length"], found["max_source_length"]) == (
        *("encoder-decoder", "last"),
        *(64, 64),
    )
    assert [found[f"{name}_token_id"] for name in ("decoder_start", "forced_bos", "forced_eos")] == [2, 7, 2]
    answers = weft.load(tmp_path / "out").generate(_sources(inputs), max_tokens=STEPS)
    assert [answer.tokens for answer in answers] == _generated(model, inputs)
    assert {answer.tokens[0] for answer in answers} == {7}


def _stored(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """Return the byte ranges of each model's weights in model.onnx.data: first byte, and one past the last."""
    found = {}
    for name in ("encoder", "model"):
        facts = [
            {entry.key: entry.value for entry in tensor.external_data}
            for tensor in onnx.load(folder / f"{name}.onnx", load_external_data=False).graph.initializer
            if tensor.external_data
        ]
        assert {fact["location"] for fact in facts} == {"model.onnx.data"}
        found[name] = sorted((int(f["offset"]), int(f["offset"]) + int(f["length"])) for f in facts)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_each_weight_is_stored_once(target: str, tmp_path: Path) -> None:
    SEQ2SEQ["t5"].save(tmp_path / "hf")
    report = weft.compile(tmp_path / "hf", tmp_path / "out", target=target)
    stored = _stored(tmp_path / "out")
    assert len(set(stored["encoder"]) & set(stored["model"])) == 1  # the embedding
    places = sorted({*stored["encoder"], *stored["model"]})
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    assert report.weight_bytes >= sum(end - start for start, end in places)
    assert (tmp_path / "out" / "model.onnx.data").stat().st_size == places[-1][1]


def test_packed_weights_give_the_same_answers(tmp_path: Path) -> None:
    row = SEQ2SEQ["t5-v1.1"]
    row.save(tmp_path / "hf")
    logits = []
    for prepack in (False, True):
        weft.compile(tmp_path / "hf", tmp_path / "out", passes="default,-last-token-logits", prepack=prepack)
        logits.append(Halves(tmp_path / "out").logits(pairs(row), LENGTH))
        for name in ("encoder", "model"):
            proto = onnx.load(tmp_path / "out" / f"{name}.onnx", load_external_data=False)
            keys = {entry.key for tensor in proto.graph.initializer for entry in tensor.external_data}
            assert prepack == any(key.startswith("prepacked_") for key in keys)
    assert np.array_equal(*logits)


@pytest.mark.parametrize(
    ("options", "against"), by_turns([{}, {"target": "onnx"}, {"dtype": "f16"}], ["source", "transformers"]), ids=str
)
def test_verify_compares_encoder_and_decoder(options: dict[str, Any], against: str, tmp_path: Path) -> None:
    SEQ2SEQ["switch"].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", **options)
    found = verify_folder(tmp_path / "out", against=tmp_path / "hf" if against == "transformers" else None, tokens=6)
    assert found.passed and found.divergence is None
    assert found.positions == 7
    halves = {half: [name for name in found.layers if name.startswith(half)] for half in ("encoder", "decoder")}
    assert halves["encoder"][:3] == [f"encoder.layers.{i}" for i in range(3)]
    assert halves["decoder"][:3] == [f"decoder.layers.{i}" for i in range(3)]


def test_verify_reads_single_tokens_if_experts_have_a_capacity(tmp_path: Path) -> None:
    SEQ2SEQ["switch-overflow"].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out")
    found = verify_folder(tmp_path / "out", tokens=8)
    assert found.passed and found.positions == 1
    assert len(found.layers) >= 8


@pytest.mark.parametrize("half", ["encoder", "model"])
def test_verify_finds_a_wrong_weight_in_encoder_or_decoder(half: str, tmp_path: Path) -> None:
    SEQ2SEQ["bart"].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out")
    layer = f"{'encoder' if half == 'encoder' else 'decoder'}.layers.0"
    graph = onnx.load(tmp_path / "out" / f"{half}.onnx", load_external_data=False).graph
    weight = next(tensor for tensor in graph.initializer if tensor.name == f"{layer}.ffn.up.weight")
    facts = {entry.key: entry.value for entry in weight.external_data}
    with (tmp_path / "out" / "model.onnx.data").open("r+b") as file:
        file.seek(int(facts["offset"]))
        file.write(bytes(int(facts["length"])))
    seal_again(tmp_path / "out")
    found = verify_folder(tmp_path / "out", tokens=4)
    assert not found.passed and found.divergence is not None
    assert (found.divergence.layer, found.divergence.value) == (layer, f"{layer}.ffn.up")


@pytest.mark.parametrize("name", ["t5-v1.1", "bart", "switch", "umt5"])
def test_onnx_target_uses_standard_operators(name: str, tmp_path: Path) -> None:
    SEQ2SEQ[name].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", target="onnx")
    for half in ("encoder", "model"):
        onnx.checker.check_model(tmp_path / "out" / f"{half}.onnx", full_check=True)
        proto = onnx.load(tmp_path / "out" / f"{half}.onnx", load_external_data=False)
        assert {n.domain for n in proto.graph.node} == {""}


@pytest.mark.parametrize(("name", "dtype"), by_turns(["t5", "bart", "switch-overflow"], ["f16", "bf16"]))
def test_encoder_and_decoder_stay_on_the_gpu(name: str, dtype: str, tmp_path: Path) -> None:
    """Foreseen from the kernels of the CUDA provider, as for decoders in tests/backends/onnx/test_cuda.py."""
    SEQ2SEQ[name].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", target="ort-cuda", dtype=dtype)
    for half in ("encoder", "model"):
        assert cuda_problems(onnx.load(tmp_path / "out" / f"{half}.onnx", load_external_data=False)) == []


@pytest.mark.parametrize(
    ("name", "wanted", "limits"),
    [("bart", None, (64, 64)), ("bart", 40, (40, 64)), ("t5", 5000, (5000, 5000)), ("t5", None, (4096, 4096))],
)
def test_source_length_is_limited_by_the_encoder(
    name: str, wanted: int | None, limits: tuple[int, int], tmp_path: Path
) -> None:
    """A table of positions ends; relative ones do not."""
    SEQ2SEQ[name].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", max_length=wanted)
    found = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert (found["max_length"], found["max_source_length"]) == limits


def test_seq2seq_losses_are_omitted(tmp_path: Path) -> None:
    """They sum over encoder and decoder, which run apart; nothing of them is computed."""
    sparse = MoE(4, 32, 1, "relu", gated=False, router=Router(renormalize=False, capacity=8, aux_loss=0.01))
    attn, norm = Attention(4), RMSNorm()
    model = EncoderDecoder(
        Encoder(96, 32, 2, Block(attn, sparse, norm), final_norm=norm),
        Decoder(96, 32, 2, Block(attn, sparse, norm, cross=CrossAttention(4)), tie_embeddings=True),
    )
    assert list(model.graph().outputs) == ["logits", "aux_loss"]
    report = weft.compile(model, tmp_path / "out")
    assert any("the output aux_loss is left out" in note for note in report.notes)
    proto = onnx.load(tmp_path / "out" / "encoder.onnx", load_external_data=False)
    assert [o.name for o in proto.graph.output] == [f"cross.{i}.{part}" for i in (0, 1) for part in ("key", "value")]
    assert not any("loss" in n.name for n in proto.graph.node)
    assert len(weft.load(tmp_path / "out").generate([5, 6, 7], max_tokens=4)[0].tokens) == 4


@pytest.mark.parametrize(("name", "prefix"), [("t5", ""), ("bart", "model.")])
def test_shared_embedding_may_have_any_of_its_names(name: str, prefix: str, tmp_path: Path) -> None:
    """Tools that drop tied tensors keep one or another."""
    row = SEQ2SEQ[name]
    row.save(tmp_path / "hf")
    want = load_source(tmp_path / "hf")
    tensors = {key: value for file in (tmp_path / "hf").glob("*.safetensors") for key, value in load_file(file).items()}
    for file in (tmp_path / "hf").glob("model*"):
        file.unlink()
    table = tensors.pop(f"{prefix}shared.weight")
    names = [f"{prefix}{half}.embed_tokens.weight" for half in ("encoder", "decoder")]
    save_file({**tensors, **dict.fromkeys(names, table)}, tmp_path / "hf" / "model.safetensors")
    found = load_source(tmp_path / "hf")
    assert (found.unread, found.ignored) == ([], names[:1])
    inputs = pairs(row) | {"position_ids": np.broadcast_to(np.arange(LENGTH), (3, LENGTH))}
    logits = [interpret(m.graph, {k: inputs[k] for k in m.graph.inputs})["logits"] for m in (found, want)]
    assert np.array_equal(*logits)


def test_inexpressible_seq2seq_settings_are_refused(tmp_path: Path) -> None:
    SEQ2SEQ["marian"].save(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"share_encoder_decoder_embeddings": False}))
    with pytest.raises(WeftError, match="share_encoder_decoder_embeddings=False is not supported for marian models"):
        load_source(tmp_path / "hf")
