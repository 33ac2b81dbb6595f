"""What clients send: the requests of the OpenAI API, checked strictly. A field not listed here is refused by name."""

import dataclasses
import math
import reprlib
from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pydantic
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationError,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from paxpage.config import require
from paxpage.engine.sampling_params import ALL_LOGPROBS, SamplingParams
from paxpage.engine.structured_outputs import KINDS, StructuredOutputsParams
from paxpage.server.errors import ApiError

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens"),
    *("min_tokens", "include_stop_str_in_output", "skip_special_tokens", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs"),
)
MAX_REQUEST_ID_LENGTH = 128
REQUEST_ID_PATTERN = "^[!-~]([ -~]*[!-~])?$"  # what a header may hold
MAX_ID_DIGITS = 11
MAX_CACHE_SALT_LENGTH = 256
MAX_PROMPTS = 4096  # of one request
MAX_CHOICES = 16_384  # of one answer: prompts times n

Prompts = list[str] | list[list[int]]
Messages = list[dict[str, str]]


class _Only:
    """Accepts null and the neutral values that clients send for an option that is not supported yet."""

    def __init__(self, *allowed: object):
        self._allowed = allowed
        self._text = ", ".join(["null", *(repr(value) for value in allowed)])

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, *self._allowed]}

    def _check(self, value: object) -> object:
        is_same = any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in self._allowed)
        if value is None or is_same:
            return value
        raise ValueError(f"is {reprlib.repr(value)}; this option is not supported yet, allowed: {self._text}")


def only(*allowed: object) -> _Only:
    """Accepts null and these neutral values of an option that is not supported yet."""
    return _Only(*allowed)


def _refuse(value: object, allowed: str) -> ValueError:
    return ValueError(f"is {reprlib.repr(value)}; allowed: {allowed}")


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def parse_prompts(value: Any) -> Prompts:
    """One prompt or several, as text or as token ids, always given back as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if _are_token_ids(value):
        return [value]
    is_list = isinstance(value, list) and bool(value)
    if is_list and len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts; allowed: at most {MAX_PROMPTS}")
    if is_list and (all(isinstance(item, str) for item in value) or all(_are_token_ids(item) for item in value)):
        return value
    raise _refuse(value, "a string, a list of strings, a list of token ids, or a list of non-empty lists of token ids")


def parse_stop(value: Any) -> str | list[str] | None:
    """Null, a string or a list of strings."""
    is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if value is None or isinstance(value, str) or is_list:
        return value
    raise _refuse(value, "a string or a list of strings")


def parse_content(value: Any) -> str:
    """A message's text: a string, or a list of text parts, which is the same as their texts joined."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        return "".join(_part_text(part) for part in value)
    raise _refuse(value, 'a string or a non-empty list of {"type": "text", "text": ...} parts')


def _part_text(part: Any) -> str:
    is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    if not is_text or set(part) != {"type", "text"}:
        raise ValueError(f'has the part {reprlib.repr(part)}; allowed: {{"type": "text", "text": ...}}')
    return part["text"]


