"""Configurations: what is not allowed is refused by name when they are made."""

import dataclasses
import pathlib
from typing import Any

import pytest

from paxpage.config import EngineConfig, ModelConfig, RopeScaling
from tests.helpers.fixtures import unchecked_types

__all__ = ["unchecked_types"]

SCALING = RopeScaling(8.0, 1.0, 4.0, 64)
MODEL = ModelConfig("LlamaForCausalLM", 64, 32, 48, 1, 2, 1, 16, 128, rope_scaling=SCALING)

BAD_ENGINES: dict[str, tuple[Any, str]] = {
    "block_size": (16.0, "8, 16, 32, 64, 128"),
    "num_blocks": (10**12, "an integer >= 2 and <= 134217727"),  # their slots would not be int32
    "async_scheduling": ("yes", "True, False, or None"),
    "enable_prefix_caching": (None, "True, False"),
    "enable_cascade_attention": (1, "True, False"),
    "compilation_cache_dir": (pathlib.Path("cache"), "a path as a str, or None"),
}
BAD_MODELS: dict[str, tuple[Any, str]] = {
    "head_dim": (16.0, "multiples of 8 from 8 to 256"),
    "max_position_embeddings": (None, "an integer >= 1"),
    "rms_norm_eps": (-1.0, "a positive number"),
    "rope_theta": ("1e4", "a positive number"),
    "rope_scaling": ({"factor": 8.0}, "a RopeScaling, or None"),
    "is_tied": ("no", "True, False"),
    "has_qkv_bias": (1, "True, False"),
    "has_qk_norm": (None, "True, False"),
}
BAD_SCALINGS: dict[str, tuple[Any, str]] = {
    "factor": ("8", "a positive number"),
    "low_freq_factor": (True, "a positive number"),
    "high_freq_factor": (float("nan"), "a positive number"),
    "original_max_position_embeddings": (0, "an integer >= 1"),
}
MISTAKES = [
    (base, field, value, allowed)
    for base, mistakes in ((EngineConfig(), BAD_ENGINES), (MODEL, BAD_MODELS))
    for field, (value, allowed) in mistakes.items()
]


@pytest.mark.parametrize("field", BAD_SCALINGS)
def test_a_scaling_of_rotary_embeddings_is_checked_with_its_model(field: str) -> None:
    value, allowed = BAD_SCALINGS[field]
    scaling = dataclasses.replace(SCALING, **{field: value})
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(MODEL, rope_scaling=scaling)
    assert str(caught.value).startswith(f"rope_scaling.{field} is {value!r}; allowed: {allowed}")


@pytest.mark.parametrize(("base", "field", "value", "allowed"), MISTAKES, ids=[field for _, field, *_ in MISTAKES])
def test_what_is_not_allowed_is_refused_by_name(base: Any, field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(base, **{field: value})
    assert str(caught.value).startswith(f"{field} is {value!r}; allowed: {allowed}")


def test_what_is_allowed() -> None:
    folder = {"compilation_cache_dir": "cache", "async_scheduling": False, "num_blocks": 134217727}
    assert EngineConfig(**folder).block_size == 16
    assert dataclasses.replace(MODEL, rope_theta=10000, rope_scaling=None, is_tied=True).rope_theta == 10000
