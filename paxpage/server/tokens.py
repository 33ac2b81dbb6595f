"""/tokenize and /detokenize."""

import functools
from collections.abc import Callable

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from paxpage.config import require
from paxpage.prompts import encode_plain, encode_text, render_chat
from paxpage.server.errors import from_value_error
from paxpage.server.generation import ServerContext
from paxpage.server.http import JSON_TYPE, read_json_body
from paxpage.server.protocol import DetokenizeRequest, TokenizeRequest, parse_body
from paxpage.server.responses import Detokenized, ResponseModel, Tokenized


async def tokenize(context: ServerContext, http_request: Request) -> Response:
    """The token ids that a prompt, or a conversation, is for the model."""
    return await _answer(context, http_request, TokenizeRequest, token_ids_of)


async def detokenize(context: ServerContext, http_request: Request) -> Response:
    """The text of token ids, special tokens included."""
    return await _answer(context, http_request, DetokenizeRequest, text_of)


async def _answer[RequestT: BaseModel](
    context: ServerContext,
    http_request: Request,
    kind: type[RequestT],
    work: Callable[[ServerContext, RequestT], ResponseModel],
) -> Response:
    body = await read_json_body(http_request)
    request = parse_body(kind, body)
    try:
        answer = await context.async_engine.prepare(functools.partial(work, context, request), len(body))
    except ValueError as error:
        raise from_value_error(error, kind.model_fields) from None
    return Response(answer.to_json(), media_type=JSON_TYPE)


def token_ids_of(context: ServerContext, request: TokenizeRequest) -> Tokenized:
    """What /tokenize answers. ValueError for what cannot be tokenised, ApiError 404 for another model's name."""
    context.check_model(request.model)
    tokenizer = context.tokenizer
    require(tokenizer is not None, "model", context.model_name, "a model with a tokenizer, for texts")
    if request.messages is not None:
        token_ids = render_chat(
            tokenizer,
            [message.for_template() for message in request.messages],
            add_generation_prompt=request.has_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            chat_template=context.chat_template,
            tools=request.tools or None,
        )
    elif request.add_special_tokens is False:
        token_ids = encode_plain(tokenizer, "prompt", request.prompt or "")
    else:
        token_ids = encode_text(tokenizer, request.prompt or "")
    more = {"token_strs": tokenizer.convert_ids_to_tokens(token_ids)} if request.return_token_strs else {}
    return Tokenized(count=len(token_ids), max_model_len=context.max_model_len, tokens=token_ids, **more)


def text_of(context: ServerContext, request: DetokenizeRequest) -> Detokenized:
    """What /detokenize answers. ValueError for ids outside the vocabulary, ApiError 404 for another model's name."""
    context.check_model(request.model)
    require(context.tokenizer is not None, "model", context.model_name, "a model with a tokenizer")
    size = len(context.tokenizer)
    for token_id in request.tokens:
        require(0 <= token_id < size, "tokens", token_id, f"ids from 0 to {size - 1}")
    return Detokenized(prompt=context.logprobs.text(request.tokens, skip_special_tokens=False))
