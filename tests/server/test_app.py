"""Routes, errors and the engine thread, in one process with a scripted engine."""

import asyncio
import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import paxpage
from paxpage.server.app import create_app
from paxpage.server.async_engine import AsyncEngine
from paxpage.server.generation import ServerContext, sampling_defaults
from paxpage.server.http import MAX_BODY_BYTES
from paxpage.server.logprobs import LogprobFormatter
from paxpage.server.metrics import Metrics
from paxpage.server.token_bytes import TokenBytes
from tests.server.scripted_engine import ALPHABET, ScriptedEngine
from tests.server.tiny import make_tokenizer

COMPLETIONS = "/v1/completions"
PROMPT = {"prompt": "hi", "max_tokens": 3}


class Site:
    """A running application and a client of it."""

    def __init__(self, client: httpx.AsyncClient, engine: ScriptedEngine, async_engine: AsyncEngine, deaths: list[str]):
        self.client = client
        self.engine = engine
        self.async_engine = async_engine
        self.deaths = deaths

    async def post(self, body: Any, path: str = COMPLETIONS) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def wait_until(self, is_true: Any) -> None:
        async with asyncio.timeout(5):
            while not is_true():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def site(
    engine: ScriptedEngine | None = None,
    *,
    api_key: str | None = None,
    tokenizer: Any = None,
    other_names: tuple[str, ...] = (),
    **limits: Any,
) -> AsyncIterator[Site]:
    engine = engine or ScriptedEngine()
    deaths: list[str] = []
    metrics = Metrics("m", 64, has_prefix_cache=False)
    async_engine = AsyncEngine(engine, metrics, on_dead=lambda: deaths.append("dead"), **{"max_num_seqs": 4, **limits})
    context = ServerContext(
        engine=engine,
        async_engine=async_engine,
        tokenizer=tokenizer,
        logprobs=LogprobFormatter(TokenBytes(None)),
        model_name="m",
        max_model_len=64,
        max_logprobs=20,
        defaults=sampling_defaults(None),
        has_priorities=False,
        chat_template=None,
        created_s=1,
        other_names=other_names,
    )
    app = create_app(context, api_key=api_key)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        yield Site(client, engine, async_engine, deaths)
        engine.hold.set()


def events(text: str) -> list[Any]:
    """The data of a stream's events; checks that each is one line and a blank one."""
    parts = text.split("\n\n")
    assert parts[-1] == "" and all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    return [part if part == "data: [DONE]" else json.loads(part[6:]) for part in parts[:-1]]


def run(coroutine: Any) -> None:
    asyncio.run(coroutine)


def test_whole_and_streamed_answers() -> None:
    async def check() -> None:
        async with site() as s:
            whole = (await s.post(PROMPT)).json()
            assert whole["choices"][0]["text"] == "abc"
            response = await s.post({**PROMPT, "stream": True})
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            *chunks, end = events(response.text)
            assert end == "data: [DONE]"
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
        assert s.engine.is_closed

    run(check())


def test_long_texts_hold_up_only_their_like() -> None:
    async def check() -> None:
        async with site() as s:
            gate, begun = threading.Event(), []

            def work(name: str) -> None:
                begun.append(name)
                assert gate.wait(5)

            sizes = {"long": 2**17, "longer": 2**24}
            waiting = [
                asyncio.create_task(s.async_engine.prepare(functools.partial(work, name), num_bytes))
                for name, num_bytes in sizes.items()
                for _ in range(3)
            ]
            await s.wait_until(lambda: len(begun) == 2)
            assert (await s.post(PROMPT)).status_code == 200
            assert sorted(begun) == sorted(sizes)
            gate.set()
            await asyncio.gather(*waiting)

    run(check())


