"""Frozen configurations, validated on construction and never mutated."""

import dataclasses
import json
import math

VERSION = "0.1.0"  # as in pyproject.toml
DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "orbax", "dummy")
BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_SIZE = 2**31 - 1  # of any of a model's; a damaged file may say more
SUPPORTED_HEAD_DIMS = tuple(range(8, 257, 8))


def require(is_valid: bool, field: str, value: object, allowed: str) -> None:
    """Raises ValueError naming the field, the value and what is allowed, unless is_valid."""
    if not is_valid:
        raise ValueError(f"{field} is {value!r}; allowed: {allowed}")


def require_unicode(field: str, text: str) -> None:
    """Raises ValueError for a text that has no UTF-8: one with half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{field} is not valid Unicode at character {error.start}; allowed: no lone surrogates"
        raise ValueError(message) from error


def require_positive(field: str, value: object) -> None:
    """Checks that value is a number (not a bool) above 0, and not infinite."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
    require(is_number, field, value, "a positive number")


def require_bool(field: str, value: object) -> None:
    """Checks that value is True or False."""
    require(isinstance(value, bool), field, value, "True, False")


def require_int(field: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Checks that value is an int (not a bool) in [minimum, maximum]."""
    allowed = f"an integer >= {minimum}" + (f" and <= {maximum}" if maximum is not None else "")
    is_int = isinstance(value, int) and not isinstance(value, bool)
    require(is_int, field, value, allowed)
    assert isinstance(value, int)
    require(minimum <= value and (maximum is None or value <= maximum), field, value, allowed)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The llama3 frequency-dependent scaling of rotary embeddings (Llama 3.1, transformers' rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def _check_rope_scaling(scaling: object) -> None:
    require(isinstance(scaling, RopeScaling), "rope_scaling", scaling, "a RopeScaling, or None")
    assert isinstance(scaling, RopeScaling)
    for field in ("factor", "low_freq_factor", "high_freq_factor"):
        require_positive(f"rope_scaling.{field}", getattr(scaling, field))
    length = scaling.original_max_position_embeddings
    require_int("rope_scaling.original_max_position_embeddings", length, 1)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The numbers of one decoder-only transformer, whatever file they came from."""

    architecture: str  # a key of paxpage.models.registry, as in a checkpoint's "architectures"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    is_tied: bool = False  # the output head is the embedding
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    dtype: str = "float32"  # the checkpoint's own

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            require_int(field, getattr(self, field), 1, MAX_SIZE)
        is_grouped = self.num_heads % self.num_kv_heads == 0
        require(is_grouped, "num_heads", self.num_heads, f"a multiple of num_kv_heads ({self.num_kv_heads})")
        is_size = self.head_dim in SUPPORTED_HEAD_DIMS and isinstance(self.head_dim, int)
        require(is_size, "head_dim", self.head_dim, "multiples of 8 from 8 to 256")
        require_int("max_position_embeddings", self.max_position_embeddings, 1)
        for field in ("rms_norm_eps", "rope_theta"):
            require_positive(field, getattr(self, field))
        if self.rope_scaling is not None:
            _check_rope_scaling(self.rope_scaling)
        for field in ("is_tied", "has_qkv_bias", "has_qk_norm"):
            require_bool(field, getattr(self, field))
        require(self.dtype in DTYPES[1:], "dtype", self.dtype, ", ".join(DTYPES[1:]))


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and of one request, in tokens and in requests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"
    num_tokens_beside_decodes: int | None = None  # of a step in which most requests decode; None: the maximum

    def __post_init__(self) -> None:
        require_int("max_num_seqs", self.max_num_seqs, 1)
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        require_int("max_model_len", self.max_model_len, 1)
        if self.num_tokens_beside_decodes is not None:
            require_int("num_tokens_beside_decodes", self.num_tokens_beside_decodes, 1)
        require(self.policy in ("fcfs", "priority"), "scheduling_policy", self.policy, "fcfs, priority")
        is_enough = self.max_num_batched_tokens >= self.max_num_seqs
        allowed = f"at least max_num_seqs ({self.max_num_seqs}), so that every running request can decode in one step"
        require(is_enough, "max_num_batched_tokens", self.max_num_batched_tokens, allowed)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What a user chooses when starting an engine. None means: derived from the model and the device.

    num_blocks counts the null block, so num_blocks - 1 of them hold tokens.
    """

    dtype: str = "auto"
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    enable_cascade_attention: bool = True  # read prefixes that rows share once a step, where that pays (Hopper)
    tensor_parallel_size: int = 1
    load_format: str = "auto"
    scheduling_policy: str = "fcfs"
    num_tokens_beside_decodes: int | None = None  # of a step in which most requests decode; None: as of any
    async_scheduling: bool | None = None  # schedule a step while the one before runs; None: on a GPU
    max_logprobs: int = 20  # a request may ask for, a token; -1: as many as there are tokens
    compilation_cache_dir: str | None = None

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
        require(self.kv_cache_dtype in DTYPES, "kv_cache_dtype", self.kv_cache_dtype, ", ".join(DTYPES))
        require(self.load_format in LOAD_FORMATS, "load_format", self.load_format, ", ".join(LOAD_FORMATS))
        is_size = self.block_size in BLOCK_SIZES and isinstance(self.block_size, int)
        require(is_size, "block_size", self.block_size, ", ".join(map(str, BLOCK_SIZES)))
        require(
            self.scheduling_policy in ("fcfs", "priority"),
            "scheduling_policy",
            self.scheduling_policy,
            "fcfs, priority",
        )
        is_share = isinstance(self.gpu_memory_utilization, (int, float)) and 0 < self.gpu_memory_utilization <= 1
        require(is_share, "gpu_memory_utilization", self.gpu_memory_utilization, "a number in (0, 1]")
        for field in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, field) is not None:
                require_int(field, getattr(self, field), 1, MAX_SIZE)
        if self.num_blocks is not None:
            require_int("num_blocks", self.num_blocks, 2, MAX_SIZE // self.block_size)  # slots are int32
        require_int("max_logprobs", self.max_logprobs, -1, 100)
        require_int("seed", self.seed, 0, 2**63 - 1)
        for field in ("enable_prefix_caching", "enable_cascade_attention"):
            require_bool(field, getattr(self, field))
        is_switch = self.async_scheduling is None or isinstance(self.async_scheduling, bool)
        require(is_switch, "async_scheduling", self.async_scheduling, "True, False, or None")
        folder = self.compilation_cache_dir
        require(folder is None or isinstance(folder, str), "compilation_cache_dir", folder, "a path as a str, or None")
        require(self.tensor_parallel_size == 1, "tensor_parallel_size", self.tensor_parallel_size, "1")


def from_json(text: str) -> ModelConfig:
    """Rebuilds a ModelConfig from to_json's text."""
    fields = json.loads(text)
    if fields.get("rope_scaling") is not None:
        fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
    return ModelConfig(**fields)


def to_json(config: ModelConfig) -> str:
    """One line of JSON that from_json reads back."""
    return json.dumps(dataclasses.asdict(config))
