"""The API's description in OpenAPI's words, made from the requests that are parsed and the answers that are given."""

import functools
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from paxpage.server.http import EVENT_HEADERS, JSON_TYPE
from paxpage.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from paxpage.server.responses import (
    CacheReport,
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorAnswer,
    ModelCard,
    ModelList,
    Tokenized,
    Version,
)

DONE_DATA = "[DONE]"
REF = "#/components/schemas/{model}"
KEY_SCHEME = {"type": "http", "scheme": "bearer", "description": "the API key, where the server has one"}

Model = type[BaseModel]


class Operation(NamedTuple):
    """One route. requests: the bodies it takes, any of them. answer: a model, or the type of another content.

    chunk: what each event of its stream holds, where there is one.
    """

    path: str
    method: str
    summary: str
    requests: tuple[Model, ...] = ()
    answer: Model | str | None = None
    chunk: Model | None = None


OPERATIONS = (
    Operation("/v1/completions", "post", "Completes prompts", (CompletionRequest,), Completion, Completion),
    Operation(
        "/v1/chat/completions", "post", "Answers a conversation", (ChatCompletionRequest,), ChatCompletion, ChatChunk
    ),
    Operation("/v1/models", "get", "The model, under each of its names", (), ModelList),
    Operation("/v1/models/{model_name}", "get", "The model of that name", (), ModelCard),
    Operation("/tokenize", "post", "The token ids of a text or a conversation", (TokenizeRequest,), Tokenized),
    Operation("/detokenize", "post", "The text of token ids", (DetokenizeRequest,), Detokenized),
    Operation(
        "/debug/explain_cache",
        "post",
        "Why a prompt is, or is not, found in the prefix cache",
        (CompletionRequest, ChatCompletionRequest),
        CacheReport,
    ),
    Operation("/health", "get", "200 while the engine lives, else 503; needs no key"),
    Operation("/version", "get", "The version of paxpage", (), Version),
    Operation("/metrics", "get", "Figures for Prometheus", (), CONTENT_TYPE_LATEST),
    Operation("/openapi.json", "get", "This description", (), JSON_TYPE),
)


@functools.cache
def describe_api(version: str, has_key: bool) -> dict[str, Any]:
    """The whole document, of OpenAPI 3.2, the first version that can describe streams of events."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, has_key)
    return {
        "openapi": "3.2.0",
        "info": {"title": "paxpage", "version": version, "description": "OpenAI's API, for one language model"},
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": {"key": KEY_SCHEME}},
    }


def _schemas() -> dict[str, Any]:
    requests: list[Any] = [(model, "validation") for operation in OPERATIONS for model in operation.requests]
    answers = [answer for operation in OPERATIONS for answer in (operation.answer, operation.chunk)]
    models: list[Any] = [(model, "serialization") for model in (*answers, ErrorAnswer) if isinstance(model, type)]
    _, definitions = models_json_schema(requests + models, ref_template=REF)
    return definitions["$defs"]


def _describe(operation: Operation, has_key: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": _describe_answer(operation), "default": _answer("An error", ErrorAnswer)},
    }
    if operation.path == "/health":
        described["responses"]["503"] = {"description": "The engine is dead"}
    elif has_key:
        described["security"] = [{"key": []}]
    if operation.requests:
        schemas = [_ref(model) for model in operation.requests]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        described["requestBody"] = {"required": True, "content": {JSON_TYPE: {"schema": schema}}}
    if "{model_name}" in operation.path:
        place = {"name": "model_name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        described["parameters"] = [place]
    return described


def _describe_answer(operation: Operation) -> dict[str, Any]:
    answer = _answer("The answer", operation.answer)
    if operation.chunk is not None:
        answer["content"][EVENT_HEADERS["Content-Type"].partition(";")[0]] = {
            "itemSchema": _describe_event(operation.chunk)
        }
    return answer


def _describe_event(chunk: Model) -> dict[str, Any]:
    """A chunk, or an error, as JSON; the last event is no JSON."""
    schema = {"anyOf": [_ref(chunk), _ref(ErrorAnswer)]}
    data = [{"const": DONE_DATA}, {"type": "string", "contentMediaType": JSON_TYPE, "contentSchema": schema}]
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": data}}}


def _answer(description: str, content: Model | str | None) -> dict[str, Any]:
    if content is None:
        return {"description": description}
    if isinstance(content, str):
        kind = {"type": "object" if content == JSON_TYPE else "string"}
        return {"description": description, "content": {content.partition(";")[0]: {"schema": kind}}}
    return {"description": description, "content": {JSON_TYPE: {"schema": _ref(content)}}}


def _ref(model: Model) -> dict[str, str]:
    return {"$ref": REF.format(model=model.__name__)}
