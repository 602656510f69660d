"""Models on ONNX Runtime whose tokens PyTorch draws, held against the host's choice; and what crosses the bus."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft.backends.runtime.compiled_folder import read_facts
from weft.backends.runtime.core.decoder import STEP
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort.bound_states import Buffer
from weft.backends.runtime.ort.ort_decoder import OrtDecoder
from weft.backends.runtime.ort.session import Session, import_onnxruntime, open_session
from weft.backends.runtime.torch import ort_cuda_decoder as onnx
from weft.backends.runtime.torch.ort_cuda_decoder import SamplingOrtContext

from ..pretended import Device
from ..stacks import PROMPTS, opened, stack, tokens
from .test_sampling_context import SAMPLED

KINDS = ["local-global", "latent", "rolling, first keys", "hybrid"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("onnx") / "out"
    weft.compile(stack(request.param), out, seed=5)
    return out


def drawing(folder: Path) -> Generator:
    model = opened(folder)
    assert isinstance(model.decoder, OrtDecoder)
    model.decoder.context_class = SamplingOrtContext
    return model


def test_device_tokens_equal_host_tokens(folder: Path) -> None:
    model, own = opened(folder), drawing(folder)
    for generator in (model, own):
        generator.stop_ids = frozenset([7])  # rows end at different times
    for options in SAMPLED:
        some: Any = options
        wanted = tokens(model.generate(PROMPTS, max_tokens=12, **some))
        assert tokens(own.generate(PROMPTS, max_tokens=12, **some)) == wanted, options
        assert tokens(own.generate(PROMPTS[0], max_tokens=12, **some)) == wanted[:1], options


def test_host_continues_after_device_sampling(folder: Path) -> None:
    """Conversations, beams and penalties before and behind steps that draw: on the same caches."""
    found = []
    for model in (opened(folder), drawing(folder)):
        talk = model.conversation()
        (first,) = talk.generate(PROMPTS[0], max_tokens=5)
        (second,) = talk.generate([*PROMPTS[0], *first.tokens, 9, 9], max_tokens=5)
        (third,) = talk.generate(
            [*PROMPTS[0], *first.tokens, 9, 9, *second.tokens], max_tokens=4, repetition_penalty=1.3
        )
        results = [first.tokens, second.tokens, third.tokens, second.timings.prompt_tokens]
        results += tokens(model.generate(PROMPTS, max_tokens=4, beams=2))
        found.append([*results, *tokens(model.generate(PROMPTS, max_tokens=4))])
    assert found[0] == found[1]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_nan_logits_are_reported(folder: Path, wrong: float) -> None:
    model: Any = drawing(folder)

    class Context(SamplingOrtContext):
        def _run(self, *given: Any) -> torch.Tensor:
            return super()._run(*given) + wrong

    model.decoder.context_class = Context
    with pytest.raises(weft.WeftError, match=f"computed {wrong} as its largest logit"):
        model.generate(PROMPTS, max_tokens=3)


def on_the_device(buffer: Buffer) -> torch.Tensor:
    """Return the memory of a simulated device, which is the CPU's."""
    raw = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.address)
    return torch.from_numpy(np.frombuffer(raw, buffer.host.dtype).reshape(buffer.shape))


def test_only_tokens_are_copied_to_the_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended GPU: no input is pushed and no logit pulled while tokens are drawn; every run is a captured one
    that waits for nothing."""
    wanted = tokens(opened(folder).generate(PROMPTS, max_tokens=9))
    facts = read_facts(folder)
    device = Device(import_onnxruntime(), open_session(facts.model, threads=1, device="cpu").ort)
    device.pretend(monkeypatch)
    monkeypatch.setitem(STEP, "cuda", 64)
    monkeypatch.setattr(onnx, "view_buffer", on_the_device)
    crossed: list[str] = []
    for name in ("upload", "download"):
        real = getattr(Buffer, name)

        def counted(buffer: Buffer, real: Any = real, name: str = name) -> Any:
            crossed.append(name)
            return real(buffer)

        monkeypatch.setattr(Buffer, name, counted)
    waiting: list[bool] = []
    run = device.run_with_iobinding

    def noted(binding: Any, options: Any) -> None:
        try:
            waiting.append(options.get_run_config_entry("disable_synchronize_execution_providers") != "1")
        except RuntimeError:  # there is no such entry
            waiting.append(True)
        run(binding, options)

    monkeypatch.setattr(device, "run_with_iobinding", noted, raising=False)
    decoder = OrtDecoder(Session(device, "cuda", graphs=True), replace(facts, max_length=300))
    decoder.context_class = SamplingOrtContext
    model = Generator(decoder)
    assert tokens(model.generate(PROMPTS, max_tokens=9)) == wanted
    runs = [*zip(device.graph_ids, waiting, strict=True)]
    assert ("-1", True) in runs  # prompts
    steps = [waits for number, waits in runs if number != "-1"]
    assert len(steps) in (8, 9) and not any(steps)
    assert crossed == []


def test_bf16_logits_are_read_as_such(tmp_path: Path) -> None:
    buffer = Buffer(Session(None, "cpu"), (2, 1, 4), (16, np.uint16))
    buffer.host[:] = torch.tensor([[[1.5, -2.0, 0.0, 3.0]]] * 2, dtype=torch.bfloat16).view(torch.uint16).numpy()
    seen = onnx.view_buffer(buffer)
    assert seen.dtype == torch.bfloat16 and seen[1, 0].tolist() == [1.5, -2.0, 0.0, 3.0]
    assert seen.data_ptr() == buffer.address
