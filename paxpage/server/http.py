"""HTTP without an opinion on its contents: reading a bounded body, noticing that the client left, sending events."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, runtime_checkable

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from paxpage.outputs import CompletionDelta
from paxpage.server.async_engine import OutputStream, RequestFailure
from paxpage.server.errors import ApiError, error_body
from paxpage.server.responses import ResponseModel

LOGGER = logging.getLogger(__name__)
MAX_BODY_BYTES = 16 * 2**20
JSON_TYPE = "application/json"
EVENT_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
DONE_EVENT = b"data: [DONE]\n\n"


class ClientLeftError(Exception):
    """The client closed the connection; there is nobody to answer."""


@runtime_checkable
class ChunkWriter(Protocol):
    """Turns engine events into the chunks of one stream, in order."""

    def feed(self, deltas: Sequence[CompletionDelta]) -> list[ResponseModel]:
        """Chunks for what was added to the samples."""

    def finish(self) -> list[ResponseModel]:
        """Chunks after the last event."""


async def read_json_body(request: Request) -> bytes:
    """The body, of at most MAX_BODY_BYTES.

    Raises:
        ApiError: 415 for a content type that is not JSON, 413 for a longer body, 400 for none.
    """
    _require_json_type(request.headers.get("content-type", ""))
    _require_size(_declared_length(request))
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        _require_size(len(body))
    if not body:
        raise ApiError(400, "the body is empty; allowed: a JSON object")
    return bytes(body)


def _require_json_type(content_type: str) -> None:
    if content_type.partition(";")[0].strip().lower() != JSON_TYPE:
        raise ApiError(415, f"Content-Type is {content_type!r}; allowed: {JSON_TYPE}")


def _declared_length(request: Request) -> int:
    text = request.headers.get("content-length", "0")
    return int(text) if text.isdecimal() else 0


def _require_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise ApiError(413, f"the body has {num_bytes} bytes or more; allowed: at most {MAX_BODY_BYTES}")


async def until_client_leaves[ResultT](receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs work, and cancels it when the client leaves. The request's body must have been read.

    Raises:
        ClientLeftError: the client left first.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: str) -> bytes:
    """One server-sent event."""
    return b"data: " + data.encode() + b"\n\n"


class EventStream(Response):
    """A stream of server-sent events written from an OutputStream, which is closed at the end by close."""

    def __init__(
        self,
        stream: OutputStream,
        writer: ChunkWriter,
        close: Callable[[OutputStream], None],
    ):
        super().__init__()
        self._stream = stream
        self._writer = writer
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the stream ends or the client leaves."""
        try:
            await until_client_leaves(receive, self._send_all(send))
        except ClientLeftError:
            pass
        finally:
            self._close(self._stream)

    async def _send_all(self, send: Send) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in EVENT_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._send_events(send)
        except ApiError as error:
            await _send_error(send, error)
        except Exception:  # the status is sent already, so the client has to learn it from the stream
            LOGGER.exception("a stream failed")
            await _send_error(send, ApiError(500, "a fault of the server; its log has the details"))
        await send({"type": "http.response.body", "body": DONE_EVENT, "more_body": False})

    async def _send_events(self, send: Send) -> None:
        while not self._stream.is_finished:
            events = await self._stream.next_events()
            await _send_chunks(send, self._writer.feed([item for item in events if isinstance(item, CompletionDelta)]))
            for item in events:
                if isinstance(item, RequestFailure):
                    raise item.error
        await _send_chunks(send, self._writer.finish())


async def _send_chunks(send: Send, chunks: Sequence[ResponseModel]) -> None:
    await _send_body(send, b"".join(event(chunk.to_json()) for chunk in chunks))


async def _send_error(send: Send, error: ApiError) -> None:
    await _send_body(send, event(json.dumps(error_body(error))))


async def _send_body(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})
