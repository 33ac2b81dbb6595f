"""Looking into the engine over HTTP: why a prompt is, or is not, found in the prefix cache."""

import functools
import json
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from paxpage.server.async_engine import Prepared, StepEngine
from paxpage.server.chat import prepare_chat
from paxpage.server.completions import prepare_completion
from paxpage.server.generation import ServerContext, refusal
from paxpage.server.http import read_json_body
from paxpage.server.protocol import ChatCompletionRequest, CompletionRequest, parse_body


async def explain_cache(context: ServerContext, http_request: Request) -> Response:
    """Takes what /v1/completions or, with "messages", /v1/chat/completions takes, and answers without generating.

    {"prompts": [{"num_tokens": ..., "num_blocks_hit": ..., "blocks": [{"place": 0, "verdict": "hit", "block_id": 7,
    "first_difference": null}, ...]}, ...]}, one entry for each full block; see LLM.explain_cache for the verdicts.
    """
    body = await read_json_body(http_request)
    prepared = await context.async_engine.prepare(functools.partial(_prepare, context, body), len(body))
    return JSONResponse({"prompts": await context.async_engine.call(functools.partial(_explain_all, prepared))})


def _prepare(context: ServerContext, body: bytes) -> list[Prepared]:
    is_chat = _has_messages(body)
    request = parse_body(ChatCompletionRequest, body) if is_chat else parse_body(CompletionRequest, body)
    try:
        if isinstance(request, ChatCompletionRequest):
            return prepare_chat(context, request, "explain")
        return prepare_completion(context, request, "explain")
    except ValueError as error:
        raise refusal(error, request) from None


def _has_messages(body: bytes) -> bool:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # parse_body says what is wrong
        return False
    return isinstance(fields, dict) and "messages" in fields


def _explain_all(prepared: list[Prepared], engine: StepEngine) -> list[dict[str, Any]]:
    return [_explain(item, engine) for item in prepared]


def _explain(prepared: Prepared, engine: StepEngine) -> dict[str, Any]:
    reports = engine.explain_cache(prepared)
    return {
        "num_tokens": len(prepared.prompt_token_ids),
        "num_blocks_hit": sum(report.verdict == "hit" for report in reports),
        "blocks": [report._asdict() for report in reports],
    }
