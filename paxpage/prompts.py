"""Text and conversations -> token ids. The same two functions serve the offline engine and the server."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paxpage.config import require, require_unicode

ROLES = ("system", "developer", "user", "assistant", "tool")
CONTENT_FORMS = 'a string or a list of {"type": "text", "text": ...} parts'


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain text, with the special tokens that the tokenizer adds of its own accord.

    A text that begins with the beginning-of-sequence token already (a rendered chat template, say) gets no second one;
    otherwise nothing is taken away. tokenizer: a transformers.PreTrainedTokenizerBase. Raises ValueError for a text
    that is not valid Unicode.
    """
    require_unicode("prompt", text)
    token_ids = list(tokenizer.encode(text))
    bos = tokenizer.bos_token
    if bos and text.startswith(bos):
        plain_ids = list(tokenizer.encode(text, add_special_tokens=False))
        is_doubled = token_ids[:1] == plain_ids[:1] == [tokenizer.bos_token_id]
        if is_doubled and token_ids[1 : 1 + len(plain_ids)] == plain_ids:
            return token_ids[1:]
    return token_ids


def encode_plain(tokenizer: Any, field: str, text: str) -> list[int]:
    """Token ids of a text and nothing else. Raises ValueError naming field for a text that is not valid Unicode."""
    require_unicode(field, text)
    return list(tokenizer.encode(text, add_special_tokens=False))


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    check_text: Callable[[str], None] | None = None,
) -> list[int]:
    """Token ids of a conversation: those of transformers' apply_chat_template(tokenize=True), nothing added.

    messages: each has a role and a content, text or a list of text parts (which count as their texts joined); further
    keys go to the template as they are. A conversation that ends in an assistant's message is closed there, and a new
    assistant's message begun after it; with continue_final_message (and add_generation_prompt False) that last message
    is left open and continued. chat_template replaces the tokenizer's own. tools: descriptions of functions, in
    OpenAI's form, that the template may show to the model. An assistant's message with tool_calls may have no content;
    arguments that are JSON in a string reach the template as what they mean. check_text: called with what the template
    makes of them, before that is tokenised. Raises ValueError for messages of another form, no template, and whatever
    the template itself or check_text refuses.
    """
    require(bool(messages) and not isinstance(messages, str), "messages", messages, "a list of at least one message")
    both = "False when continue_final_message is True"
    require(not (add_generation_prompt and continue_final_message), "add_generation_prompt", True, both)
    has_template = bool(chat_template or getattr(tokenizer, "chat_template", None))
    require(has_template, "chat_template", None, "a Jinja template, since the model's tokenizer has none of its own")
    conversation = [_flatten(index, message) for index, message in enumerate(messages)]
    try:
        text = tokenizer.apply_chat_template(
            conversation,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=None if tools is None else list(tools),
        )
    except Exception as error:  # a template is a program: it fails in any way, and always over these messages
        raise ValueError(f"messages do not fit the chat template: {error}") from error
    if check_text is not None:
        check_text(text)
    return encode_plain(tokenizer, "messages", text)


def _flatten(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its content as one string."""
    field = f"messages[{index}]"
    require(isinstance(message, Mapping), field, message, "an object with role and content")
    require(message.get("role") in ROLES, f"{field}.role", message.get("role"), ", ".join(ROLES))
    content, calls = message.get("content"), message.get("tool_calls")
    if not calls:
        return {**message, "content": _text(f"{field}.content", content)}
    text = "" if content is None else _text(f"{field}.content", content)
    return {**message, "content": text, "tool_calls": [_read_arguments(field, call) for call in calls]}


def _read_arguments(field: str, call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    allowed = '{"function": {"name": ..., "arguments": ...}}, the arguments an object or its JSON'
    require(
        isinstance(function, Mapping) and isinstance(function.get("name"), str), f"{field}.tool_calls", call, allowed
    )
    assert isinstance(function, Mapping)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    require(isinstance(arguments, Mapping), f"{field}.tool_calls", call, allowed)
    return {**call, "function": {**function, "arguments": arguments}}


def _text(field: str, content: object) -> str:
    if isinstance(content, (list, tuple)):
        return "".join(_part(f"{field}[{index}]", part) for index, part in enumerate(content))
    require(isinstance(content, str), field, content, CONTENT_FORMS)
    text = str(content)
    require_unicode(field, text)
    return text


def _part(field: str, part: object) -> str:
    is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
    require(is_text, field, part, '{"type": "text", "text": ...}')
    return _text(field, part["text"]) if isinstance(part, Mapping) else ""