def test_bodies_are_sorted_by_their_size() -> None:
    async def check() -> None:
        async with site(tokenizer=make_tokenizer()) as s:
            gate = threading.Event()
            waiting = asyncio.create_task(s.async_engine.prepare(lambda: gate.wait(5), 2**17))
            long = asyncio.create_task(s.post({"prompt": "x" * 2**17}))
            assert (await s.post({"prompt": "xyz"}, "/tokenize")).status_code == 200
            assert (await s.post({"prompt": "x" * 2**20}, "/tokenize")).status_code == 200
            assert not long.done()
            gate.set()
            assert (await long).status_code == 400 and await waiting

    run(check())


def test_a_list_of_prompts_with_n_has_every_choice_once() -> None:
    async def check() -> None:
        async with site() as s:
            body = {"prompt": ["hi", "ho"], "n": 2, "max_tokens": 2}
            whole = (await s.post(body)).json()
            assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "ab"), (1, "bc"), (2, "ab"), (3, "bc")]
            streamed = {}
            for chunk in events((await s.post({**body, "stream": True})).text)[:-1]:
                choice = chunk["choices"][0]
                streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
            assert streamed == {0: "ab", 1: "bc", 2: "ab", 3: "bc"}

    run(check())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "x" * 51}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "seed": 2**63}, 400, "seed"),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        ({"prompt": "a", "logprobs": -1}, 400, "logprobs"),
        ({"prompt": "a", "priority": 1}, 400, "priority"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
        ({"prompt": "a", "nonsense": 1}, 400, "nonsense"),
    ],
)
def test_a_bad_request_is_an_error_status_in_either_mode(
    body: dict[str, Any], status: int, param: str, stream: bool
) -> None:
    async def check() -> None:
        async with site() as s:
            response = await s.post({**body, "stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (status, status, param)
            assert error["type"] == {400: "BadRequestError", 404: "NotFoundError"}[status]
            assert s.engine.num_steps == 0

    run(check())


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status"),
    [
        ("POST", COMPLETIONS, {}, b"{}", 415),
        ("POST", COMPLETIONS, {"Content-Type": "text/plain"}, b"{}", 415),
        ("POST", COMPLETIONS, {"Content-Type": "application/json"}, b"", 400),
        ("POST", COMPLETIONS, {"Content-Type": "application/json"}, b" " * (MAX_BODY_BYTES + 1), 413),
        ("GET", COMPLETIONS, {}, b"", 405),
        ("POST", "/health", {}, b"", 405),
        ("GET", "/v1/nothing", {}, b"", 404),
        ("GET", "/v1/models/other", {}, b"", 404),
    ],
)
def test_http_faults_have_the_api_s_error_body(
    method: str, path: str, headers: dict[str, str], content: bytes, status: int
) -> None:
    async def check() -> None:
        async with site() as s:
            response = await s.client.request(method, path, headers=headers, content=content)
            assert response.status_code == status
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert response.json()["error"]["code"] == status

    run(check())


def test_a_body_without_a_length_is_limited_too() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 2**20 + 2):
            yield b" " * 2**20

    async def check() -> None:
        async with site() as s:
            headers = {"Content-Type": "application/json; charset=utf-8"}
            response = await s.client.post(COMPLETIONS, content=endless(), headers=headers)
            assert response.status_code == 413

    run(check())


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def test_chat_is_answered_whole_and_streamed() -> None:
    async def check() -> None:
        async with site(tokenizer=make_tokenizer()) as s:
            whole = (await s.post({**CHAT, "n": 2}, "/v1/chat/completions")).json()
            assert [choice["message"]["content"] for choice in whole["choices"]] == ["ab", "bc"]
            *chunks, end = events((await s.post({**CHAT, "stream": True}, "/v1/chat/completions")).text)
            assert end == "data: [DONE]"
            first, *deltas, last = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert (first, last) == ({"role": "assistant", "content": ""}, {})
            assert "".join(delta["content"] for delta in deltas) == "ab"  # one chunk or two

    run(check())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_chat_without_a_template_is_400(has_tokenizer: bool, stream: bool) -> None:
    async def check() -> None:
        tokenizer = make_tokenizer(has_template=False) if has_tokenizer else None
        async with site(tokenizer=tokenizer) as s:
            response = await s.post({**CHAT, "stream": stream}, "/v1/chat/completions")
            assert response.status_code == 400
            assert "template" in response.json()["error"]["message"]

    run(check())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/debug/explain_cache"])
