"""A conversation: turns of a chat whose caches are kept, so that every turn reads only what is new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..text.chat import ChatTemplate, Message
from ..text.tokenizer import Tokenizer
from .generate import Generator, Stream
from .protocols import Context


class Conversation(Generator):
    """What is said to a model and what it answers, beginning with `messages`::

        talk = Conversation(weft.load("out/"), [{"role": "system", "content": "Be brief."}])
        print("".join(talk.say("What is the capital of France?")))

    `variables` are handed to the chat template. A turn continues the tokens of the turns before: caches keep as many as
    the new prompt begins with; states and rolling caches, which cannot go back, all or none. With a seed the same turns
    are answered the same.
    """

    def __init__(self, model: Generator, messages: Sequence[Message] = (), **variables: Any) -> None:
        super().__init__(model.decoder, stop_ids=model.stop_ids, folder=model.folder, forced=model.forced)
        self._model, self._messages, self._variables = model, list(messages), variables
        self._answer: Stream | None = None
        self._context: Context | None = None
        self._lease = ExitStack()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._model.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template."""
        return self._model.chat_template

    @property
    def messages(self) -> list[Message]:
        """All messages so far, the last answer as far as it has come."""
        answer = [] if self._answer is None else [{"role": "assistant", "content": self._answer.result.text}]
        return [*self._messages, *answer]

    def say(self, text: str, **options: Any) -> Stream:
        """The answer to the message `text`, piece by piece; an earlier one that is still streaming ends.

        `options` are those of `stream`. Raises WeftError as it does, or where the folder has no chat template, and then
        nothing was said.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        stream = self.stream(self.chat_prompt(messages, **self._variables), **options)
        if self._answer is not None:
            self._answer.close()
        self._messages, self._answer = messages, stream
        return stream

    @contextmanager
    def _opened(self, prompts: Sequence[list[int]], most: int) -> Iterator[tuple[Context, int]]:
        if len(prompts) > 1:
            with super()._opened(prompts, most) as found:
                yield found
            return
        if self._context is None or self._context.capacity < most:
            lease = ExitStack()
            context = lease.enter_context(self.decoder.context(1, most))
            if self._context is None:
                context.reset()
            else:
                context.take(self._context)
            self._lease.close()
            self._lease, self._context = lease, context
        yield self._context, self._context.held(prompts[0])
