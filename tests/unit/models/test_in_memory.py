"""Weights in memory: what is refused beside them by name, and other weights between two calls."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from paxpage import LLM
from paxpage.models.embedded import default_model_path
from paxpage.models.protocol import KVSpec
from paxpage.models.registry import merge
from tests.helpers.engines import assert_idle, greedy_params, ids, tokens
from tests.helpers.fixtures import unchecked_types
from tests.unit.models.test_protocol import CONFIG, WithSpec, random_params

__all__ = ["unchecked_types"]

LIMITS: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 1, "max_num_batched_tokens": 16, "show_progress": False}


def _module() -> nnx.Module:
    return WithSpec(KVSpec(1, 1, 8), 0)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_tokenizer_may_be_a_path_beside_params_in_memory(kind: type) -> None:
    config = dataclasses.replace(CONFIG, vocab_size=49152)
    params = random_params() | {
        name: {"weight": jnp.ones((49152, 32), jnp.float32)} for name in ("embed_tokens", "lm_head")
    }
    with LLM(config, params=params, tokenizer=kind(default_model_path()), **LIMITS) as llm:
        (output,) = llm.generate("Hello", use_tqdm=False)
    assert output.prompt_token_ids == [19556]


@pytest.mark.parametrize("tokenizer", ["/nowhere", 5])
def test_what_is_no_tokenizer_is_named_beside_a_module_too(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"tokenizer is (5|'/nowhere'); allowed"):
        LLM(_module(), tokenizer=tokenizer, **LIMITS)


@pytest.mark.parametrize("params", [{}, 5, [1, 2]])
def test_params_without_an_array_of_floats_are_named(params: Any) -> None:
    with pytest.raises(ValueError, match=r"params"):
        LLM(CONFIG, params=params, **LIMITS)


def test_params_of_integers_are_named() -> None:
    with pytest.raises(ValueError, match=r"dtype of params is 'int32'"):
        LLM(CONFIG, params=jax.tree.map(lambda leaf: leaf.astype(jnp.int32), random_params()), **LIMITS)


@pytest.mark.parametrize("spec", [(1, 1, 8), None, KVSpec(1.0, 1, 8), KVSpec(0, 1, 8)])  # type: ignore[arg-type]
def test_a_kv_spec_that_is_none_is_named(spec: Any) -> None:
    module: Any = _module()
    module.kv_spec = spec
    with pytest.raises(ValueError, match=r"kv_spec"):
        LLM(module, **LIMITS)


@pytest.mark.parametrize("field", [{"dtype": "bfloat16"}, {"load_format": "dummy"}])
def test_what_weights_in_memory_cannot_follow_is_not_passed_over(field: dict[str, str]) -> None:
    ((name, value),) = field.items()
    for model, params in ((CONFIG, random_params()), (_module(), None)):
        with pytest.raises(ValueError, match=f"{name} is {value!r}; allowed: auto"):
            LLM(model, params=params, **field, **LIMITS)


def test_max_position_embeddings_of_a_module_is_a_number() -> None:
    module: Any = _module()
    module.max_position_embeddings = "x"
    with pytest.raises(ValueError, match=r"max_position_embeddings is 'x'"):
        LLM(module, **LIMITS)


def _changed(params: Any, scale: float) -> Any:
    return jax.tree.map(lambda leaf: leaf * scale + 0.01, params)


def _alone(params: Any, prompt: list[int]) -> list[int]:
    with LLM(CONFIG, params=params, enable_prefix_caching=False, **LIMITS) as llm:
        return tokens(llm, [prompt], greedy_params(8))[0]


def test_other_params_answer_as_if_they_had_been_there_from_the_start() -> None:
    """Their own tokens, though the prompt is in the prefix cache; nothing is compiled, and none is copied."""
    before, prompt = random_params(), list(range(1, 21))
    after = _changed(before, -1.5)
    with LLM(CONFIG, params=before, **LIMITS) as llm:
        assert tokens(llm, [prompt, prompt], greedy_params(8)) == [_alone(before, prompt)] * 2
        programs = dict(llm.engine.runner._compiled)
        llm.set_params(after)
        assert tokens(llm, [prompt], greedy_params(8)) == [_alone(after, prompt)] != [_alone(before, prompt)]
        assert llm.engine.runner._compiled == programs
        assert all(map(lambda mine, given: mine is given, *map(jax.tree.leaves, (llm.engine.runner.params, after))))
        assert_idle(llm.engine)


def test_a_module_of_the_same_structure_brings_its_arrays() -> None:
    params = random_params()
    with LLM(CONFIG, params=params, **LIMITS) as llm:
        llm.set_params(merge(llm.engine.runner._graphdef, _changed(params, 2.0)))
        assert tokens(llm, [[1, 2, 3]], greedy_params(8)) == [_alone(_changed(params, 2.0), [1, 2, 3])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: params | {"more": {"weight": jnp.zeros(3)}}, r"params .*: more.weight \[3\] is extra"),
        (lambda params: {"norm": params["norm"]}, r"embed_tokens.weight \[64, 32\] is missing"),
        (lambda params: jax.tree.map(lambda leaf: leaf.T, params), r"embed_tokens.weight is \[32, 64\], expected"),
        (lambda params: jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params), "is bfloat16, expected float32"),
        (lambda params: jax.tree.map(lambda leaf: 1.0, params), r"params \(jax.Array\) .*<class 'float'>"),
        (lambda params: 5, "params is 'int'; allowed: nested dicts"),
    ],
)
def test_params_that_are_not_the_same_are_named(change: Any, message: str) -> None:
    params = random_params()
    with LLM(CONFIG, params=params, **LIMITS) as llm:
        with pytest.raises(ValueError, match=message):
            llm.set_params(change(params))
        assert tokens(llm, [[1, 2, 3]], greedy_params(8)) == [_alone(params, [1, 2, 3])]


def test_params_are_not_changed_while_a_request_runs() -> None:
    params = random_params()
    with LLM(CONFIG, params=params, **LIMITS) as llm:
        llm.engine.add_request("a", ids([1, 2, 3]), greedy_params(8))
        with pytest.raises(ValueError, match="number of unfinished requests is 1; allowed: 0, to change the params"):
            llm.set_params(params)
        llm.engine.abort(["a"])
        llm.set_params(params)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.set_params(params)


ON_ANOTHER_DEVICE = """
import jax
from paxpage import LLM
from tests.unit.models.test_in_memory import CONFIG, LIMITS, _module, random_params

here = random_params()
there = jax.device_put(here, jax.devices()[1])
with LLM(CONFIG, params=here, **LIMITS) as llm:
    for use in (lambda: LLM(CONFIG, params=there, **LIMITS), lambda: llm.set_params(there)):
        try:
            use()
        except ValueError as error:
            print(error)
with jax.default_device(jax.devices()[1]):
    module = _module()
try:
    LLM(module, **LIMITS)
except ValueError as error:
    print(error)
"""


def test_arrays_of_another_device_are_named() -> None:
    """In a process that has two."""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", ON_ANOTHER_DEVICE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout
    assert all("params (on cpu:0 alone)" in line and "is on ['cpu:1']" in line for line in lines), lines
