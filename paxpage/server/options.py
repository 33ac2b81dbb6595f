"""The checked command line, as the rest of the server sees it."""

import dataclasses

from paxpage.config import EngineConfig, require, require_int

API_KEY_VARIABLE = "PAXPAGE_API_KEY"
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "none")
LOG_FORMATS = ("text", "json")
MAX_NUM_QUEUED_REQS = 4096
SHUTDOWN_TIMEOUT_S = 4
MAX_SHUTDOWN_TIMEOUT_S = 86_400


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The command line, checked. None means: not given."""

    engine: EngineConfig
    model: str | None
    tokenizer: str | None
    served_model_name: str | None
    generation_config: str
    chat_template: str | None
    tool_call_parser: str
    enable_auto_tool_choice: bool | None
    max_num_queued_reqs: int
    host: str
    port: int
    api_key: str | None
    log_format: str
    shutdown_timeout: int

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's names in the API, the first of them its name in answers; empty when none was given."""
        return tuple((self.served_model_name or "").split(",")) if self.served_model_name is not None else ()

    def __post_init__(self) -> None:
        is_named = all(name.strip() == name and name for name in self.served_names)
        require(is_named, "served_model_name", self.served_model_name, "a name, or several separated by commas")
        require(self.generation_config in ("auto", "none"), "generation_config", self.generation_config, "auto, none")
        parsers = ", ".join(TOOL_CALL_PARSERS)
        require(self.tool_call_parser in TOOL_CALL_PARSERS, "tool_call_parser", self.tool_call_parser, parsers)
        require(self.log_format in LOG_FORMATS, "log_format", self.log_format, ", ".join(LOG_FORMATS))
        key = self.api_key
        is_sendable = key is None or (key.isascii() and key.isprintable() and key.strip() == key != "")
        require(is_sendable, "api_key", "not shown", "printable ASCII characters, no space first or last, at least one")
        require_int("port", self.port, 0, 65535)
        require_int("shutdown_timeout", self.shutdown_timeout, 0, MAX_SHUTDOWN_TIMEOUT_S)
        require_int("max_num_queued_reqs", self.max_num_queued_reqs, 0)
