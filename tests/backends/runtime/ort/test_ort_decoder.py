"""The runtime on models with rolling caches, latents and states of recurrences, against the float64 interpreter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import weft
from weft import Attention, Decoder, RoPE
from weft.backends.runtime.compiled_folder import read_facts
from weft.backends.runtime.core.decoder import STEP
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort.ort_decoder import OrtDecoder, open_decoder, open_encoder
from weft.backends.runtime.ort.session import Session, import_onnxruntime, open_session
from weft.frontends import load_source
from weft.frontends.dsl import MLA
from weft.ir import WeftError, interpret

from ....frontends.formats.hf import peft_models as peft
from ....sampling import ALL, each
from ... import handmade
from ...handmade import DIM, LONGEST, decoder, encoder, save
from ..pretended import Device
from ..stacks import (
    CAREFUL,
    PROMPTS,
    STACKS,
    VOCAB,
    block,
    opened,
    stack,
    tokens,
)

KINDS = sorted(STACKS) if ALL else ["hybrid", "latent", "recurrent", "rolling, first keys"]  # every layer of them


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(kind) / "out"
    weft.compile(stack(kind), out, seed=5)
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> Generator:
    return opened(folder)


@pytest.fixture(scope="module")
def wanted(kind: str) -> list[list[int]]:
    """Return the greedy continuations of the prompts by 14 tokens, recomputed for each token in float64."""
    graph = load_source(stack(kind), seed=5).graph
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(14):
            inputs = {"input_ids": np.array([ids]), "position_ids": np.arange(len(ids))[None]}
            logits = interpret(graph, {name: inputs[name] for name in graph.inputs})["logits"]
            ids.append(int(logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


@pytest.mark.parametrize("chunk", each(2, [1, 3, 9, 512]))
def test_batches_of_unequal_prompts(model: Generator, wanted: list[list[int]], chunk: int) -> None:
    assert len({token for row in wanted for token in row}) > 10
    assert tokens(model.generate(PROMPTS, max_tokens=14, chunk=chunk)) == wanted
    for prompt, row in zip(PROMPTS, wanted, strict=True):
        assert tokens(model.generate(prompt, max_tokens=14, chunk=chunk)) == [row]


def test_standard_operators_give_the_same_tokens(kind: str, wanted: list[list[int]], tmp_path: Path) -> None:
    weft.compile(stack(kind), tmp_path / "out", target="onnx", seed=5)
    model = opened(tmp_path / "out")
    assert tokens(model.generate(PROMPTS, max_tokens=14, chunk=5)) == wanted


def test_ended_rows_do_not_change_other_rows(model: Generator, wanted: list[list[int]]) -> None:
    stopping = Generator(model.decoder, stop_ids=frozenset([wanted[0][3], wanted[2][1]]))
    for row, result in zip(wanted, stopping.generate(PROMPTS, max_tokens=14), strict=True):
        ends = [at + 1 for at, token in enumerate(row) if token in stopping.stop_ids]
        assert result.tokens == row[: min(ends, default=14)]


def test_padding_never_enters_states(kind: str, model: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = model.decoder
    assert isinstance(decoder, OrtDecoder)
    runs = []
    run = OrtDecoder.run
    monkeypatch.setattr(OrtDecoder, "run", lambda self, *given: runs.append(given) or run(self, *given))
    with decoder.context(len(PROMPTS), 40) as context:
        context.prefill(PROMPTS)
    assert len(runs) == (4 if kind in CAREFUL else 1)  # the third and fourth are of one length
    assert decoder.can_rewind == (kind not in CAREFUL)


def test_beam_scores_are_log_probabilities(model: Generator) -> None:
    """The score of a text is its log-probability, which it is only if everything moved along with it."""
    for result in model.generate(PROMPTS, max_tokens=10, beams=3, returned=3):
        ids = [*result.prompt, *result.tokens]
        logits = model.logits(ids[:-1], chunk=1).astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        score = sum(logs[at - 1, ids[at]] for at in range(len(result.prompt), len(ids)))
        np.testing.assert_allclose(result.score, score / 10, rtol=1e-4)


def test_reused_context_has_fresh_states(model: Generator) -> None:
    with model.decoder.context(1, 40) as context:
        first = context.prefill([PROMPTS[0]]).copy()
        for token in range(5):
            context.step(np.array([token]))
        np.testing.assert_array_equal(context.prefill([PROMPTS[0]]), first)


def test_caches_are_as_large_as_reported(kind: str, model: Generator, folder: Path) -> None:
    manifest = json.loads((folder / "weft.json").read_text())
    caches, states = manifest["cache"], manifest["states"]
    slots = [256 if cache["capacity"] is None else cache["capacity"] for cache in caches]
    parts = [1 if cache["latent"] else 2 for cache in caches]
    numbers = sum(
        n * part * cache["kv_heads"] * cache["head_dim"] for n, part, cache in zip(slots, parts, caches, strict=True)
    )
    numbers += sum(2 * int(np.prod(state["shape"])) for state in states)  # read from one, written to the other
    results = model.generate(PROMPTS, max_tokens=14)
    assert results[0].timings.cache_bytes == len(PROMPTS) * numbers * 4
    assert isinstance(model.decoder, OrtDecoder)
    assert model.decoder.cache_bytes(len(PROMPTS), 35) == len(PROMPTS) * numbers * 4


def test_rolling_buffer_of_mistral_is_an_eighth_of_a_full_cache(tmp_path: Path) -> None:
    """Layers of the shape of Mistral 7B at 32k tokens."""
    wide = {"heads": 32, "kv_heads": 8, "head_dim": 128, "rope": RoPE(10_000), "window": 4096}
    model = Decoder(vocab=VOCAB, dim=32, layers=[block(Attention(**wide))] * 2, context=32_768)
    weft.compile(model, tmp_path / "rolling")
    weft.compile(model, tmp_path / "full", passes="default, -rolling-buffer")
    rolling, full = (opened(tmp_path / name).decoder for name in ("rolling", "full"))
    assert isinstance(rolling, OrtDecoder) and isinstance(full, OrtDecoder)
    assert full.cache_bytes(1, 32_768) == 2 * 2 * 8 * 128 * 32_768 * 4
    with rolling.context(1, 32_768) as context:
        assert context.cache_bytes == rolling.cache_bytes(1, 32_768) == full.cache_bytes(1, 32_768) // 8


def test_latent_cache_width_is_rank_plus_rotary_dim(tmp_path: Path) -> None:
    """576 numbers a token and layer, two bytes each in bf16, as in DeepSeek."""
    latent = MLA(heads=2, rank=512, head_dim=8, rope_dim=64, v_head_dim=8, rope=RoPE(10_000))
    model = Decoder(vocab=VOCAB, dim=32, layers=[block(latent)] * 3, context=256)
    weft.compile(model, tmp_path / "out")
    decoder = opened(tmp_path / "out").decoder
    assert isinstance(decoder, OrtDecoder)
    assert decoder.cache_bytes(1, 256) == 576 * 3 * 256 * 4


def test_simulated_cuda_device_gives_the_same_tokens(
    kind: str, folder: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = read_facts(folder)
    device = Device(import_onnxruntime(), open_session(facts.model, threads=1, device="cpu").ort)
    beams = opened(folder).generate(PROMPTS, max_tokens=10, beams=3)
    device.pretend(monkeypatch)
    monkeypatch.setitem(STEP, "cuda", 64)
    decoder = OrtDecoder(Session(device, "cuda", graphs=True), replace(facts, max_length=300))
    model = Generator(decoder)
    assert tokens(model.generate(PROMPTS, max_tokens=14, chunk=9)) == wanted
    captured = set(device.graph_ids) - {"-1"}  # one a side of the states
    assert len(captured) == (2 if kind in ("recurrent", "linear", "hybrid") else 1)
    assert model.generate(PROMPTS, max_tokens=10, beams=3) == beams
    assert set(map(str, device.released)) == captured  # the rows are more now: captured anew
    talk = model.conversation()
    (first,) = talk.generate(PROMPTS[4], max_tokens=4)
    longer = [*PROMPTS[4], *first.tokens, 5, 6]
    (second,) = talk.generate(longer, max_tokens=270)  # beyond the 24 tokens held: into larger caches
    assert second.timings.prompt_tokens == 3
    monkeypatch.undo()
    assert tokens(opened(folder).generate(longer, max_tokens=270)) == [second.tokens]


# -- conversations: what a model that cannot go back keeps


@pytest.fixture
def talking(model: Generator) -> Any:
    return model.conversation()


def test_conversation_prefills_only_new_tokens(model: Generator, talking: Any) -> None:
    fresh, held = [list(range(3, 30))], 0
    for _ in range(4):  # 27, then 41 more tokens a turn: the caches grow past their first 256 slots
        prompt = fresh[-1]
        (result,) = talking.generate(prompt, max_tokens=35, chunk=16)
        assert tokens(model.generate(prompt, max_tokens=35)) == [result.tokens]
        assert result.timings.prompt_tokens == len(prompt) - held
        held = len(prompt) + 34  # the last token was never fed back
        fresh.append([*prompt, *result.tokens, *range(40, 46), *range(30)])


def test_changed_prefix_is_prefilled_again(kind: str, model: Generator, talking: Any) -> None:
    talking.generate(PROMPTS[4], max_tokens=3)
    changed = [*PROMPTS[4][:12], 7, 7, 7]
    (result,) = talking.generate(changed, max_tokens=8)
    assert tokens(model.generate(changed, max_tokens=8)) == [result.tokens]
    assert result.timings.prompt_tokens == (15 if kind in CAREFUL else 3)
    (again,) = talking.generate(changed, max_tokens=8)
    assert again.tokens == result.tokens
    assert again.timings.prompt_tokens == (15 if kind in CAREFUL else 1)


def test_interrupted_run_invalidates_the_cache(model: Generator, talking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    talking.generate(PROMPTS[4], max_tokens=3)

    def interrupted(*given: Any) -> None:
        run(*given)
        raise KeyboardInterrupt

    run = OrtDecoder.run
    with monkeypatch.context() as patch:
        patch.setattr(OrtDecoder, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            talking.generate([*PROMPTS[4], 1, 2, 3, 4], max_tokens=3)
    longer = [*PROMPTS[4], 1, 2, 3, 4, 5]
    (result,) = talking.generate(longer, max_tokens=6)
    assert tokens(model.generate(longer, max_tokens=6)) == [result.tokens]
    assert result.timings.prompt_tokens == len(longer)


# -- graphs written by hand


def recurrent(shape: list[Any], *, present: bool = True) -> onnx.ModelProto:
    """Return a model whose logits[t] are the row of a table for the sum of all tokens so far; the sum is the state."""
    node = helper.make_node
    nodes = [
        node("Cast", ["input_ids"], ["x"], to=TensorProto.FLOAT),
        node("CumSum", ["x", "one"], ["so_far"]),
        node("Add", ["so_far", "past_states.0.sum"], ["total"]),
        node("Slice", ["total", "minus", "end", "axis"], ["present_states.0.sum"]),
        node("Mod", ["total", "vocab"], ["row"], fmod=1),
        node("Cast", ["row"], ["at"], to=TensorProto.INT64),
        node("OneHot", ["at", "depth", "values"], ["logits"]),
    ]
    known = {"one": np.int64(1), "minus": np.int64([-1]), "end": np.int64([2**31]), "axis": np.int64([1])}
    known |= {"vocab": np.float32(VOCAB), "depth": np.int64(VOCAB), "values": np.float32([0, 1])}
    state = helper.make_tensor_value_info("past_states.0.sum", TensorProto.FLOAT, shape)
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "seq"]), state]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "seq", VOCAB])]
    if present:
        outputs.append(helper.make_tensor_value_info("present_states.0.sum", TensorProto.FLOAT, shape))
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in known.items()]
    graph = helper.make_graph(nodes, "sums", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def saved(folder: Path, model: onnx.ModelProto) -> Path:
    onnx.save(model, folder / "model.onnx")
    facts = {"kind": "decoder", "target": "onnx", "vocab": VOCAB, "max_length": 500}
    (folder / "weft.json").write_text(json.dumps(facts))
    return folder


def test_decoder_with_recurrent_states_only(tmp_path: Path) -> None:
    model = opened(saved(tmp_path, recurrent(["batch", 1])))
    for chunk in (1, 2, 4, 100):
        for prompt, result in zip(PROMPTS, model.generate(PROMPTS, max_tokens=6, chunk=chunk), strict=True):
            ids = list(prompt)
            for token in result.tokens:
                assert token == sum(ids) % VOCAB
                ids.append(token)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shape": ["batch", "n"]}, "its sizes must be fixed numbers"),
        ({"shape": ["batch", 1], "present": False}, "but no output present_states.0.sum"),
    ],
)
def test_bad_states(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        opened(saved(tmp_path, recurrent(**changed)))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"attention_mask": None}, "the graph has no attention_mask"),
        ({"logits": None}, "the graph has no logits"),
        ({"extra_states": [1]}, "has the input extra_states"),
        ({"present.0.value": None}, "but no output present.0.value"),
        ({"past_key_values.0.key": (1, ["b", "h", "c", 8])}, "must be fixed numbers"),
        (
            {"past_key_values.0.key": (11, ["b", 1, "c", 8]), "present.0.key": (11, ["b", 1, "c", 8])},
            r"tensor\(double\)",
        ),
        ({"logits": ["batch", "seq", 5]}, "logits are 5 wide, but the manifest records a vocabulary of 12"),
        ({f"{a}.0.{b}": None for a in ("past_key_values", "present") for b in ("key", "value")}, "no past_key_values"),
    ],
)
def test_graph_without_decoder_inputs_is_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        opened(save(tmp_path, decoder(**changed)))


def test_caches_of_a_size_fixed_in_the_graph(tmp_path: Path) -> None:
    cache = (1, ["batch", 1, 4, 8])
    names = [f"{a}.0.{b}" for a in ("past_key_values", "present") for b in ("key", "value")]
    model = opened(save(tmp_path, decoder(**dict.fromkeys(names, cache)), eos_token_ids=[]))
    assert len(model.generate([1, 2], max_tokens=3)[0].tokens) == 3
    with pytest.raises(WeftError, match="6 tokens do not fit the caches of the graph, which hold 4"):
        model.generate([1, 2], max_tokens=5)


def test_full_cache_raises(tmp_path: Path) -> None:
    model = opened(save(tmp_path, decoder()))
    with model.decoder.context(1, LONGEST) as context:
        context.prefill([[1] * LONGEST])
        with pytest.raises(WeftError, match="the cache is full with 6 tokens"):
            context.step([1])
        with pytest.raises(WeftError, match="7 tokens in a row do not fit the cache of 6"):
            context.extend([1])
    with (
        pytest.raises(WeftError, match="7 tokens exceed the 6 that the model is compiled"),
        model.decoder.context(1, 7),
    ):
        pass
    with pytest.raises(WeftError, match="no memory for the caches"), model.decoder.context(2**40, 6):
        pass


@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
def test_selected_adapters_answer_as_merged_ones(target: str, tmp_path: Path) -> None:
    base, layers = peft.save_base(tmp_path / "base"), {"first": ["q_proj", "down_proj"], "second": ["o_proj"]}
    for seed, (name, modules) in enumerate(layers.items()):
        peft.adapt(base, tmp_path / name, seed=seed, target_modules=modules)
    folders = [tmp_path / name for name in layers]
    weft.compile(base, tmp_path / "out", target=target, switch_adapters=folders, max_length=64)
    model, answers = opened(tmp_path / "out"), []
    assert list(model.adapters) == list(layers)
    for name, selected in {"": model, **model.adapters, "again": model}.items():
        merged = [tmp_path / name] if name in layers else []
        weft.compile(base, tmp_path / f"merged{name}", target=target, adapters=merged, max_length=64)
        alone, prompts = opened(tmp_path / f"merged{name}"), [peft.IDS, peft.IDS[:3]]
        np.testing.assert_allclose(selected.logits(peft.IDS)[-1], alone.logits(peft.IDS)[-1], atol=1e-4)
        answers.append(tokens(selected.generate(prompts, max_tokens=9)))
        assert answers[-1] == tokens(alone.generate(prompts, max_tokens=9))
    assert answers[0] == answers[3] and len(set(map(str, answers))) == 3


def test_unreadable_adapter_is_named(folder: Path, model: Generator, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx_adapter").write_bytes(b"no adapter")
    decoder: Any = model.decoder
    with pytest.raises(WeftError, match=r"bad\.onnx_adapter: ONNX Runtime cannot read it"):
        decoder.select_adapter("bad", tmp_path / "bad.onnx_adapter")


TABLES = (np.ones((handmade.VOCAB, DIM), np.float32),) * 2


def test_decoder_has_the_facts_of_its_folder(tmp_path: Path) -> None:
    opened = open_decoder(read_facts(save(tmp_path, decoder())), "cpu", 1)
    assert (opened.vocab, opened.max_length, opened.device_type, opened.start) == (handmade.VOCAB, LONGEST, "cpu", None)
    assert opened.name == str(tmp_path / "model.onnx") and opened.can_rewind
    rolling = replace(read_facts(tmp_path), rolling=frozenset({0}), compares=True)
    cache = (1, ["batch", 1, 4, 8])
    names = [f"{a}.0.{b}" for a in ("past_key_values", "present") for b in ("key", "value")]
    save(tmp_path, decoder(**dict.fromkeys(names, cache)))
    opened = open_decoder(rolling, "auto", 1)
    assert not opened.can_rewind and not opened.padded


def test_encoder_has_the_facts_of_its_folder(tmp_path: Path) -> None:
    facts = read_facts(save(tmp_path, encoder(TABLES), kind="encoder", pooling="cls", normalize=True))
    opened = open_encoder(facts, "cpu", 1)
    assert (opened.pooling, opened.normalize, opened.session.device) == ("cls", True, "cpu")


def test_device_of_the_target_is_kept(tmp_path: Path) -> None:
    facts = read_facts(save(tmp_path, decoder()))
    for open_model in (open_decoder, open_encoder):
        with pytest.raises(WeftError, match="compiled for ort-cpu, so it cannot run on CUDA"):
            open_model(facts, "cuda", None)


def test_second_file_of_an_encoder_decoder_is_its_encoder(tmp_path: Path) -> None:
    facts = read_facts(save(tmp_path, decoder()))
    onnx.save(encoder(TABLES), tmp_path / "encoder.onnx")
    both = replace(facts, kind="encoder-decoder", files=(facts.model, tmp_path / "encoder.onnx"), max_source=5)
    with pytest.raises(WeftError, match=r"encoder\.onnx: its inputs are input_ids, .* so it is not the encoder of an"):
        open_decoder(both, "cpu", 1)
