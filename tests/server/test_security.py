"""What SECURITY.md promises, where no other test shows it (each promise there names its test)."""

import ast
import contextlib
import hmac
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paxpage.prompts import render_chat
from paxpage.server.app import ApiKeyGuard
from paxpage.server.launch import exposure_warning
from paxpage.server.openapi import OPERATIONS
from tests.server.process import ROOT, ServerProcess
from tests.server.tiny import make_tokenizer

SOURCES = sorted(path for folder in ("paxpage", "pallas_kernels", "scripts") for path in (ROOT / folder).rglob("*.py"))
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "yaml.load", "yaml.unsafe_load"}
FORBIDDEN_KEYWORDS = {"allow_pickle": True, "trust_remote_code": True, "shell": True, "weights_only": False}


def unsafe_in(tree: ast.AST) -> Iterator[str]:
    """What could run code that a file or a hub brings."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name for name in names if name.partition(".")[0] in UNSAFE_MODULES)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            yield from [called] if called in UNSAFE_CALLS else []
            for keyword in node.keywords:
                if keyword.arg in FORBIDDEN_KEYWORDS and not _is_harmless(keyword):
                    yield f"{keyword.arg}={ast.unparse(keyword.value)}"


def _is_harmless(keyword: ast.keyword) -> bool:
    is_constant = isinstance(keyword.value, ast.Constant)
    return is_constant and keyword.value.value != FORBIDDEN_KEYWORDS[keyword.arg or ""]  # type: ignore[attr-defined]


def test_nothing_is_unpickled_and_no_code_of_a_model_is_run() -> None:
    found = {str(path): list(unsafe_in(ast.parse(path.read_text(encoding="utf-8")))) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}
    assert len(found) > 50


@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "from pickle import loads", "import a, dill.x", "eval('1')", "os.system(x)"),
        *("np.load(f, allow_pickle=True)", "f(trust_remote_code=True)", "f(trust_remote_code=x)", "run(c, shell=True)"),
    ],
)
def test_what_could_run_code_is_seen(code: str) -> None:
    assert len(list(unsafe_in(ast.parse(code)))) == 1


def test_every_tokenizer_is_read_without_its_own_code() -> None:
    calls = [
        node
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_pretrained")
    ]
    assert calls and all("trust_remote_code=False" in ast.unparse(call) for call in calls)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(100000000) %}{% endfor %}",
    ],
)
def test_chat_templates_are_in_a_sandbox(template: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="messages do not fit the chat template"):
        render_chat(make_tokenizer(), messages, chat_template=template)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs", "documents", "mm_processor_kwargs"])
def test_a_request_brings_no_template(parrot: ServerProcess, field: str) -> None:
    body = {"messages": [{"role": "user", "content": "E"}], field: "{{ x }}"}
    refused = parrot.post("chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


@pytest.fixture
def stranger(parrot: ServerProcess) -> Iterator[httpx.Client]:
    """A client that has no key."""
    with httpx.Client(base_url=parrot.url) as client:
        yield client


@pytest.mark.parametrize("key", [None, "", "Bearer x", "Bearer key-of-parro", "Basic key-of-parrot", "key-of-parrot"])
def test_every_route_but_health_asks_for_the_key(stranger: httpx.Client, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": key}
    paths = [(operation.method, operation.path) for operation in OPERATIONS if operation.path != "/health"]
    for method, path in [*paths, ("get", "/"), ("get", "/health/"), ("get", "//health"), ("options", "/v1/models")]:
        response = stranger.request(method, path, headers=headers)
        assert (path, response.status_code) == (path, 401)
    assert stranger.get("/health", headers=headers).status_code == 200


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []

    def compare(first: Any, second: Any) -> bool:
        compared.append((first, second))
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    guard = ApiKeyGuard(lambda scope, receive, send: None, "key")  # type: ignore[arg-type, return-value]
    for given in (b"Bearer key", b"Bearer k", b""):
        assert not guard._is_allowed({"headers": [(b"authorization", given)]})
    assert compared == [(given, b"key") for given in (b"key", b"k", b"")]


@pytest.mark.parametrize(
    ("host", "api_key", "is_warned"),
    [
        ("127.0.0.1", None, False),
        ("localhost", None, False),
        ("::1", None, False),
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("192.0.2.7", None, True),
        ("example.org", None, True),
        ("0.0.0.0", "key", False),
    ],
)
def test_an_open_server_without_a_key_is_warned_of(host: str, api_key: str | None, is_warned: bool) -> None:
    assert bool(exposure_warning(host, api_key)) is is_warned


def test_a_form_of_another_site_is_refused(parrot: ServerProcess) -> None:
    """Browsers send these without asking first; no answer invites other sites either."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = parrot.client.post(
            "/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": kind, "Origin": "https://x.example"}
        )
        assert response.status_code == 415
    asked = parrot.client.options("/v1/completions", headers={"Origin": "https://x.example"})
    assert not any(name.startswith("access-control") for name in asked.headers)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
ENDLESS = {
    "a header": HEAD + b"X-A: ",
    "a path": b"GET /",
    "headers": HEAD,
    "trailers": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_is_no_body_has_an_end(parrot: ServerProcess, what: str) -> None:
    """Without a key, too: each piece of a long header costs the event loop a copy of all that there is of it."""
    piece = b"X-B: b\r\n" * 1000 if what in ("headers", "trailers") else b"a" * 10_000
    with socket.create_connection(("127.0.0.1", parrot.port), timeout=10) as connection:
        connection.sendall(ENDLESS[what])
        time.sleep(0.1)
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            while num_sent < 50 * len(piece):
                connection.sendall(piece)
                num_sent += len(piece)
                time.sleep(0.01)
        assert 60_000 < num_sent < 300_000


def test_long_heads_and_bodies_within_their_limits(parrot: ServerProcess) -> None:
    headers = {"X-A": "a" * 40_000}
    pieces = (b" " * 1000 for _ in range(500))
    for body in ({}, {"content": pieces, "headers": headers}, {"content": b" " * 500_000, "headers": headers}):
        response = parrot.client.request("POST", "/v1/completions", **body)
        assert response.status_code in (400, 415)
        assert parrot.client.get("/health", headers=headers).status_code == 200


def test_security_md_names_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", text)
    assert len(named) >= 12
    for file, test in named:
        assert f"def {test}(" in Path(ROOT / file).read_text(encoding="utf-8"), (file, test)
