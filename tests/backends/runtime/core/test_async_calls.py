"""Calls from asyncio give the results of the calls that they run, several at once, and end when they are cancelled."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.backends.runtime.core.async_calls import CallCancelled, call_in_thread, raise_if_cancelled
from weft.backends.runtime.core.generation import GenerateArguments, Generator, StreamArguments
from weft.ir import WeftError

from ....sampling import others_long
from ..stacks import PROMPTS, opened, stack, tokens
from ..sums import SumContext, SumDecoder, continue_sums

PROMPT = [3, 1, 4]
SECONDS = 30  # after which a test fails instead of waiting


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait in a thread."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def is_cancelled() -> bool:
    try:
        raise_if_cancelled()
    except CallCancelled:
        return True
    return False


def call_before(method: str, monkeypatch: pytest.MonkeyPatch, hook: Callable[[], object]) -> None:
    """Call `hook` in the thread of a model call, before `SumContext.method`."""
    real = getattr(SumContext, method)

    def run(self: SumContext, *args: Any) -> Any:
        hook()
        return real(self, *args)

    monkeypatch.setattr(SumContext, method, run)


def cancel_in_call(number: int, method: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[Any]]:
    """Cancel the task in the second list during model call `number` of `method`, which goes on once it is cancelled;
    return (a list that gets an item per call, a list for the task)."""
    calls, tasks, loop = list[int](), list[Any](), asyncio.get_running_loop()

    def hook() -> None:
        calls.append(len(calls))
        if len(calls) == number:
            loop.call_soon_threadsafe(tasks[0].cancel)
            wait_until(is_cancelled)

    call_before(method, monkeypatch, hook)
    return calls, tasks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder = tmp_path_factory.mktemp("async") / "out"
    weft.compile(stack("local-global"), folder, seed=3)
    return opened(folder)


@pytest.mark.parametrize("target", others_long(["ort-cpu", "torch"]))
def test_concurrent_calls_give_the_tokens_of_generate(target: str, tmp_path: Path) -> None:
    weft.compile(stack("hybrid"), tmp_path / "out", target=target, seed=3)
    model = weft.load(tmp_path / "out", "cpu", trust=True)
    assert isinstance(model, Generator) and model.decoder.concurrent == (target == "ort-cpu")
    options: Any = {"max_tokens": 24, "temperature": 0.9, "seed": 5}
    wanted = [tokens(model.generate(prompt, **options)) for prompt in PROMPTS]

    async def run() -> list[Any]:
        return await asyncio.gather(*(model.agenerate(prompt, **options) for prompt in PROMPTS * 3))

    assert [tokens(results) for results in asyncio.run(run())] == wanted * 3


def test_batches_and_beams_give_the_results_of_generate(model: Generator) -> None:
    async def run(**options: Any) -> list[Any]:
        return await model.agenerate(PROMPTS, max_tokens=8, **options)

    assert asyncio.run(run()) == model.generate(PROMPTS, max_tokens=8)
    assert asyncio.run(run(beams=3, returned=2)) == model.generate(PROMPTS, max_tokens=8, beams=3, returned=2)


def test_threads_run_one_model_at_once(model: Generator) -> None:
    wanted = [tokens(model.generate(prompt, max_tokens=24)) for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(model.generate, prompt, max_tokens=24) for prompt in PROMPTS * 4]
        assert [tokens(result.result()) for result in results] == wanted * 4


@pytest.mark.long
def test_conversations_of_threads_share_stored_prefixes(smollm2: Generator) -> None:
    terms = {"role": "system", "content": "Answer politely, in one sentence, and never mention the weather. " * 8}
    questions = ["What is an apple?", "What is a stone?", "What is rain?", "What is a map?"]

    def ask(question: str) -> tuple[list[int], int]:
        stream = smollm2.conversation([terms]).say(question, max_tokens=6)
        assert "".join(stream) == stream.result.text
        return stream.result.tokens, stream.result.timings.cached_tokens

    wanted = [ask(question)[0] for question in questions]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, questions * 2))
    assert [answer for answer, _ in answers] == wanted * 2
    assert all(cached >= 64 for _, cached in answers)


def test_two_calls_are_inside_the_model_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SumDecoder()
    decoder.executor = ThreadPoolExecutor(2)
    both = threading.Barrier(2, timeout=SECONDS)  # passed only if two threads wait for it
    call_before("_run_tokens", monkeypatch, both.wait)

    async def run() -> list[Any]:
        generator = Generator(decoder)
        return await asyncio.gather(*(generator.agenerate([first, 1], max_tokens=4) for first in (2, 3)))

    assert [tokens(r) for r in asyncio.run(run())] == [[continue_sums([first, 1], 4)] for first in (2, 3)]


def test_calls_of_other_decoders_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = list[int](), list[int]()
    decoder = SumDecoder()
    assert not decoder.concurrent

    def hook() -> None:
        inside.append(threading.get_ident())
        most.append(len(set(inside)))

    call_before("_step", monkeypatch, hook)

    async def run() -> list[Any]:
        generator = Generator(decoder)
        return await asyncio.gather(*(generator.agenerate(PROMPT, max_tokens=4) for _ in range(4)))

    assert [tokens(results) for results in asyncio.run(run())] == [[continue_sums(PROMPT, 4)]] * 4
    assert set(most) == {1}  # one thread ran all steps


def test_event_loop_runs_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ticked = threading.Event()
    call_before("_step", monkeypatch, lambda: None if ticked.wait(SECONDS) else pytest.fail("the loop is blocked"))

    async def run() -> None:
        call = asyncio.create_task(Generator(SumDecoder()).agenerate(PROMPT, max_tokens=3))
        await asyncio.sleep(0)
        ticked.set()
        assert tokens(await call) == [continue_sums(PROMPT, 3)]

    asyncio.run(run())


@pytest.mark.parametrize(("method", "number"), [("_step", 3), ("_run_tokens", 2)], ids=["decode step", "prompt chunk"])
def test_cancelled_call_ends_after_the_current_model_call(
    method: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SumDecoder()
    generator = Generator(decoder)

    async def run() -> None:
        calls, tasks = cancel_in_call(number, method, monkeypatch)
        tasks.append(asyncio.create_task(generator.agenerate([1, 2, 3] * 4, max_tokens=100, chunk=2)))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert len(calls) == number
        with decoder.context(1, 100) as context:
            assert context is decoder.contexts[0]  # the call has returned its caches
        monkeypatch.undo()
        assert tokens(await generator.agenerate(PROMPT, max_tokens=5)) == [continue_sums(PROMPT, 5)]

    asyncio.run(run())


def test_cancelled_beam_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        calls, tasks = cancel_in_call(4, "_step", monkeypatch)
        tasks.append(asyncio.create_task(Generator(SumDecoder()).agenerate(PROMPT, max_tokens=100, beams=2)))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert len(calls) == 4

    asyncio.run(run())


def test_cancelled_call_that_waits_for_a_thread_never_starts() -> None:
    async def run() -> None:
        begin, calls = threading.Event(), list[str]()
        with ThreadPoolExecutor(1) as pool:
            first = asyncio.create_task(call_in_thread(pool, begin.wait, SECONDS))
            second = asyncio.create_task(call_in_thread(pool, calls.append, "second"))
            await asyncio.sleep(0)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            begin.set()
            assert await first
        assert not calls

    asyncio.run(run())


def test_stream_gives_the_pieces_of_stream(model: Generator, smollm2: Generator) -> None:
    async def run() -> tuple[list[str], Any]:
        stream = await smollm2.astream("The capital of France is", max_tokens=8, stop=".")
        return [piece async for piece in stream], stream.result

    wanted = smollm2.stream("The capital of France is", max_tokens=8, stop=".")
    pieces = list(wanted)
    assert len(pieces) > 0 and asyncio.run(run()) == (pieces, wanted.result)


def test_closed_stream_ends(smollm2: Generator) -> None:
    async def run() -> int:
        stream = await smollm2.astream("Once upon a time", max_tokens=50)
        async for _ in stream:
            await stream.aclose()
        return len(stream.result.tokens)

    assert asyncio.run(run()) < 5


def test_cancelled_stream_ends(smollm2: Generator) -> None:
    async def run() -> int:
        stream = await smollm2.astream("Once upon a time", max_tokens=50)
        waits = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert [piece async for piece in stream] == []
        return len(stream.result.tokens)

    assert asyncio.run(run()) < 2


def test_wrong_arguments_raise_when_awaited(model: Generator) -> None:
    with pytest.raises(WeftError, match="temperature is -1"):
        asyncio.run(model.agenerate(PROMPT, temperature=-1))
    with pytest.raises(WeftError, match="no tokenizer"):
        asyncio.run(Generator(SumDecoder()).astream(PROMPT))


@pytest.mark.parametrize(
    ("method", "options"), [(Generator.generate, GenerateArguments), (Generator.stream, StreamArguments)]
)
def test_options_are_the_keyword_arguments_of_the_call(method: Any, options: Any) -> None:
    from weft.backends.runtime.core.sampler import SamplingOptions

    own = {p.name for p in inspect.signature(method).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert own | {*SamplingOptions.__annotations__} == {*options.__annotations__}


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder = tmp_path_factory.mktemp("smollm2") / "out"
    weft.compile(smollm2_gguf, folder, max_length=256)
    return opened(folder)
