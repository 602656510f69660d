"""Replies of OpenAI's Responses API: response objects, events of their streams, and the store of past responses."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .engine.jobs import AnswerPiece
from .protocol.response_requests import Message, ResponseRequest, join_calls, read_item
from .protocol.responses import encode_json, format_event
from .protocol.tools import ToolCall
from .replies import Reply

STORE_BYTES = 64 << 20  # of all stored messages, as JSON


class ResponseStore:
    """The messages up to the end of past responses, by response id; the oldest are removed beyond `STORE_BYTES`."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[list[Message], int]] = OrderedDict()
        self._nbytes = 0

    def get(self, response: str) -> list[Message] | None:
        """Return the messages up to the end of a response; None if it is not stored."""
        return self._entries[response][0] if response in self._entries else None

    def add(self, response: str, messages: list[Message]) -> None:
        """Store the messages up to the end of a response."""
        size = len(encode_json({"messages": messages}))
        self._entries[response] = messages, size
        self._nbytes += size
        while self._nbytes > STORE_BYTES:
            self._nbytes -= self._entries.popitem(last=False)[1][1]


@dataclass
class ResponseReply(Reply):
    """The reply to `request`; `save` stores the messages of the answer under the id of the response."""

    request: ResponseRequest = field(kw_only=True)
    save: Callable[[str, list[Message]], None] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.output: list[dict[str, Any]] = []
        self._n_events = 0

    def begin(self) -> bytes:
        response = self._describe()
        return self._format({"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress"))

    def stream(self, piece: AnswerPiece) -> bytes:
        return self._format(self._add(piece))

    def end(self) -> bytes:
        response = self.to_object()
        return self._format([{"type": f"response.{response['status']}", "response": response}])

    def add(self, piece: AnswerPiece) -> None:
        for _ in self._add(piece):
            pass

    def to_object(self) -> dict[str, Any]:
        if self.request.store:
            self.save(self.envelope.id, join_calls([read_item(item) for item in self.output]))
        return self._describe()

    def _add(self, piece: AnswerPiece) -> Iterator[dict[str, Any]]:
        """Add a piece to the output; yield the events that describe the change."""
        choice = self.choices[0]
        text, calls, _ = choice.add(piece, self.stop_ids)
        ended = choice.finish is not None
        if text or (ended and not self.output and not calls):
            yield from self._add_text(text)
        if calls or ended:
            yield from self._end_message()
        for call in calls:
            yield from self._add_call(call)

    def _add_text(self, text: str) -> Iterator[dict[str, Any]]:
        if not self.output or self.output[-1]["status"] == "completed":
            item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "in_progress"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self.output.append({**item, "content": [part]})
            yield self._event("output_item.added", item={**item, "content": []})
            yield self._event("content_part.added", content_index=0, part=dict(part))
        self.output[-1]["content"][0]["text"] += text
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=[])

    def _end_message(self) -> Iterator[dict[str, Any]]:
        if not self.output or self.output[-1]["status"] == "completed":
            return
        item = self.output[-1]
        item["status"] = "incomplete" if self.choices[0].finish == "length" else "completed"
        (part,) = item["content"]
        yield self._event("output_text.done", content_index=0, text=part["text"], logprobs=[])
        yield self._event("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", item=item)

    def _add_call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        fields = call.json()
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": fields["id"], **fields["function"]}
        self.output.append({**item, "status": "completed"})
        yield self._event("output_item.added", item={**item, "arguments": "", "status": "in_progress"})
        yield self._event("function_call_arguments.delta", delta=call.arguments)
        yield self._event("function_call_arguments.done", name=call.name, arguments=call.arguments)
        yield self._event("output_item.done", item=self.output[-1])

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return the event response.`kind` of a stream, a JSON dict: it names the last item of the output."""
        place = {} if "item" in fields else {"item_id": self.output[-1]["id"]}
        return {"type": f"response.{kind}", **place, "output_index": len(self.output) - 1, **fields}

    def _format(self, events: Iterable[dict[str, Any]]) -> bytes:
        formatted = b""
        for event in events:
            formatted += f"event: {event['type']}\n".encode()
            formatted += format_event({**event, "sequence_number": self._n_events})
            self._n_events += 1
        return formatted

    def _describe(self) -> dict[str, Any]:
        """Return the response object, whose output is empty until the answer ends."""
        finish, counts = self.choices[0].finish, self.usage
        status = "in_progress" if finish is None else "incomplete" if finish == "length" else "completed"
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
        return {
            "id": self.envelope.id,
            "object": "response",
            "created_at": self.envelope.created,
            "model": self.envelope.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if finish is None else self.output,
            "usage": None if finish is None else usage,
            **self.request.echo(),
        }
