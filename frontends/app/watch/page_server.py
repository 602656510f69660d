"""The server of `weft viz --watch`: on this machine only, for pages that know its token."""

from __future__ import annotations

import json
import secrets
import threading
import time
from dataclasses import replace
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.storage.documents import parse_json

from .watched import Watched

HOST = "127.0.0.1"
POLL = 0.02  # seconds between looks at the file
WAIT = 20.0  # seconds after which a question for changes is answered without one
MOST_BYTES = 100_000  # of a request


class WatchServer:
    """Serves the page of `watched` at `address` until `close`; the address has a random port and token."""

    def __init__(self, watched: Watched) -> None:
        self.watched, self._token, self._open = watched, secrets.token_urlsafe(16), True
        handler = type("Handler", (_Handler,), {"watch": self})
        self._server = ThreadingHTTPServer((HOST, 0), handler)
        self._server.daemon_threads = True
        self.own = f"http://{HOST}:{self._server.server_port}"
        self.address = f"{self.own}/{self._token}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        threading.Thread(target=self._follow, daemon=True).start()

    def close(self) -> None:
        """Stop serving and following."""
        self._open = False
        self._server.shutdown()
        self._server.server_close()

    def _follow(self) -> None:
        while self._open:
            self.watched.poll()
            time.sleep(POLL)

    def find_refusal(self, handler: BaseHTTPRequestHandler) -> str | None:
        """Return why a request is refused; None if its page was opened from here."""
        host = self.own.removeprefix("http://")
        if handler.headers.get("Host") != host:
            return f"the host must be {host}"
        if (origin := handler.headers.get("Origin")) not in (None, self.own):
            return f"pages of {origin} may not ask"
        if not secrets.compare_digest(handler.path.split("/")[1].encode(), self._token.encode()):
            return "the address lacks the token"
        return None

    def answer(self, question: str, asked: dict[str, Any]) -> Any:
        """Return the JSON data that answers a `question` of the page: changes, edit, compare or launches."""
        if question == "changes":
            return self.watched.wait(int(asked.get("version", -1)), WAIT)
        if question == "edit":
            values = {int(index): int(value) for index, value in asked.get("values", {}).items()}
            self.watched.edit(values, map(str, asked.get("passes", ())))
            return {}
        if question == "launches":
            return self.watched.list_launches()
        if question == "compare":
            return self.watched.compare(int(asked["number"]))
        raise WeftError(f"there is no {question!r} here")

    def page(self) -> str:
        """Return the HTML text of the page, drawn from the newest version. Raise WeftError if none could be drawn."""
        drawing = self.watched.drawing
        if drawing is None:
            raise WeftError(self.watched.data["error"]["text"])
        now = {key: self.watched.data[key] for key in ("numbers", "passes", "facts")}
        watch = {"file": self.watched.path.name, "version": self.watched.version}
        return replace(drawing, more={**drawing.more, "watch": watch, "watched": now}).page()


class _Handler(BaseHTTPRequestHandler):
    watch: WatchServer

    def do_GET(self) -> None:
        if self._refuse():
            return
        if self.path.count("/") != 2 or not self.path.endswith("/"):
            self._send(404, b"not found", "text/plain")
            return
        try:
            self._send(200, self.watch.page().encode(), "text/html; charset=utf-8")
        except WeftError as error:
            self._send(200, _render_error(str(error)).encode(), "text/html; charset=utf-8")

    def do_POST(self) -> None:
        if self._refuse():
            return
        try:
            length = int(self.headers.get("Content-Length", "0"))
            if length > MOST_BYTES:
                raise WeftError(f"a request has at most {MOST_BYTES} bytes")
            asked = parse_json(self.rfile.read(length) or b"{}", "the request")
            answer = self.watch.answer(self.path.rpartition("/")[2], asked)
        except (WeftError, ValueError, KeyError, TypeError, IndexError) as error:
            self._send(400, json.dumps({"error": str(error)}).encode(), "application/json")
            return
        self._send(200, json.dumps(answer).encode(), "application/json")

    def _refuse(self) -> bool:
        if (reason := self.watch.find_refusal(self)) is None:
            return False
        self._send(403, reason.encode(), "text/plain; charset=utf-8")
        return True

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def _render_error(text: str) -> str:
    """Return the HTML text of a page that shows an error, and loads itself again every second."""
    return f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="1"><pre>{escape(text)}</pre>'
