"""The checked command line, as the rest of the server sees it."""

import dataclasses

from paxpage.config import EngineConfig, require, require_int

API_KEY_VARIABLE = "PAXPAGE_API_KEY"


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The command line, checked. None means: not given."""

    engine: EngineConfig
    model: str | None
    tokenizer: str | None
    served_model_name: str | None
    generation_config: str
    chat_template: str | None
    max_num_queued_reqs: int | None
    host: str
    port: int
    api_key: str | None

    def __post_init__(self) -> None:
        require(self.generation_config in ("auto", "none"), "generation_config", self.generation_config, "auto, none")
        require_int("port", self.port, 0, 65535)
        if self.max_num_queued_reqs is not None:
            require_int("max_num_queued_reqs", self.max_num_queued_reqs, 0)
