"""transformers' answer, and the rule by which greedy tokens are compared with it."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

# A first difference is allowed only where the reference's best logits lie closer together than this.
GAPS = {"float32": 1e-4, "bfloat16": 0.25}


class ForwardPass(NamedTuple):
    """One sequence through a model of transformers."""

    residuals: np.ndarray  # [num_layers + 1, num_tokens, hidden_size]: the embeddings, then after each layer
    hidden: np.ndarray  # [num_tokens, hidden_size], after the last norm
    logits: np.ndarray  # [num_tokens, vocab_size]


def forward_pass(model: Any, token_ids: Sequence[int]) -> ForwardPass:
    """Runs the whole sequence at once, recording what enters the first layer and what leaves each."""
    import torch

    seen: list[np.ndarray] = []
    layers = model.model.layers
    hooks = [layers[0].register_forward_pre_hook(lambda _, args: seen.append(_numpy(args[0])))]
    hooks += [layer.register_forward_hook(lambda _, args, out: seen.append(_numpy(out))) for layer in layers]
    with torch.no_grad():
        out = model.model(torch.tensor([list(token_ids)]))
        logits = model.lm_head(out.last_hidden_state)
    for hook in hooks:
        hook.remove()
    return ForwardPass(np.stack(seen), _numpy(out.last_hidden_state), _numpy(logits))


def logits_of(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """[num_tokens, vocab_size], float32."""
    import torch

    with torch.no_grad():
        return _numpy(model(torch.tensor([list(token_ids)])).logits)


def greedy_tokens(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """transformers' own greedy generation, with its cache; end of sequence ignored."""
    import torch

    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def _numpy(tensor: Any) -> np.ndarray:
    tensor = tensor[0] if isinstance(tensor, tuple) else tensor
    return tensor[0].float().numpy().copy()


def near_ties(token_ids: Sequence[int], logits: np.ndarray, gap: float) -> Iterator[int]:
    """Indices of tokens that are not the reference's greedy choice after the tokens before them.

    logits: [num_tokens, vocab_size], those from which each of token_ids was chosen, the reference being given the same
    tokens before. AssertionError at a token whose logit is not within gap of the best.
    """
    for index, (token_id, row) in enumerate(zip(token_ids, logits, strict=True)):
        best = int(row.argmax())
        if token_id != best:
            distance = float(row[best] - row[token_id])
            assert distance < gap, f"token {index} is {token_id}, {distance:.2e} below the reference's {best}"
            yield index


class GreedyJudge:
    """Compares greedy outputs with a reference, asking it once per prompt and output.

    Up to the first difference they are the tokens that the reference would have generated; what follows is looked at
    only with to_the_end: each token is then to be near the best that the reference has after the tokens before it.
    num_differences counts the outputs that the gap rule had to excuse.
    """

    def __init__(
        self,
        reference: Callable[[Sequence[int]], np.ndarray],
        gap: float = GAPS["float32"],
        *,
        to_the_end: bool = False,
    ) -> None:
        self.num_differences = 0
        self._reference = reference
        self._gap = gap
        self._to_the_end = to_the_end
        self._judged: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def check(self, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
        """AssertionError if token_ids is not the greedy continuation of prompt, the gap rule allowing."""
        key = (tuple(prompt), tuple(token_ids))
        if key in self._judged:
            return
        logits = self._reference([*prompt, *token_ids])[len(prompt) - 1 : -1]
        compared = itertools.islice(near_ties(token_ids, logits, self._gap), None if self._to_the_end else 1)
        self.num_differences += bool(list(compared))
        self._judged.add(key)


def judge_by(model: Any, gap: float = GAPS["float32"], *, to_the_end: bool = False) -> GreedyJudge:
    """A judge whose reference is a model of transformers."""
    return GreedyJudge(lambda token_ids: logits_of(model, token_ids), gap, to_the_end=to_the_end)