def test_what_is_wrong_with_a_chat_is_named_as_the_client_names_it(path: str) -> None:
    async def check() -> None:
        async with site(tokenizer=make_tokenizer()) as s:
            for fields, param in (
                ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages"),
                ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
                ({"max_tokens": 0}, "max_tokens"),
            ):
                response = await s.post({**CHAT, **fields}, path)
                assert (response.status_code, response.json()["error"]["param"]) == (400, param)

    run(check())


def test_tools_are_refused_where_no_calls_are_parsed() -> None:
    async def check() -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        async with site(tokenizer=make_tokenizer()) as s:
            for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"stream": True}):
                error = (await s.post({**CHAT, "tools": tools, **fields}, "/v1/chat/completions")).json()["error"]
                assert (error["code"], error["param"]) == (400, "tools") and "tool_call_parser" in error["message"]
            answer = await s.post({**CHAT, "tools": tools, "tool_choice": "none"}, "/v1/chat/completions")
            assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "ab"}

    run(check())


def test_models_version_health_and_metrics() -> None:
    async def check() -> None:
        async with site() as s:
            models = (await s.client.get("/v1/models")).json()
            card = {"id": "m", "object": "model", "created": 1, "owned_by": "paxpage", "max_model_len": 64}
            assert models == {"object": "list", "data": [card]}
            assert (await s.client.get("/v1/models/m")).json() == card
            assert (await s.client.get("/version")).json() == {"version": paxpage.__version__}
            assert (await s.client.get("/openapi.json")).json()["info"]["version"] == paxpage.__version__
            assert (await s.client.get("/v1/models/other")).status_code == 404
            health = await s.client.get("/health")
            assert (health.status_code, health.content) == (200, b"")
            await s.post(PROMPT)
            metrics = await s.client.get("/metrics")
            assert metrics.headers["content-type"].startswith("text/plain")
            assert 'paxpage:generation_tokens_total{model_name="m"} 3.0' in metrics.text
            assert 'paxpage:num_requests_running{model_name="m"} 0.0' in metrics.text

    run(check())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer nope"}, 401),
        ({"Authorization": "secret"}, 401),
        ({"Authorization": b"Bearer secr\xe9t"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"Authorization": "bearer secret"}, 200),
    ],
)
def test_an_api_key_guards_everything_but_health(headers: dict[str, Any], status: int) -> None:
    async def check() -> None:
        async with site(api_key="secret") as s:
            for path in ("/v1/models", "/metrics", "/version", "/tokenize", "/nothing"):
                response = await s.client.get(path, headers=headers)
                beyond = {"/tokenize": 405, "/nothing": 404}.get(path, 200)
                assert response.status_code == (beyond if status == 200 else 401)
                if status == 401:
                    assert response.json()["error"]["type"] == "AuthenticationError"
            assert (await s.client.get("/health", headers=headers)).status_code == 200

    run(check())


def test_a_model_with_several_names_answers_under_the_first() -> None:
    async def check() -> None:
        async with site(other_names=("second", "org/third")) as s:
            cards = (await s.client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in cards] == ["m", "second", "org/third"]
            for name in ("m", "second", "org/third"):
                assert (await s.client.get(f"/v1/models/{name}")).json()["id"] == name
                assert (await s.post({**PROMPT, "model": name})).json()["model"] == "m"
            refused = await s.post({**PROMPT, "model": "fourth"})
            assert refused.status_code == 404
            assert "'m' or 'second' or 'org/third'" in refused.json()["error"]["message"]

    run(check())


def test_texts_and_tokens_without_a_tokenizer() -> None:
    async def check() -> None:
        async with site() as s:
            for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
                response = await s.post(body, path)
                assert response.status_code == 400 and "tokenizer" in response.json()["error"]["message"]

    run(check())