def parse_logit_bias(value: Any) -> dict[int, float] | None:
    """Null, or {token id: bias}: JSON spells the ids as strings."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _refuse(value, 'an object of token ids and numbers, as {"50256": -100}')
    return {_token_id_of(key): _bias_of(key, number) for key, number in value.items()}


def _token_id_of(key: Any) -> int:
    if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < MAX_ID_DIGITS):
        raise ValueError(f"has the key {reprlib.repr(key)}; allowed: token ids, as in {{'50256': -100}}")
    return int(key)


def _bias_of(key: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"has {reprlib.repr(value)} for {key}; allowed: a number from -100 to 100")
    return value


def parse_bad_words(value: Any) -> list[Any] | None:
    """Null, or a list of strings and of lists of token ids."""
    is_list = isinstance(value, list) and all(isinstance(item, str) or _are_token_ids(item) for item in value)
    if value is None or is_list:
        return value
    raise _refuse(value, "a list of strings, or of non-empty lists of token ids")


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """Null, or a list of {"type": "function", "function": {"name": ...}}."""
    if value is None or (isinstance(value, list) and all(_is_tool(item) for item in value)):
        return value
    raise _refuse(value, 'a list of {"type": "function", "function": {"name": ..., ...}}')


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return is_named and value.get("type") == "function"


def parse_tool_choice(value: Any) -> str | dict[str, Any] | None:
    """Null, "none", "auto", "required", or {"type": "function", "function": {"name": ...}}."""
    if value in (None, "none", "auto", "required") or (_is_tool(value) and set(value["function"]) == {"name"}):
        return value
    raise _refuse(value, 'none, auto, required or {"type": "function", "function": {"name": ...}}')


def parse_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """Null, or an object with one of json, regex, choice, grammar and json_object."""
    if value is None:
        return None
    if not isinstance(value, dict) or not set(value) <= set(KINDS):
        raise _refuse(value, f"an object with one of {', '.join(KINDS)}")
    return _structured(value)


RESPONSE_FORMATS = (
    '{"type": "text"}, {"type": "json_object"} or '
    '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}, "strict": ...}}'
)


def parse_response_format(value: Any) -> StructuredOutputsParams | None:
    """Null, or OpenAI's way of asking for JSON. A schema is always followed to the letter, strict or not."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or value == {"type": "text"}:
        return None
    if value == {"type": "json_object"}:
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema" or set(value) != {"type", "json_schema"}:
        raise _refuse(value, RESPONSE_FORMATS)
    return _structured({"json": _schema_of(value["json_schema"])})


def _schema_of(value: Any) -> dict[str, Any]:
    """The schema in a response_format's json_schema."""
    texts = ("name", "description")
    is_known = isinstance(value, dict) and set(value) <= {*texts, "schema", "strict"}
    is_named = is_known and all(value.get(field) is None or isinstance(value[field], str) for field in texts)
    is_valid = is_named and isinstance(value.get("schema"), dict) and type(value.get("strict")) in (bool, type(None))
    if not is_valid:
        raise ValueError(f"has the json_schema {reprlib.repr(value)}; allowed: {RESPONSE_FORMATS}")
    return value["schema"]


def _structured(fields: dict[str, Any]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**fields)
    except ValueError as error:
        raise ValueError(f"is refused: {error}") from None


# What the functions above accept, for the description of the API.


class TextPart(TypedDict):
    """One part of a message."""

    type: Literal["text"]
    text: str


class Function(TypedDict):
    """A function by its name, and what may be told of it."""

    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]


