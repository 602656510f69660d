"""Prompts and constraints of requests, prepared outside the event loop and the decoding thread."""

from __future__ import annotations

import asyncio
import contextlib
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
Pool = Literal["prompts", "grammars", "large"]
THREADS: dict[Pool, int] = {"prompts": 2, "grammars": 2, "large": 1}
MAX_LARGE = 32  # requests that may wait for the pool of large inputs
LARGE_INPUT = 1 << 14  # characters or bytes, which take a few hundredths of a second to tokenize
MAX_GUIDES = 32
MAX_GRAMMAR = 1 << 18  # characters
SHORT_LIMIT, LONG_LIMIT = 0.1, 3.0  # seconds per grammar, in the pools "grammars" and "large"
ENCODE_LIMIT = 10.0  # seconds for the tokens of a string
WORKER = ("-m", f"{__package__}.text_worker")


class TooSlow(Exception):
    """The error of a grammar that takes longer than its time limit."""


class PromptEncoder:
    """The tokenizer, chat template and constraints of a compiled `folder`, run in separate threads and processes.

    Large inputs have their own thread pool, so that other requests do not wait. `vocab`: width of the logits.
    """

    def __init__(self, folder: Path, vocab: int, stop_ids: Collection[int]) -> None:
        self.tokenizer = Tokenizer(folder)
        self.constraints = Constraints(folder, vocab, stop_ids)
        self._renderer = _PerThreadRenderer()
        self._workers = _PerThreadRenderer([*WORKER, folder, json.dumps([vocab, sorted(stop_ids)])])
        self._pools = {pool: ThreadPoolExecutor(threads, f"weft-{pool}") for pool, threads in THREADS.items()}
        self._guides: dict[str, Guide] = {}  # a cache of the last ones: clients repeat their schemas
        self._large = 0
        self._closed = False
        self.template: ChatTemplate | None = None
        self.template_error = ""  # the reason
        try:
            self.template = ChatTemplate(folder)
            self.template.renderer = self._renderer
        except WeftError as error:  # prompts other than chats need no template
            self.template_error = str(error)

    async def run(self, pool: Pool, work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of `work` in a thread of `pool`; raise QueueFull or ServerClosing if it cannot run."""
        large = pool == "large"
        if large and self._large > MAX_LARGE:
            raise QueueFull(f"{self._large} large requests wait. Try again later.")
        self._large += large
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pools[pool], work, *arguments)
        except BaseException:  # when the server shuts down, also for cancelled work and killed processes
            if self._closed:
                raise ServerClosing from None
            raise
        finally:
            self._large -= large

    async def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a string; `special` adds the tokenizer's special tokens, such as BOS.

        Raises WeftError if the text is invalid or takes too long; QueueFull and ServerClosing as `run` does.
        """
        if len(text) <= LARGE_INPUT:
            return await self.run("prompts", self.tokenizer.encode, text, special)
        return await self.run("large", self._encode, text, special)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], size: int
    ) -> list[int]:
        """Return the tokens of a conversation in a body of `size` bytes; raise as `ChatTemplate` and `encode` do."""
        assert self.template is not None
        template = self.template
        pool: Pool = "large" if size > LARGE_INPUT else "prompts"
        text = await self.run(pool, lambda: template.render(messages, **variables))
        return await self.encode(text, special=False)

    async def build_guide(self, size: int, write: Callable[..., str], *arguments: Any) -> Guide:
        """Return the guide of the grammar (Lark) that `write(*arguments)` returns, for a body of `size` bytes.

        Raises WeftError if it is invalid, too large, or takes too long; QueueFull and ServerClosing as `run` does.
        """
        grammar = await self.run("large", write, *arguments) if size > LARGE_INPUT else write(*arguments)
        if len(grammar) > MAX_GRAMMAR:
            raise WeftError(f"its grammar has {len(grammar)} characters; the maximum is {MAX_GRAMMAR}")
        if (cached := self._guides.get(grammar)) is not None:
            return cached
        if len(grammar) <= LARGE_INPUT:
            with contextlib.suppress(TooSlow):
                guide = await self.run("grammars", self._build_guide, grammar, SHORT_LIMIT)
                if len(self._guides) >= MAX_GUIDES:
                    del self._guides[next(iter(self._guides))]
                self._guides[grammar] = guide
                return guide
        try:
            return await self.run("large", self._build_guide, grammar, LONG_LIMIT)
        except TooSlow:
            message = f"its grammar takes longer than {LONG_LIMIT:g} seconds to compile: make it smaller"
            raise WeftError(message) from None

    async def load_token_bytes(self) -> Callable[[int], bytes]:
        """Return the function from a token id to its bytes; raise WeftError if llguidance cannot read the tokenizer."""
        await self.run("grammars", lambda: self.constraints.tokenizer)  # its first reading takes a while
        return self.constraints.token_bytes

    async def find_special_token(self, text: str) -> int | None:
        """Return the id of the special token `text`, None if it is not a single token; raise as `load_token_bytes`."""
        tokenizer = await self.run("grammars", lambda: self.constraints.tokenizer)
        ids = tokenizer.tokenize_str(text, parse_special=True)
        return ids[0] if len(ids) == 1 else None

    def cancel(self) -> None:
        """Cancel waiting requests, and kill the processes that work on running ones."""
        self._closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self._renderer.kill()
        self._workers.kill()

    def close(self) -> None:
        """End all threads and processes."""
        self.cancel()
        for pool in self._pools.values():
            pool.shutdown()
        self._renderer.close()
        self._workers.close()

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            reply = self._ask(ENCODE_LIMIT, "tokenizer", {"text": text, "special": special})
        except TooSlow:
            raise WeftError(f"tokenizing it takes longer than {ENCODE_LIMIT:g} seconds: make it shorter") from None
        return array("I", bytes.fromhex(reply["ids"])).tolist()

    def _build_guide(self, grammar: str, seconds: float) -> Guide:
        self._ask(seconds, "grammar", {"grammar": grammar})  # first in another process, which the grammar may crash
        return self.constraints.build_guide(grammar)

    def _ask(self, seconds: float, step: str, request: dict[str, Any]) -> Any:
        """Return a process's reply to a request; raise TooSlow after `seconds`, WeftError without a valid reply."""
        status, reply, _ = self._workers.send_request(json.dumps({"seconds": seconds, **request}).encode())
        if status in (-signal.SIGALRM, -signal.SIGXCPU):
            raise TooSlow
        if not reply:
            raise WeftError(f"the {step} failed, because the input is too large, or nested too deep")
        if "error" in (result := parse_json(reply, f"the {step}'s reply", values=len(reply))):
            raise WeftError(result["error"])
        return result


class _PerThreadRenderer(Renderer):
    """A Renderer for several threads, with one process per thread."""

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
