"""The small protocol by which a model joins the engine.

A model is any Flax NNX module with three members:

    kv_spec: KVSpec
        How many layers write keys and values, and the shape of one token's.
    __call__(token_ids, positions, attend) -> hidden
        token_ids and positions are int32[num_tokens]: the tokens of every request of this step, laid end to end,
        and each one's index in its own request. attend is an `Attend`: the module hands it each layer's queries,
        keys and values (positional encoding applied) and gets the attention output back; where the keys and values
        live, and which tokens belong together, is the engine's business. Returns [num_tokens, hidden_size].
        Nothing in here may mix tokens but attend, which is called from __call__'s own trace: not within a function
        given to jax.jit, jax.checkpoint, a scan or a vmap.
    compute_logits(hidden) -> logits
        [num_rows, hidden_size] -> [num_rows, vocab_size]; called only for the tokens that are sampled from.

A worked example, a whole model in a few lines, which tests/unit/models/test_protocol.py serves:

    class TinyModel(nnx.Module):
        def __init__(self, rngs):
            self.kv_spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=8)
            self.embed = nnx.Param(rngs.params.normal((128, 16)))
            self.qkv = nnx.Param(rngs.params.normal((16, 48)))

        def __call__(self, token_ids, positions, attend):
            x = self.embed[token_ids] + jnp.sin(positions[:, None] / 10 ** jnp.arange(16))
            q, k, v = (y.reshape(-1, 2, 8) for y in jnp.split(x @ self.qkv[...], 3, axis=-1))
            return x + attend(0, q, k, v).reshape(-1, 16)

        def compute_logits(self, hidden):
            return hidden @ self.embed[...].T

    LLM(TinyModel(nnx.Rngs(0)))
"""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int


class KVSpec(NamedTuple):
    """The shape of what one token leaves in the cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class Angles(NamedTuple):
    """By how much each token's queries and keys are turned: dimension i with dimension i + head_dim / 2."""

    cos: Float[Array, "num_tokens half"]  # float32
    sin: Float[Array, "num_tokens half"]


@runtime_checkable
class Attend(Protocol):
    """One step's attention over paged keys and values, bound to the cache."""

    def __call__(
        self,
        layer: int,
        q: Float[Array, "num_tokens num_heads head_dim"],
        k: Float[Array, "num_tokens num_kv_heads head_dim"],
        v: Float[Array, "num_tokens num_kv_heads head_dim"],
        scale: float | None = None,
    ) -> Float[Array, "num_tokens num_heads head_dim"]:
        """Writes k and v to the cache, then attends causally over each token's own request.

        layer is a Python int from 0 to kv_spec.num_layers - 1, each used once a step. num_heads is a multiple of
        num_kv_heads. scale multiplies q k; None means head_dim ** -0.5.
        """
        ...

    def rotary(
        self,
        layer: int,
        qkv: Float[Array, "num_tokens num_heads_and_2_num_kv_heads head_dim"],
        angles: Angles,
        scale: float | None = None,
    ) -> Float[Array, "num_tokens num_heads head_dim"]:
        """The same for query, key and value heads side by side, queries and keys turned by angles first.

        What a GPU does in one pass; for models that do nothing between the projection and the rotation.
        """
        ...


@runtime_checkable
class CausalLM(Protocol):
    """What the engine asks of a model."""

    kv_spec: KVSpec

    def __call__(
        self, token_ids: Int[Array, " num_tokens"], positions: Int[Array, " num_tokens"], attend: Attend
    ) -> Float[Array, "num_tokens hidden_size"]:
        """Hidden states of every token of the step."""
        ...

    def compute_logits(self, hidden: Float[Array, "num_rows hidden_size"]) -> Float[Array, "num_rows vocab_size"]:
        """Logits of the given hidden states."""
        ...
