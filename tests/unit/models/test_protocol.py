"""A researcher's own module joins the engine: the worked example of models.protocol, and what is refused."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers
from flax import nnx

from paxpage import LLM, ModelConfig, SamplingParams
from paxpage.models import protocol
from paxpage.models.protocol import KVSpec
from paxpage.models.registry import abstract_params
from tests.helpers.engines import assert_idle, complete, greedy_params, token_budget, tokens, tokens_alone
from tests.helpers.fixtures import unchecked_types
from tests.helpers.oracle import GreedyJudge

__all__ = ["unchecked_types"]

NUM_HEADS, HEAD_DIM = 2, 8
PROMPTS = [[5], list(range(20, 37)), [(7 * j) % 128 for j in range(40)]]
CONFIG = ModelConfig("LlamaForCausalLM", 64, 32, 48, 1, 2, 1, 16, 128)


def example() -> tuple[type[nnx.Module], str]:
    """The class that protocol's docstring shows, and the line that serves it."""
    assert protocol.__doc__ is not None
    code = textwrap.dedent(protocol.__doc__[protocol.__doc__.index("    class TinyModel") :])
    definition, _, last_line = code.strip().rpartition("\n")
    names: dict[str, Any] = {"nnx": nnx, "jnp": jnp, "KVSpec": KVSpec}
    exec(definition, names)
    return names["TinyModel"], last_line


def dense_logits(module: Any, token_ids: list[int]) -> np.ndarray:
    """The example's function of one sequence, without a cache: [num_tokens, vocab_size]."""
    embed, qkv = (np.asarray(param[...], np.float64) for param in (module.embed, module.qkv))
    positions = np.arange(len(token_ids))[:, None]
    x = embed[token_ids] + np.sin(positions / np.float64(10) ** np.arange(16))
    q, k, v = (part.reshape(-1, NUM_HEADS, HEAD_DIM) for part in np.split(x @ qkv, 3, axis=-1))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
    scores = np.where(np.tril(np.ones(scores.shape[1:])), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v)
    return (x + out.reshape(-1, NUM_HEADS * HEAD_DIM)) @ embed.T


@pytest.fixture(scope="module")
def module() -> nnx.Module:
    model, last_line = example()
    assert last_line == "LLM(TinyModel(nnx.Rngs(0)))"
    return model(nnx.Rngs(0))


@pytest.fixture(scope="module")
def llm(module: nnx.Module) -> Iterator[LLM]:
    with LLM(module, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64, show_progress=False) as llm:
        yield llm


def test_the_example_generates_what_its_dense_form_does(module: nnx.Module, llm: LLM) -> None:
    """Alone, in one batch and in chunks."""
    judge = GreedyJudge(lambda token_ids: dense_logits(module, list(token_ids)))
    params = greedy_params(20)
    alone = [tokens_alone(llm, prompt, params) for prompt in PROMPTS]
    together = tokens(llm, PROMPTS, params)
    with token_budget(llm, 16):
        chunked = tokens(llm, PROMPTS, params)
    for outputs in (alone, together, chunked):
        for prompt, token_ids in zip(PROMPTS, outputs, strict=True):
            judge.check(prompt, token_ids)
    assert_idle(llm.engine)


def test_its_log_probabilities_are_those_of_the_dense_form(module: nnx.Module, llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, logprobs=3)
    for prompt, output in zip(PROMPTS, complete(llm, PROMPTS, params), strict=True):
        logits = dense_logits(module, prompt + output.token_ids)[len(prompt) - 1 : -1]
        expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        for token_id, row, entries in zip(output.token_ids, expected, output.logprobs, strict=True):
            assert next(iter(entries)) == token_id
            for other, entry in entries.items():
                assert entry.logprob == pytest.approx(row[other], abs=1e-4)


def test_the_engine_is_named_after_the_class_and_has_no_tokenizer(llm: LLM) -> None:
    assert llm.engine.model_name == "TinyModel"
    assert llm.engine.vocab_size == 128
    with pytest.raises(ValueError, match=r"prompt is 'hello'; allowed: token ids only: this model has no tokenizer"):
        llm.generate("hello", use_tqdm=False)


