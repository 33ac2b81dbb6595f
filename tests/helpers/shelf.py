"""LLMs that many tests share, each built when first asked for and closed when the session ends."""

from pathlib import Path
from typing import Any, NamedTuple

from paxpage import LLM
from paxpage.models.embedded import default_model_path
from paxpage.models.loading import LoadOptions, load_params, open_model
from tests.helpers.checkpoints import TINY, write_checkpoint
from tests.helpers.oracle import GAPS, GreedyJudge, judge_by
from tests.helpers.smol import transformers_model


class Limits(NamedTuple):
    """What an LLM is built with. num_blocks counts the null block; max_model_len None: all that the pool holds."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    num_blocks: int | None = None
    max_model_len: int | None = 512
    dtype: str = "float32"
    has_prefix_cache: bool = True
    max_logprobs: int = 20


ROOMY = Limits()
UNCACHED = Limits(has_prefix_cache=False)
SMOL_LIMITS = Limits(max_num_batched_tokens=64, max_model_len=256)


class Shelf:
    """TINY and SMOL, as LLMs by their limits and as transformers' models."""

    def __init__(self, folder: Path) -> None:
        self.tiny_folder = folder / "TINY"
        self.tiny_oracle = write_checkpoint(self.tiny_folder, TINY)
        self._smol_oracle: Any = None
        self._llms: dict[tuple[str, Limits], LLM] = {}

    def tiny(self, limits: Limits = ROOMY) -> LLM:
        """A random two-layer Llama without a tokenizer."""
        return self._llm(str(self.tiny_folder), limits)

    def fresh_tiny(self, limits: Limits) -> LLM:
        """TINY in an LLM of the test's own, which may be broken and is to be closed."""
        return _build(str(self.tiny_folder), limits)

    def smol(self, limits: Limits = SMOL_LIMITS) -> LLM:
        """SmolLM2-135M-Instruct."""
        return self._llm(default_model_path(), limits)

    def tiny_judge(self, dtype: str = "float32") -> GreedyJudge:
        """By transformers' TINY in float32; the gap is the one for dtype."""
        return judge_by(self.tiny_oracle, GAPS[dtype])

    def smol_judge(self, dtype: str = "float32", *, to_the_end: bool = False) -> GreedyJudge:
        """By transformers' SMOL in float32; the gap is the one for dtype."""
        return judge_by(self.smol_oracle(), GAPS[dtype], to_the_end=to_the_end)

    def smol_oracle(self) -> Any:
        """transformers' SMOL in float32. It takes no LLM, which would take as long again to compile."""
        if self._smol_oracle is None:
            source = open_model(default_model_path(), LoadOptions(dtype="float32", show_progress=False))
            self._smol_oracle = transformers_model(source.config, load_params(source))
        return self._smol_oracle

    def close(self) -> None:
        """Closes every LLM."""
        for llm in self._llms.values():
            llm.close()
        self._llms.clear()

    def _llm(self, model: str, limits: Limits) -> LLM:
        if (model, limits) not in self._llms:
            self._llms[model, limits] = _build(model, limits)
        return self._llms[model, limits]


def num_useful_blocks(limits: Limits) -> int | None:
    """Blocks for every row's longest sequence; on a GPU an LLM left to itself would take all the memory."""
    if limits.max_model_len is None:
        return None
    return limits.max_num_seqs * -(-limits.max_model_len // 16) + 1


def _build(model: str, limits: Limits) -> LLM:
    llm = LLM(
        model,
        dtype=limits.dtype,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_blocks=limits.num_blocks or num_useful_blocks(limits),
        max_model_len=limits.max_model_len,
        enable_prefix_caching=limits.has_prefix_cache,
        max_logprobs=limits.max_logprobs,
        show_progress=False,
    )
    llm.engine.wait_until_warm()  # tests count compilations and time steps
    return llm
