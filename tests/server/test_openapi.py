"""The API's own description, and what schemathesis makes of it against a real server."""

import asyncio
import copy
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.failures import FailureGroup
from starlette.routing import Route

from paxpage.server.openapi import OPERATIONS, Operation, describe_api
from tests.server.conftest import PARROT_KEY
from tests.server.process import ServerProcess
from tests.server.test_app import site

KEY_HEADER = {"Authorization": f"Bearer {PARROT_KEY}"}
MAX_TOKENS, MAX_SAMPLES = 8, 3  # what random requests may really cost
NUM_EXAMPLES = int(os.environ.get("PAXPAGE_FUZZ_EXAMPLES", "40"))
CHECK_NAMES = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance"),
    *("response_schema_conformance", "ignored_auth", "unsupported_method"),
)
PATHS = [(operation.path, operation.method) for operation in OPERATIONS]


def test_the_description_has_every_route_and_no_other() -> None:
    async def check() -> None:
        async with site() as s:
            app = s.client._transport.app  # type: ignore[attr-defined]
            routes = [route for route in app.routes if isinstance(route, Route)]
            known = {(route.path.replace(":path", ""), (route.methods - {"HEAD"}).pop().lower()) for route in routes}
            paths = (await s.client.get("/openapi.json")).json()["paths"]
            assert {(path, method) for path, methods in paths.items() for method in methods} == known == set(PATHS)

    asyncio.run(check())


def test_every_reference_leads_somewhere() -> None:
    description = describe_api("1", False)

    def references(node: Any) -> Iterator[str]:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if key == "$ref":
                yield value
            elif isinstance(value, (dict, list)):
                yield from references(value)

    names = {reference.removeprefix("#/components/schemas/") for reference in references(description)}
    assert names <= set(description["components"]["schemas"]) and "ChatCompletionRequest" in names


@pytest.fixture(scope="module")
def described(shared_parrot: ServerProcess) -> Any:
    return schemathesis.openapi.from_url(f"{shared_parrot.url}/openapi.json", headers=KEY_HEADER)


def bound(body: Any) -> None:
    """Makes a request that is accepted a cheap one; what is refused stays what it is."""
    if isinstance(body, dict):
        for field, limit in (("max_tokens", MAX_TOKENS), ("max_completion_tokens", MAX_TOKENS), ("n", MAX_SAMPLES)):
            if isinstance(body.get(field), int) and limit < body[field] <= 8192:
                body[field] = limit
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            body["max_tokens"] = MAX_TOKENS


@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        pytest.param(operation, mode, id=f"{operation.path}-{mode.value}")
        for operation in OPERATIONS
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or operation.requests or "{" in operation.path
    ],
)
def test_schemathesis_finds_no_fault(
    described: Any, parrot: ServerProcess, operation: Operation, mode: GenerationMode
) -> None:
    statuses = set()
    with requests.Session() as session:
        options = {"session": session, "checks": CHECKS.get_by_names(CHECK_NAMES), "timeout": 30}

        @settings(
            max_examples=NUM_EXAMPLES if operation.requests else 2,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=described[operation.path][operation.method].as_strategy(mode))
        def check(case: Any) -> None:
            bound(case.body)
            statuses.add(case.call_and_validate(headers=KEY_HEADER, **options).status_code)

        check()
    assert statuses <= {200, 400, 401, 404}  # 401: it leaves the key out at times


def test_schemathesis_looks_into_answers_and_events(parrot: ServerProcess) -> None:
    """A description that they do not meet is noticed, so that silence above says something."""
    for name, stream, said in (
        ("ChatCompletion", False, "no_such_field"),
        ("ChatChunk", True, "event violates schema"),
    ):
        description = copy.deepcopy(describe_api("1", True))
        description["components"]["schemas"][name]["required"].append("no_such_field")
        schema = schemathesis.openapi.from_dict(description)
        body = {"messages": [{"role": "user", "content": "E"}], "stream": stream}
        case = schema["/v1/chat/completions"]["post"].Case(body=body, media_type="application/json")
        checks = CHECKS.get_by_names(CHECK_NAMES)
        with pytest.raises(FailureGroup) as raised:
            case.call_and_validate(base_url=parrot.url, headers=KEY_HEADER, checks=checks)
        assert any(said in str(error) for error in raised.value.exceptions)


def test_the_description_is_behind_the_key(parrot: ServerProcess) -> None:
    assert parrot.client.get("/openapi.json").json()["components"]["securitySchemes"]
    assert httpx.get(f"{parrot.url}/openapi.json").status_code == 401
