"""A server that is not paxpage: what it streams, or how it fails, is decided by the prompt's first token id."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
CHUNK: dict[str, Any] = {"choices": [{"index": 0, "text": "a"}]}
WITH_USAGE, WITHOUT_USAGE, CUT_SHORT, MID_STREAM_ERROR, NO_TOKENS, NO_JSON, REFUSED, NOT_FOUND = range(8)
EVENTS: dict[int, list[Any]] = {
    WITH_USAGE: [CHUNK, CHUNK, CHUNK, USAGE, "[DONE]"],
    WITHOUT_USAGE: [CHUNK, CHUNK, CHUNK, "[DONE]"],
    CUT_SHORT: [CHUNK, CHUNK],
    MID_STREAM_ERROR: [CHUNK, {"error": {"message": "out of luck", "code": 500}}, "[DONE]"],
    NO_TOKENS: [USAGE, "[DONE]"],
    NO_JSON: ["what?", "[DONE]"],
}
KEY = "sesame"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        is_open = self.headers.get("Authorization") == f"Bearer {KEY}"
        body = {"data": [{"id": "other", "owned_by": "somebody"}]} if is_open else {"error": {"message": "no key"}}
        if self.path == "/version":
            body = {"version": "9.9"}
        self._answer(200 if is_open else 401, json.dumps(body).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = body["prompt"][0]
        if kind == NOT_FOUND:
            self._answer(404, b"<html>", "text/html")
        elif kind == REFUSED:
            self._answer(429, json.dumps({"error": {"message": "the queue is full"}}).encode(), "application/json")
        else:
            events = [event if isinstance(event, str) else json.dumps(event) for event in EVENTS[kind]]
            self._answer(200, "".join(f"data: {event}\r\n\r\n" for event in events).encode(), "text/event-stream")

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def other_server() -> Iterator[str]:
    """Its address, while it runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
