"""Prompts and constraints of requests, prepared outside the event loop and the decoding thread."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

from weft.backends.runtime.text.chat import ChatTemplate, Renderer
from weft.backends.runtime.text.tokenizer import Tokenizer
from weft.ir.errors import WeftError
from weft.ir.storage.documents import parse_json

from .constraints import Constraints, Guide
from .jobs import QueueFull, ServerClosing

T = TypeVar("T")
Lane = Literal["prompts", "grammars", "large"]
THREADS: dict[Lane, int] = {"prompts": 2, "grammars": 2, "large": 1}
MOST_LARGE = 32  # requests that may wait for the lane of large ones
LARGE = 1 << 14  # characters or bytes above which an input is large; tokenizing them takes a few hundredths of a second
MOST_GUIDES = 32
MOST_GRAMMAR = 1 << 18  # characters
SOON, LATE = 0.1, 3.0  # seconds per grammar, in the lane of grammars and among large requests
ENCODING = 10.0  # seconds for the tokens of a string
WORKER = ("-m", f"{__package__}.text_worker")


class TooSlow(Exception):
    """The error of a grammar that takes longer than its time limit."""


class Prompts:
    """The tokenizer, chat template and constraints of a compiled `folder`, run in separate threads and processes.

    Large inputs have their own threads (lane), so that other requests do not wait for them. `vocab`: width of the
    logits.
    """

    def __init__(self, folder: Path, vocab: int, stop_ids: Collection[int]) -> None:
        self.tokenizer = Tokenizer(folder)
        self.constraints = Constraints(folder, vocab, stop_ids)
        self._renderer = _PerThread()
        self._texts = _PerThread([*WORKER, folder, json.dumps([vocab, sorted(stop_ids)])])
        self._pools = {lane: ThreadPoolExecutor(threads, f"weft-{lane}") for lane, threads in THREADS.items()}
        self._guides: dict[str, Guide] = {}  # a cache of the last ones: clients repeat their schemas
        self._large = 0
        self._closed = False
        self.template: ChatTemplate | None = None
        self.no_template = ""  # the reason
        try:
            self.template = ChatTemplate(folder)
            self.template.renderer = self._renderer
        except WeftError as error:  # prompts other than chats need no template
            self.no_template = str(error)

    async def run(self, lane: Lane, work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of `work` in a thread of `lane`; raise Full if too many wait, Closing if the server
        ends."""
        large = lane == "large"
        if large and self._large > MOST_LARGE:
            raise QueueFull(f"{self._large} large requests wait. Try again later.")
        self._large += large
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pools[lane], work, *arguments)
        except BaseException:  # when the server shuts down, also for cancelled work and killed processes
            if self._closed:
                raise ServerClosing from None
            raise
        finally:
            self._large -= large

    async def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a string; `special` adds the tokenizer's special tokens, such as BOS.

        Raises WeftError as `Tokenizer` does, and if it takes too long; Full and Closing as `run` does.
        """
        if len(text) <= LARGE:
            return await self.run("prompts", self.tokenizer.encode, text, special)
        return await self.run("large", self._encode, text, special)

    async def chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], size: int) -> list[int]:
        """Return the tokens of a conversation in a body of `size` bytes; raise as `ChatTemplate` and `encode` do."""
        assert self.template is not None
        template = self.template
        lane: Lane = "large" if size > LARGE else "prompts"
        text = await self.run(lane, lambda: template.render(messages, **variables))
        return await self.encode(text, special=False)

    async def guide(self, size: int, write: Callable[..., str], *arguments: Any) -> Guide:
        """Return the guide of the grammar that `write(*arguments)` returns (llguidance's Lark); `size`: bytes of the
        body.

        Raises WeftError if it is wrong, too large, or takes too long; Full and Closing as `run` does.
        """
        grammar = await self.run("large", write, *arguments) if size > LARGE else write(*arguments)
        if len(grammar) > MOST_GRAMMAR:
            raise WeftError(f"it is a grammar of {len(grammar)} characters, more than the maximum of {MOST_GRAMMAR}")
        if (cached := self._guides.get(grammar)) is not None:
            return cached
        try:
            if len(grammar) <= LARGE:
                guide = await self.run("grammars", self._guide, grammar, SOON)
                if len(self._guides) >= MOST_GUIDES:
                    del self._guides[next(iter(self._guides))]
                self._guides[grammar] = guide
                return guide
        except TooSlow:
            pass
        try:
            return await self.run("large", self._guide, grammar, LATE)
        except TooSlow:
            raise WeftError(f"its grammar takes longer than {LATE:g} seconds to prepare: make it smaller") from None

    async def token_bytes(self) -> Callable[[int], bytes]:
        """Return the function from a token to its bytes; raise WeftError if llguidance cannot read the tokenizer."""
        await self.run("grammars", lambda: self.constraints.tokenizer)  # its first reading takes a while
        return self.constraints.token_bytes

    async def special(self, text: str) -> int | None:
        """Return the id of the special token `text`, None if it is not a single token; raise as `token_bytes`."""
        tokenizer = await self.run("grammars", lambda: self.constraints.tokenizer)
        ids = tokenizer.tokenize_str(text, parse_special=True)
        return ids[0] if len(ids) == 1 else None

    def stop(self) -> None:
        """Cancel waiting requests, and stop the work of processes."""
        self._closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self._renderer.kill()
        self._texts.kill()

    def close(self) -> None:
        """End all threads and processes."""
        self.stop()
        for pool in self._pools.values():
            pool.shutdown()
        self._renderer.close()
        self._texts.close()

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            reply = self._ask(ENCODING, "tokenizer", {"text": text, "special": special})
        except TooSlow:
            raise WeftError(f"its tokens take longer than {ENCODING:g} seconds: make it shorter") from None
        return array("I", bytes.fromhex(reply["ids"])).tolist()

    def _guide(self, grammar: str, seconds: float) -> Guide:
        self._ask(seconds, "grammar", {"grammar": grammar})  # tried in a process first, which it may crash
        return self.constraints.guide(grammar)

    def _ask(self, seconds: float, step: str, request: dict[str, Any]) -> Any:
        """Return a process's reply to a request; raise TooSlow after `seconds`, WeftError without a valid reply."""
        status, reply, _ = self._texts.send_request(json.dumps({"seconds": seconds, **request}).encode())
        if status in (-signal.SIGALRM, -signal.SIGXCPU):
            raise TooSlow
        if not reply:
            raise WeftError(f"the {step} fails on it: it is too large, or nested too deep")
        if "error" in (result := parse_json(reply, f"the {step}'s reply", values=len(reply))):
            raise WeftError(result["error"])
        return result


class _PerThread(Renderer):
    """A renderer for several threads, with a process for each."""

    def __init__(self, *command: Sequence[str | Path]) -> None:
        super().__init__(*command)
        self._local, self._renderers = threading.local(), list[Renderer]()

    def send_request(self, request: bytes) -> tuple[int, bytes, bytes]:
        if not hasattr(self._local, "renderer"):
            self._local.renderer = Renderer(self._command)
            self._renderers.append(self._local.renderer)
        if self._killed:
            self._local.renderer.kill()
        reply: tuple[int, bytes, bytes] = self._local.renderer.send_request(request)
        return reply

    def kill(self) -> None:
        self._killed = True
        for renderer in self._renderers:
            renderer.kill()

    def close(self) -> None:
        for renderer in self._renderers:
            renderer.close()