def _pointers(tree: Any) -> set[int]:
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}


def test_a_modules_arrays_are_served_where_they_lie(module: Any, llm: LLM) -> None:
    assert _pointers(llm.engine.runner.params) == _pointers((module.embed[...], module.qkv[...]))
    assert not module.embed[...].is_deleted()


def random_params(dtype: str = "float32") -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape, scale=0.1), leaf.dtype), abstract_params(CONFIG, dtype)
    )


def test_a_params_pytree_is_served_where_it_lies() -> None:
    """A training loop's arrays: used, not copied, and still there when the LLM is closed."""
    params = random_params()
    before = _pointers(params)
    limits = {"max_model_len": 32, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    with LLM(CONFIG, params=params, **limits, show_progress=False) as llm:
        assert _pointers(llm.engine.runner.params) == before
        assert len(tokens(llm, [[1, 2, 3]], greedy_params(5))[0]) == 5
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def _word_tokenizer(eos_token_id: int) -> Any:
    """A word for each token of CONFIG's."""
    words = {f"w{token_id}": token_id for token_id in range(CONFIG.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{eos_token_id}")


def test_the_tokenizers_end_of_sequence_ends_what_params_in_memory_say() -> None:
    params, limits = random_params(), {"max_model_len": 32, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    with LLM(CONFIG, params=params, **limits, show_progress=False) as llm:
        (unended,) = tokens(llm, [[1, 2, 3]], greedy_params(5))
    eos = unended[2]
    with LLM(CONFIG, params=params, tokenizer=_word_tokenizer(eos), **limits, show_progress=False) as llm:
        (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=5))
    assert output.outputs[0].token_ids == unended[: unended.index(eos) + 1]
    assert output.outputs[0].finish_reason == "stop"


class WithoutLogits(nnx.Module):
    """Lacks compute_logits."""

    def __init__(self) -> None:
        self.kv_spec = KVSpec(1, 1, 8)
        self.weight = nnx.Param(jnp.zeros((4, 4)))

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: protocol.Attend) -> jax.Array:
        return self.weight[token_ids]


def test_a_module_that_lacks_a_member_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model is 'WithoutLogits'; allowed: modules with kv_spec, __call__ and"):
        LLM(WithoutLogits(), show_progress=False)


def test_params_beside_a_module_are_refused(module: nnx.Module) -> None:
    with pytest.raises(ValueError, match=r"params is .*; allowed: nothing beside an NNX module"):
        LLM(module, params={}, show_progress=False)


def test_a_config_without_params_is_refused() -> None:
    with pytest.raises(ValueError, match=r"params is None; allowed: a pytree, when model is a ModelConfig"):
        LLM(CONFIG, show_progress=False)


def test_params_that_do_not_fit_are_named() -> None:
    """Missing, extra and misshapen, in one error, before anything is compiled."""
    params = random_params()
    del params["norm"]
    params["extra"] = {"weight": jnp.zeros((3,))}
    params["lm_head"] = {"weight": jnp.zeros((64, 31))}
    with pytest.raises(ValueError, match=re.escape("norm.weight [32] is missing")) as caught:
        LLM(CONFIG, params=params, show_progress=False)
    assert "extra.weight [3] is extra" in str(caught.value)
    assert "lm_head.weight is [64, 31], expected [64, 32]" in str(caught.value)


def test_params_of_mixed_dtypes_are_named() -> None:
    params = random_params()
    params["norm"]["weight"] = params["norm"]["weight"].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match=r"norm\.weight is bfloat16"):
        LLM(CONFIG, params=params, show_progress=False)


def test_an_unknown_architecture_is_refused_with_the_list() -> None:
    config = ModelConfig("GPT2LMHeadModel", 64, 32, 48, 1, 2, 1, 16, 128)
    with pytest.raises(ValueError, match=r"architecture is 'GPT2LMHeadModel'; allowed: LlamaForCausalLM, "):
        LLM(config, params=random_params(), show_progress=False)


class WithSpec(nnx.Module):
    """Attends once, at a layer and with a number of key heads that kv_spec may contradict."""

    def __init__(self, spec: KVSpec, layer: int) -> None:
        self.kv_spec = spec
        self.layer = layer
        self.embed = nnx.Param(jnp.ones((16, 8)))

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: protocol.Attend) -> jax.Array:
        x = self.embed[token_ids].reshape(-1, 1, 8)
        return attend(self.layer, x, x, x).reshape(-1, 8)

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        return hidden @ self.embed[...].T


