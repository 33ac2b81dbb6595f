"""Serving and sampling from transformer language models in JAX, with keys and values in a paged cache."""

import importlib
from typing import TYPE_CHECKING, Any

from paxpage.config import VERSION

if TYPE_CHECKING:
    from paxpage.config import EngineConfig, ModelConfig
    from paxpage.engine.llm import LLM
    from paxpage.engine.sampling_params import SamplingParams
    from paxpage.engine.structured_outputs import StructuredOutputsParams
    from paxpage.outputs import CompletionOutput, Logprob, RequestOutput

__version__ = VERSION
__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

# Loaded when first used: the command line answers --help without importing jax.
_HOMES = {
    "LLM": "paxpage.engine.llm",
    "SamplingParams": "paxpage.engine.sampling_params",
    "StructuredOutputsParams": "paxpage.engine.structured_outputs",
    "EngineConfig": "paxpage.config",
    "ModelConfig": "paxpage.config",
    "RequestOutput": "paxpage.outputs",
    "CompletionOutput": "paxpage.outputs",
    "Logprob": "paxpage.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paxpage' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
