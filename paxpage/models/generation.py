"""What a checkpoint says about how to sample from it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from paxpage.config import require

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of a checkpoint; None where it says nothing.

    eos_token_ids: the token ids that end a request, in the checkpoint's order; empty when none is known.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def eos_ids(value: object) -> tuple[int, ...]:
    """eos_token_id as files spell it (null, an int or a list of ints) -> a tuple without repeats.

    Raises ValueError for anything else.
    """
    ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    is_valid = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
    require(is_valid, "eos_token_id", value, "a token id or a list of token ids")
    return tuple(dict.fromkeys(ids))


def from_hf(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> GenerationDefaults:
    """From the contents of generation_config.json (empty if there is none), else of config.json."""
    eos = eos_ids(generation_config.get("eos_token_id")) or eos_ids(config.get("eos_token_id"))
    bos = generation_config.get("bos_token_id", config.get("bos_token_id"))
    require(bos is None or isinstance(bos, int), "bos_token_id", bos, "a token id or null")
    sampling = {field: _number(field, generation_config.get(field)) for field in SAMPLING_FIELDS}
    return GenerationDefaults(eos, bos, **sampling)


def with_tokenizer(defaults: GenerationDefaults, tokenizer: Any) -> GenerationDefaults:
    """Fills in the tokenizer's own end and beginning of sequence where the checkpoint named none."""
    eos = defaults.eos_token_ids or eos_ids(getattr(tokenizer, "eos_token_id", None))
    bos = defaults.bos_token_id
    bos = getattr(tokenizer, "bos_token_id", None) if bos is None else bos
    return dataclasses.replace(defaults, eos_token_ids=eos, bos_token_id=bos)


def _number(field: str, value: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(value is None or is_number, f"{field} in generation_config.json", value, "a number or null")
    kind = int if field == "top_k" else float
    return None if value is None else kind(value)