@pytest.mark.parametrize(
    ("spec", "layer", "message"),
    [
        (KVSpec(1, 1, 8), 1, r"layer is 1; allowed: 0 to 0"),
        (KVSpec(2, 1, 8), -1, r"layer is -1; allowed: 0 to 1"),
        (KVSpec(1, 2, 8), 0, r"shape of a token's k is \(1, 8\); allowed: \(2, 8\), as kv_spec says"),
        (KVSpec(1, 1, 16), 0, r"shape of a token's k is \(1, 8\); allowed: \(1, 16\), as kv_spec says"),
    ],
)
def test_a_module_that_contradicts_its_spec_is_refused(spec: KVSpec, layer: int, message: str) -> None:
    """JAX would drop a write past the last layer, and broadcast one head to two, without a word."""
    limits = {"max_model_len": 32, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    with pytest.raises(ValueError, match=message):
        LLM(WithSpec(spec, layer), **limits, show_progress=False)


class Wrapped(WithSpec):
    """Hands what it computes through a function of the test's."""

    def __init__(self, around_attend: Any, around_logits: Any) -> None:
        super().__init__(KVSpec(1, 1, 8), 0)
        self.around_attend = around_attend
        self.around_logits = around_logits

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: protocol.Attend) -> jax.Array:
        x = self.embed[token_ids].reshape(-1, 1, 8)
        return self.around_attend(lambda y: attend(0, y, y, y).reshape(-1, 8), x)

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        return self.around_logits(super().compute_logits(hidden))


def _plainly(function: Any, x: jax.Array) -> jax.Array:
    return function(x)


def _same(logits: jax.Array) -> jax.Array:
    return logits


BAD_MODULES: dict[str, tuple[Any, Any, str]] = {
    "jit": (lambda function, x: jax.jit(function)(x), _same, "place where attend is called is 'another trace'"),
    "checkpoint": (lambda function, x: jax.checkpoint(function)(x), _same, "place where attend is called is"),
    "scan": (
        lambda function, x: jax.lax.scan(lambda y, _: (function(y)[:, None], None), x, None, 1)[0][:, 0],
        _same,
        "place where attend is called is",
    ),
    "fewer tokens": (
        lambda function, x: function(x)[:-1],
        _same,
        r"shape of hidden is \(\d+, 8\); allowed: \(\d+, size\)",
    ),
    "a pair": (lambda function, x: (function(x), x), _same, r"shape of hidden is \(\); allowed: \(\d+, size\)"),
    "heads left": (lambda function, x: function(x)[:, None], _same, r"shape of hidden is \(\d+, 1, 8\)"),
    "logits of one row": (_plainly, lambda logits: logits[0], r"shape of logits is \(16,\); allowed: \(\d+, size\)"),
}


@pytest.mark.parametrize("mistake", BAD_MODULES)
def test_a_module_that_contradicts_the_protocol_is_refused(mistake: str) -> None:
    """An inner trace's cache would be missed by the first step that runs; rows that are missing JAX would repeat."""
    around_attend, around_logits, message = BAD_MODULES[mistake]
    limits = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    with pytest.raises(ValueError, match=message):
        LLM(Wrapped(around_attend, around_logits), **limits, show_progress=False)


def test_a_module_whose_other_parts_are_traced_anew_is_served() -> None:
    module = Wrapped(_plainly, jax.jit(jax.checkpoint(_same)))
    with LLM(module, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=16, show_progress=False) as llm:
        assert len(tokens(llm, [[1, 2, 3]], greedy_params(3))[0]) == 3