def test_a_request_id_is_used_and_may_not_be_shared() -> None:
    async def check() -> None:
        async with site() as s:
            s.engine.hold.clear()
            first = asyncio.create_task(s.post({**PROMPT, "request_id": "mine"}))
            await s.wait_until(lambda: s.engine.is_holding)
            second = await s.post({**PROMPT, "request_id": "mine"})
            assert (second.status_code, second.json()["error"]["param"]) == (400, "request_id")
            s.engine.hold.set()
            assert (await first).json()["id"] == "cmpl-mine"
            assert (await s.post({**PROMPT, "request_id": "mine"})).status_code == 200

    run(check())


def test_a_fault_is_500_and_logged_under_the_request_s_id(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(ScriptedEngine):
        def prepare(self, *_: Any, **__: Any) -> Any:
            raise KeyError("a mistake of ours")

    async def check() -> None:
        async with site(Faulty()) as s:
            response = await s.client.post(COMPLETIONS, json=PROMPT, headers={"X-Request-Id": "mine"})
            assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
            assert response.json()["error"]["type"] == "InternalServerError"
            assert "mistake" not in response.text

    with caplog.at_level(logging.ERROR, logger="paxpage"):
        run(check())
    assert "request mine failed" in caplog.text and "a mistake of ours" in caplog.text


def test_a_full_queue_is_429_with_retry_after() -> None:
    async def check() -> None:
        async with site(max_num_seqs=1, max_num_queued_reqs=1) as s:
            s.engine.hold.clear()
            running = asyncio.create_task(s.post(PROMPT))
            await s.wait_until(lambda: s.engine.is_holding)
            queued = asyncio.create_task(s.post(PROMPT))
            await s.wait_until(lambda: s.async_engine._thread.num_pending_commands)
            refused = await s.post(PROMPT)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "RateLimitError"
            refused = await s.post({**PROMPT, "prompt": ["hi"] * 3})
            assert refused.status_code == 400 and "retry-after" not in refused.headers, "it would never have a place"
            assert (refused.json()["error"]["param"], "at most 2" in refused.text) == ("prompt", True)
            s.engine.hold.set()
            assert [(await task).status_code for task in (running, queued)] == [200, 200]
            assert 'admission_rejections_total{model_name="m"} 1.0' in (await s.client.get("/metrics")).text

    run(check())


def test_the_event_loop_answers_while_a_step_runs() -> None:
    async def check() -> None:
        async with site() as s:
            s.engine.hold.clear()
            task = asyncio.create_task(s.post(PROMPT))
            await s.wait_until(lambda: s.engine.is_holding)
            start_s = time.monotonic()
            assert (await s.client.get("/health")).status_code == 200
            assert time.monotonic() - start_s < 0.5
            s.engine.hold.set()
            assert (await task).status_code == 200

    run(check())


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_fails_every_request_and_health(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with site(ScriptedEngine(fail_at_step=3)) as s:
            response = await s.post({"prompt": "hi", "max_tokens": 9, "stream": stream})
            if stream:
                *chunks, error, end = events(response.text)
                assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
                assert (error["error"]["type"], end) == ("InternalServerError", "data: [DONE]")
            else:
                assert (response.status_code, response.json()["error"]["type"]) == (500, "InternalServerError")
            assert s.deaths == ["dead"]
            assert (await s.client.get("/health")).status_code == 503
            assert (await s.post(PROMPT)).status_code == 503
            assert (
                'request_success_total{finished_reason="error",model_name="m"} 1.0'
                in (await s.client.get("/metrics")).text
            )

    with caplog.at_level(logging.ERROR, logger="paxpage"):
        run(check())
    assert "the script says so" in caplog.text


def test_who_asks_about_the_cache_of_an_engine_that_dies_is_told() -> None:
    """The question waits for the step that fails; it is answered, not left hanging."""

    async def check() -> None:
        async with site(ScriptedEngine(fail_at_step=1)) as s:
            s.engine.hold.clear()
            answer = asyncio.create_task(s.post({"prompt": "hi", "max_tokens": 9}))
            await s.wait_until(lambda: s.engine.is_holding)
            question = asyncio.create_task(s.post({"prompt": "hi"}, "/debug/explain_cache"))
            await s.wait_until(lambda: s.async_engine._thread.num_pending_commands == 1)
            s.engine.hold.set()
            assert [(await answer).status_code, (await question).status_code] == [500, 503]

    run(check())


def test_stopping_ends_streams_with_abort_and_refuses_new_requests() -> None:
    async def check() -> None:
        async with site(ScriptedEngine(step_s=0.01)) as s:
            body = {"prompt": "hi", "max_tokens": 1000}
            stream = asyncio.create_task(s.post({**body, "stream": True}))
            whole = asyncio.create_task(s.post(body))
            await s.wait_until(lambda: s.engine.num_steps > 3)
            s.async_engine.refuse_new_requests()
            refused = await s.post(PROMPT)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            s.async_engine.abort_all()
            *_, last, end = events((await stream).text)
            assert (last["choices"][0]["finish_reason"], end) == ("abort", "data: [DONE]")
            choice = (await whole).json()["choices"][0]
            assert choice["finish_reason"] == "abort" and ALPHABET.startswith(choice["text"][:26]) and choice["text"]

    run(check())


def test_stopping_before_the_first_token_is_503() -> None:
    async def check() -> None:
        async with site() as s:
            s.engine.hold.clear()
            tasks = [asyncio.create_task(s.post(PROMPT))]
            await s.wait_until(lambda: s.engine.is_holding)
            tasks.append(asyncio.create_task(s.post(PROMPT)))
            await s.wait_until(lambda: s.async_engine._thread.num_pending_commands)
            s.async_engine.abort_all()
            s.engine.hold.set()
            responses = await asyncio.gather(*tasks)
            assert [response.status_code for response in responses] == [200, 503]

    run(check())


class Connection:
    """An ASGI connection by hand, to leave at a chosen moment."""

    def __init__(self, body: dict[str, Any]):
        self.sent: list[Any] = []
        self.is_gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def call(self, client: httpx.AsyncClient) -> "asyncio.Task[None]":
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers, "query_string": b""}
        return asyncio.create_task(client._transport.app(scope, self.receive, self.send))  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_requests(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with site(ScriptedEngine(step_s=0.01)) as s:
            connection = Connection({"prompt": ["hi", "ho"], "max_tokens": 10_000, "stream": stream, "request_id": "q"})
            task = connection.call(s.client)
            await s.wait_until(lambda: s.engine.num_steps > 2 and len(s.engine.requests) == 2)
            connection.is_gone.set()
            await task
            await s.wait_until(lambda: not s.engine.requests)
            assert sorted(s.engine.aborted) == ["cmpl-q-0", "cmpl-q-1"]
            num_sent = len(connection.sent)
            assert (await s.post(PROMPT)).json()["choices"][0]["text"] == "abc"
            assert len(connection.sent) == num_sent

    with caplog.at_level(logging.INFO, logger="paxpage"):
        run(check())
    assert "aborted cmpl-q-0, cmpl-q-1" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    async def check() -> None:
        async with site() as s:
            stuck = Connection({"prompt": "hi", "max_tokens": 200, "stream": True})
            is_open = asyncio.Event()
            send = stuck.send

            async def blocked_send(message: Any) -> None:
                await is_open.wait()
                await send(message)

            stuck.send = blocked_send  # type: ignore[method-assign]
            task = stuck.call(s.client)
            await s.wait_until(lambda: s.engine.num_steps >= 200)
            assert (await s.post(PROMPT)).status_code == 200
            is_open.set()
            await task
            text = b"".join(message.get("body", b"") for message in stuck.sent).decode()
            *chunks, end = events(text)
            assert end == "data: [DONE]"
            assert len("".join(chunk["choices"][0]["text"] for chunk in chunks)) == 200
            assert len(chunks) < 10  # what waited was sent together

    run(check())