class FunctionTool(TypedDict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class OneOf(TypedDict):
    """One of these, that the answer must be."""

    json: NotRequired[dict[str, Any] | str]
    regex: NotRequired[str]
    choice: NotRequired[list[str]]
    grammar: NotRequired[str]
    json_object: NotRequired[bool]


class JsonSchema(TypedDict):
    """A schema, and what may be told of it."""

    name: NotRequired[str | None]
    description: NotRequired[str | None]
    schema: dict[str, Any]
    strict: NotRequired[bool | None]


class PlainFormat(TypedDict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(TypedDict):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


StructuredOutputs = Annotated[Any, PlainValidator(parse_structured_outputs, json_schema_input_type=OneOf | None)]
Format = PlainFormat | SchemaFormat | None
ResponseFormat = Annotated[Any, PlainValidator(parse_response_format, json_schema_input_type=Format)]
BadWords = Annotated[Any, PlainValidator(parse_bad_words, json_schema_input_type=list[str | list[int]] | None)]
Tools = Annotated[Any, PlainValidator(parse_tools, json_schema_input_type=list[FunctionTool] | None)]
Choice = Literal["none", "auto", "required"] | FunctionTool | None
ToolChoice = Annotated[Any, PlainValidator(parse_tool_choice, json_schema_input_type=Choice)]


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = STRICT

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None
    continuous_usage_stats: Annotated[Any, only(False)] = None


class GenerationRequest(BaseModel):
    """What completions and chat completions have in common. Null means: the default.

    Fields typed with only(...) are options that are not supported yet; their neutral values are accepted.
    """

    model_config = STRICT

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[Any, PlainValidator(parse_stop, json_schema_input_type=str | list[str] | None)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = None
    request_id: Annotated[str, Field(max_length=MAX_REQUEST_ID_LENGTH, pattern=REQUEST_ID_PATTERN)] | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_LENGTH)] | None = None

    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[Any, PlainValidator(parse_logit_bias, json_schema_input_type=dict[str, float] | None)] = None
    allowed_token_ids: list[int] | None = None
    bad_words: BadWords = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None

    structured_outputs: StructuredOutputs = None
    response_format: ResponseFormat = None
    best_of: int | None = None
    use_beam_search: Annotated[Any, only(False)] = None
    store: Annotated[Any, only(False)] = None
    metadata: Annotated[Any, only({})] = None
    service_tier: Annotated[Any, only("auto", "default")] = None

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> "GenerationRequest":
        num_samples = 1 if self.n is None else self.n
        require(self.best_of in (None, num_samples), "best_of", self.best_of, f"null or n ({num_samples})")
        has_unused_options = self.stream_options is not None and not self.stream
        require(not has_unused_options, "stream_options", "given", "only when stream is true")
        is_whole = self.prompt_logprobs is None or not self.stream
        require(is_whole, "prompt_logprobs", self.prompt_logprobs, "null when stream is true")
        require(self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", 0, "-1 or at least 1")
        is_one = self.structured_outputs is None or self.response_format is None
        require(is_one, "structured_outputs", "given", 'null beside a response_format other than {"type": "text"}')
        return self

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.stream)

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def prompt_field(self) -> str:
        """The client's name for what the engine calls the prompt."""
        return "prompt"

    @property
    def constraint_field(self) -> str:
        """The client's name for what the engine calls structured_outputs."""
        return "structured_outputs" if self.response_format is None else "response_format"

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens to report besides the chosen one; None for no log-probabilities."""
        raise NotImplementedError

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """The request's options over the server's defaults.

        Raises:
            ValueError: an option is out of its range.
        """
        given = {field: getattr(self, field) for field in SAMPLING_FIELDS if getattr(self, field) is not None}
        structured = self.structured_outputs or self.response_format
        return dataclasses.replace(defaults, logprobs=self.num_logprobs, structured_outputs=structured, **given)


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Annotated[Any, PlainValidator(parse_prompts, json_schema_input_type=Prompts | str | list[int])]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Annotated[Any, only("")] = None

    @pydantic.model_validator(mode="after")
    def _check_num_choices(self) -> "CompletionRequest":
        num_prompts = len(self.prompt)
        most = MAX_CHOICES // num_prompts
        require((self.n or 1) <= most, "n", self.n, f"at most {most} for {num_prompts} prompts")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """The logprobs field as it is."""
        return self.logprobs

    @property
    def is_echo(self) -> bool:
        """Whether the answer begins with the prompt."""
        return bool(self.echo)

    @property
    def is_scoring(self) -> bool:
        """Whether the prompt alone is wanted: echo with max_tokens 0. One token is sampled and not shown."""
        return self.is_echo and self.max_tokens == 0

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """As the base class's; an echo with log-probabilities wants those of the prompt too."""
        request = self.model_copy(update={"max_tokens": 1}) if self.is_scoring else self
        params = super(CompletionRequest, request).sampling_params(defaults)
        if not self.is_echo or self.logprobs is None:
            return params
        return dataclasses.replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))

    def check_limits(self, max_logprobs: int) -> None:
        """Raises ValueError when more log-probabilities are asked for than the server gives."""
        check_num_logprobs("logprobs", self.logprobs, max_logprobs)
        check_num_logprobs("prompt_logprobs", self.prompt_logprobs, max_logprobs)


