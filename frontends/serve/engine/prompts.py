"""Prompts and constraints of requests, prepared beside the loop that serves them and the thread that decodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from weft.backends.runtime.text.chat import ChatTemplate, Renderer
from weft.backends.runtime.text.tokenizer import Tokenizer
from weft.ir.errors import WeftError

T = TypeVar("T")


class Prompts:
    """The tokenizer and chat template of a compiled `folder`, in a thread of their own.

    A tokenizer of their own too: one must not be used by two threads at a time.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder)
        self._renderer = Renderer()
        self._threads = ThreadPoolExecutor(1, "weft-prompts")
        self.template: ChatTemplate | None = None
        self.no_template = ""  # the reason
        try:
            self.template = ChatTemplate(folder)
            self.template.renderer = self._renderer
        except WeftError as error:  # prompts that are no chats need none
            self.no_template = str(error)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return what `work` returns, in that thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the ones that the tokenizer puts around it. Raises as `Tokenizer` does."""
        return self.tokenizer.encode(text)

    def chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a conversation. Raises WeftError as `ChatTemplate` does."""
        assert self.template is not None
        return self.tokenizer.encode(self.template.render(messages, **variables), special=False)

    def close(self) -> None:
        """End the thread and the process that renders."""
        self._threads.shutdown(cancel_futures=True)
        self._renderer.close()
