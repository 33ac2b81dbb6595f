"""What the server answers: OpenAI's objects. A field that was not set is left out of the JSON; None is null."""

from typing import Literal

from pydantic import BaseModel


class ResponseModel(BaseModel):
    """Base of all answers."""

    def to_json(self) -> str:
        """One line of JSON with the fields that were set."""
        return self.model_dump_json(exclude_unset=True)


class CachedTokens(ResponseModel):
    """How many of the prompt's tokens came from the prefix cache."""

    cached_tokens: int


class Usage(ResponseModel):
    """Token counts of a whole request, all its prompts and samples together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(ResponseModel):
    """Per token: where its text starts, its log-probability, its text, and the most likely tokens at its place.

    A prompt's first token, which nothing precedes, has no log-probabilities.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(ResponseModel):
    """A token at one place of a prompt; rank 1 is the most likely there."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; the prompt's own token comes first


class CompletionChoice(ResponseModel):
    """One sample of a completion, whole or (in a stream) what was added to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(ResponseModel):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(ResponseModel):
    """One candidate at one place of a chat answer. bytes are the UTF-8 bytes of token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """One token of a chat answer, with the most likely candidates at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """The tokens of a chat answer."""

    content: list[TokenLogprob]


class CalledFunction(ResponseModel):
    """What is called. arguments: a JSON object as text, or (in a stream) a piece of it."""

    name: str | None = None
    arguments: str


class ToolCallItem(ResponseModel):
    """One call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(ResponseModel):
    """What a chunk adds to a call: first its id and name, then its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class AssistantMessage(ResponseModel):
    """A whole chat answer. content is null when there are calls alone."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCallItem] | None = None


class ChatChoice(ResponseModel):
    """One sample of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Delta(ResponseModel):
    """What a chunk adds to a chat answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ResponseModel):
    """One sample's part of a chat chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(ResponseModel):
    """One chunk of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class Tokenized(ResponseModel):
    """The answer of /tokenize. max_model_len is in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(ResponseModel):
    """The answer of /detokenize."""

    prompt: str


class ModelCard(ResponseModel):
    """One model of /v1/models. max_model_len is in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(ResponseModel):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class BlockReport(ResponseModel):
    """One full block of a prompt in the prefix cache. See LLM.explain_cache for the verdicts."""

    place: int
    verdict: str
    block_id: int | None
    first_difference: int | None


class PromptReport(ResponseModel):
    """One prompt in the prefix cache."""

    num_tokens: int
    num_blocks_hit: int
    blocks: list[BlockReport]


class CacheReport(ResponseModel):
    """The answer of /debug/explain_cache."""

    prompts: list[PromptReport]


class Version(ResponseModel):
    """The answer of /version."""

    version: str


class ErrorDetails(ResponseModel):
    """What went wrong. param: the request's field at fault. code: the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(ResponseModel):
    """Any error."""

    error: ErrorDetails