def check_num_logprobs(field: str, value: int | None, max_logprobs: int) -> None:
    """Raises ValueError unless value is None or from 0 to max_logprobs (which -1 lets be all that there are)."""
    if max_logprobs == ALL_LOGPROBS:
        require(value is None or value >= ALL_LOGPROBS, field, value, "-1 (all tokens), 0 or more")
    else:
        require(value is None or 0 <= value <= max_logprobs, field, value, f"0 to {max_logprobs}")


class ChatMessage(BaseModel):
    """One turn of a conversation. Fields that clients copy from an earlier answer are accepted when they are empty."""

    model_config = STRICT

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    content: Annotated[str | None, Field(validate_default=True)] = None
    name: str | None = None
    refusal: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None
    audio: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None

    @pydantic.field_validator("tool_calls")
    @classmethod
    def _only_from_assistants(cls, value: Any, info: Any) -> Any:
        if value and info.data.get("role") != "assistant":
            raise _refuse(value, "only in an assistant's message")
        return value

    @pydantic.field_validator("tool_call_id")
    @classmethod
    def _only_from_tools(cls, value: Any, info: Any) -> Any:
        if value is not None and info.data.get("role") != "tool":
            raise _refuse(value, "only in a tool's message")
        return value

    @pydantic.field_validator("content", mode="plain", json_schema_input_type=str | list[TextPart] | None)
    @classmethod
    def _parse_content(cls, value: Any, info: Any) -> str | None:
        return None if value is None and info.data.get("tool_calls") else parse_content(value)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it; "developer" is OpenAI's newer word for "system"."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        more = {"name": self.name, "tool_calls": self.tool_calls or None, "tool_call_id": self.tool_call_id}
        return {**message, **{key: value for key, value in more.items() if value is not None}}


