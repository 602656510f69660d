"""A server of the files of a folder, for pages in a browser."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class _Handler(SimpleHTTPRequestHandler):
    headers_sent: Mapping[str, str] = {}

    def end_headers(self) -> None:
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def serve(folder: Path, headers: Mapping[str, str]) -> tuple[ThreadingHTTPServer, str]:
    """Start a server of `folder` that also sends `headers`; return it with its address."""
    handler = type("Handler", (_Handler,), {"headers_sent": headers})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}/"
