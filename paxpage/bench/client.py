"""A client of OpenAI's API that notes when each part of a streamed answer came."""

import json
import time
from typing import Any, NamedTuple

import httpx

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
ENDPOINTS = (COMPLETIONS, CHAT)
MAX_REASON_LENGTH = 160
DATA = b"data:"


class RequestResult(NamedTuple):
    """One request's answer; times in seconds on time.perf_counter's clock."""

    sent_s: float
    end_s: float  # of the last chunk that held a token, or of the failure
    chunk_times_s: list[float]  # of every chunk that held a token (some servers put several tokens in one)
    num_prompt_tokens: int | None  # by the server's count, None where it gave none
    num_output_tokens: int | None
    error: str | None  # why it failed


class ServerFacts(NamedTuple):
    """What a server says of itself; None where it says nothing."""

    model: str
    engine: str | None
    version: str | None


class AnswerError(Exception):
    """The server's answer is an error, or is not what was asked for; the text says what."""


class Client:
    """Connections to one server, as many as there are requests in flight. A context manager; one event loop uses it."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        root = base_url.rstrip("/").removesuffix("/v1")  # with or without: OpenAI's clients want it there
        self._http = httpx.AsyncClient(base_url=root, headers=headers, timeout=timeout_s, limits=unlimited)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def facts(self, model: str | None) -> ServerFacts:
        """Asks the server what it is; model None: the first that it names.

        Raises:
            AnswerError: it cannot be reached, or names no model.
        """
        try:
            listed = await self._http.get(MODELS)
            _check_status(listed.status_code, listed.content)
            cards: list[dict[str, Any]] = listed.json()["data"]
            card: dict[str, Any] = next((card for card in cards if model in (None, card["id"])), {})
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise AnswerError(f"{self._http.base_url.join(MODELS)}: {reason_of(error)}") from error
        name = model or card.get("id")
        if name is None:
            raise AnswerError("the server names no model; give one with --model")
        return ServerFacts(name, card.get("owned_by"), await self._version())

    async def _version(self) -> str | None:
        answer = await self._http.get("/version")
        try:
            return answer.json()["version"] if answer.status_code == 200 else None
        except (ValueError, KeyError, TypeError):
            return None

    async def send(self, endpoint: str, body: dict[str, Any]) -> RequestResult:
        """Sends a request whose body asks for a stream, reads the answer to its end. Never raises for a failure."""
        stream = _Stream(endpoint)
        error: str | None = None
        sent_s = time.perf_counter()
        try:
            async with self._http.stream("POST", endpoint, json=body) as response:
                if response.status_code != 200:
                    _check_status(response.status_code, await response.aread())
                async for data in response.aiter_raw():
                    stream.feed(data, time.perf_counter())
            stream.check_end()
        except (httpx.HTTPError, AnswerError) as failure:
            error = reason_of(failure)
        times_s = stream.chunk_times_s
        end_s = times_s[-1] if times_s and error is None else time.perf_counter()
        usage = stream.usage
        return RequestResult(sent_s, end_s, times_s, usage.get("prompt_tokens"), usage.get("completion_tokens"), error)


class _Stream:
    """Server-sent events of one answer, as they come."""

    def __init__(self, endpoint: str) -> None:
        self.chunk_times_s: list[float] = []
        self.usage: dict[str, int] = {}
        self._is_chat = endpoint == CHAT
        self._is_done = False
        self._rest = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Takes in what the network has brought."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(DATA):
                self._take(line[len(DATA) :].strip(), now_s)

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self._is_done = True
            return
        try:
            event = json.loads(payload)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise AnswerError(f"an event of the stream is no JSON object: {payload[:60]!r}")
        if event.get("error"):
            raise AnswerError(f"error in mid-stream: {_message(event)}")
        self.usage = event.get("usage") or self.usage
        if self._has_token(event.get("choices") or ()):
            self.chunk_times_s.append(now_s)

    def _has_token(self, choices: Any) -> bool:
        """Its text may be empty: half a character. A chat has chunks that only say who speaks, or that it ends."""
        if not choices or not self._is_chat:
            return bool(choices)
        delta = choices[0].get("delta") or {}
        return bool(delta) and not ("role" in delta and not delta.get("content"))

    def check_end(self) -> None:
        """Raises AnswerError if the answer was cut short."""
        if not self._is_done:
            raise AnswerError("the stream ended without [DONE]")
        if not self.chunk_times_s:
            raise AnswerError("the stream held no token")


def reason_of(error: Exception) -> str:
    """A failure in a few words, the same for failures of one kind."""
    text = " ".join(str(error).split())
    name = "" if isinstance(error, AnswerError) else type(error).__name__
    return ": ".join(part for part in (name, text) if part)[:MAX_REASON_LENGTH]


def _check_status(status: int, content: bytes) -> None:
    if status != 200:
        raise AnswerError(f"HTTP {status}: {_message_of(content)}")


def _message_of(content: bytes) -> str:
    try:
        return _message(json.loads(content))
    except ValueError:
        return content[:80].decode("utf-8", "replace")


def _message(body: Any) -> str:
    """OpenAI's error object, or what comes nearest to it."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