def opens_turn(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Whether an assistant turn is opened after the messages: unless told, when the last one is not continued."""
    return not continue_final_message if add_generation_prompt is None else add_generation_prompt


class ChatCompletionRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    tools: Tools = None
    echo: Annotated[Any, only(False)] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    reasoning_effort: Annotated[Any, only("none")] = None

    @pydantic.model_validator(mode="after")
    def _check_chat_fields(self) -> "ChatCompletionRequest":
        both = (self.max_tokens, self.max_completion_tokens)
        is_clear = None in both or both[0] == both[1]
        require(
            is_clear,
            "max_completion_tokens",
            self.max_completion_tokens,
            f"max_tokens ({self.max_tokens}) or one of the two",
        )
        is_some = self.max_completion_tokens is None or self.max_completion_tokens >= 1
        require(is_some, "max_completion_tokens", self.max_completion_tokens, "an integer >= 1")
        has_logprobs = self.top_logprobs is None or bool(self.logprobs)
        require(has_logprobs, "top_logprobs", self.top_logprobs, "null unless logprobs is true")
        is_exclusive = not (self.continue_final_message and self.add_generation_prompt)
        require(is_exclusive, "continue_final_message", True, "false unless add_generation_prompt is false")
        if self.forces_call:
            self._check_forced_call()
        return self

    def _check_forced_call(self) -> None:
        choice = self.tool_choice
        names = self.tool_names
        require(bool(names), "tool_choice", choice, "none or auto, when there are no tools")
        is_known = choice == "required" or choice["function"]["name"] in names
        require(is_known, "tool_choice", choice, f"one of the tools: {', '.join(names)}")
        for field in ("structured_outputs", "response_format"):
            require(getattr(self, field) is None, field, "given", "null when tool_choice forces a call")

    @property
    def prompt_field(self) -> str:
        """The messages, which the chat template makes a prompt of."""
        return "messages"

    @property
    def constraint_field(self) -> str:
        """As the base class's; a forced call is told by its tool."""
        return "tools" if self.forces_call else super().constraint_field

    @property
    def num_logprobs(self) -> int | None:
        """top_logprobs (0 when absent) if logprobs is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def has_generation_prompt(self) -> bool:
        """Whether the template opens an assistant turn after the messages."""
        return opens_turn(self.add_generation_prompt, self.continue_final_message)

    @property
    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of: none when it may not call any."""
        return None if self.tool_choice == "none" or not self.tools else self.tools

    @property
    def tool_names(self) -> list[str]:
        """The names of the tools that the model is told of."""
        return [tool["function"]["name"] for tool in self.tools_for_template or []]

    @property
    def forces_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def names_call(self) -> bool:
        """Whether the answer has to be one call of one tool."""
        return isinstance(self.tool_choice, dict)

    @property
    def max_calls(self) -> int | None:
        """How many calls there may be in an answer; None for any number."""
        return 1 if self.names_call or self.parallel_tool_calls is False else None

    def check_limits(self, max_logprobs: int) -> None:
        """Raises ValueError when more log-probabilities are asked for than the server gives."""
        check_num_logprobs("top_logprobs", self.top_logprobs, max_logprobs)
        check_num_logprobs("prompt_logprobs", self.prompt_logprobs, max_logprobs)

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """The request's options over the server's defaults; without a limit the rest of the context may be used."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return super().sampling_params(dataclasses.replace(defaults, max_tokens=limit))


class TokenizeRequest(BaseModel):
    """The body of /tokenize: a prompt, or messages and how the chat template is to close them."""

    model_config = STRICT

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools = None
    return_token_strs: bool | None = None

    @pydantic.model_validator(mode="after")
    def _check_kind(self) -> "TokenizeRequest":
        is_one = (self.prompt is None) != (self.messages is None)
        require(is_one, "prompt", self.prompt, "a string, or null beside messages")
        chat_fields = ("add_generation_prompt", "continue_final_message", "tools")
        for field in chat_fields if self.messages is None else ("add_special_tokens",):
            require(getattr(self, field) is None, field, getattr(self, field), "null here: it goes with the other form")
        is_exclusive = not (self.continue_final_message and self.add_generation_prompt)
        require(is_exclusive, "continue_final_message", True, "false unless add_generation_prompt is false")
        return self

    @property
    def has_generation_prompt(self) -> bool:
        """Whether the template opens an assistant turn after the messages."""
        return opens_turn(self.add_generation_prompt, self.continue_final_message)


class DetokenizeRequest(BaseModel):
    """The body of /detokenize."""

    model_config = STRICT

    model: str | None = None
    tokens: list[int]


def parse_body[RequestT: BaseModel](kind: type[RequestT], body: bytes) -> RequestT:
    """Reads a JSON body.

    Raises:
        ApiError: 400, with the first fault and the field it is in.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        message, param = _describe(error.errors(include_url=False)[0])
        raise ApiError(400, message, param) from None


def _describe(error: ErrorDetails) -> tuple[str, str | None]:
    """One sentence on a fault, and the path of the field it is in."""
    param = ".".join(str(part) for part in error["loc"]) or None
    if error["type"] == "json_invalid":
        return f"the body is not valid JSON: {error['ctx']['error']}", None
    if param is None:
        return _describe_whole(error)
    describe = DESCRIPTIONS.get(error["type"], _describe_other)
    return f"{param} {describe(error)}", param


def _describe_whole(error: ErrorDetails) -> tuple[str, str | None]:
    if error["type"] != "value_error":
        return "the body must be a JSON object", None
    message = str(error["ctx"]["error"])
    return message, message.partition(" ")[0]


def _describe_other(error: ErrorDetails) -> str:
    return f"is {_short(error['input'])}: {error['msg'].lower()}"


def _short(value: object) -> str:
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return reprlib.repr(value) if is_finite else "not a finite number"


DESCRIPTIONS: dict[str, Callable[[ErrorDetails], str]] = {
    "missing": lambda error: "is missing",
    "extra_forbidden": lambda error: "is not a supported field",
    "value_error": lambda error: str(error["ctx"]["error"]),
}
