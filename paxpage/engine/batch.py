"""The bridge: a ScheduledBatch on the host becomes padded arrays for the device. Pure functions.

All integers of a step travel in one int32 array (a transfer costs more than its bytes), so pack and unpack share one
layout. Shapes come from a short list of StepShapes, compiled ahead.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paxpage.engine.block_pool import NULL_BLOCK
from paxpage.engine.kv_cache_manager import BlockCopy, KVCacheManager
from paxpage.engine.request import Request
from paxpage.engine.sampling_params import MAX_STOP_TOKEN_IDS
from paxpage.engine.scheduler import ScheduledBatch, ScheduledRow

MAX_SUPPRESSED = MAX_STOP_TOKEN_IDS + 16  # stop tokens and the model's own ends of sequence
NO_TOKEN = 2**31 - 1  # past every vocabulary: a scatter with mode="drop" leaves it out


class StepShape(NamedTuple):
    """Padded size of a step. With num_tokens == num_rows every row has one query: a decode step."""

    num_tokens: int
    num_rows: int
    blocks_per_row: int

    @property
    def is_decode(self) -> bool:
        """Whether each row has exactly one query."""
        return self.num_tokens == self.num_rows

    @property
    def num_ints(self) -> int:
        """Length of the packed array."""
        return 3 * self.num_tokens + 4 * self.num_rows + 1 + self.num_rows * self.blocks_per_row


class StepInputs(NamedTuple):
    """One step's integers, int32. Padding tokens have slot 0 (null block); padding rows have seq_len 0."""

    token_ids: Any  # [num_tokens]; -1 - i stands for the token that row i of the step before has sampled
    positions: Any  # [num_tokens], index in the token's own sequence
    slot_mapping: Any  # [num_tokens], block_id * block_size + offset where the token's key and value go
    query_start_loc: Any  # [num_rows + 1], row r's tokens are query_start_loc[r] .. query_start_loc[r + 1] - 1
    seq_lens: Any  # [num_rows], tokens in the cache once this step has written its own
    logits_indices: Any  # [num_rows], each row's last token in this step
    row_order: Any  # [num_rows], the rows, those with the longest sequences first
    block_tables: Any  # [num_rows, blocks_per_row]


def unpack(packed: Any, shape: StepShape) -> StepInputs:
    """Slices the packed int32 array (numpy, jax or traced) into its fields."""
    num_tokens, num_rows, _ = shape
    lengths = (num_tokens, num_tokens, num_tokens, num_rows + 1, num_rows, num_rows, num_rows)
    ends = list(itertools.accumulate(lengths))
    fields = [packed[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return StepInputs._make([*fields, packed[ends[-1] :].reshape(num_rows, -1)])


def pack(batch: ScheduledBatch, shape: StepShape, manager: KVCacheManager) -> np.ndarray:
    """Writes a batch into a packed int32 array of shape.num_ints, padded to shape."""
    packed = np.empty(shape.num_ints, np.int32)
    inputs = unpack(packed, shape)
    packed[: packed.size - inputs.block_tables.size] = 0
    requests, starts_of, counts_of, _, previous_of, _ = zip(*batch.rows, strict=True)
    _gather_tables(manager.block_tables, np.array([request.row for request in requests]), inputs.block_tables)
    starts, counts = np.array(starts_of, np.int32), np.array(counts_of, np.int32)
    num_rows, num_tokens = len(requests), batch.num_tokens
    rows, ends, positions = np.arange(num_rows, dtype=np.int32), np.cumsum(counts, dtype=np.int32), starts
    if shape.is_decode:
        inputs.token_ids[:num_tokens] = _decode_token_ids(batch.rows, np.array(previous_of))
    else:
        inputs.token_ids[:num_tokens] = _token_ids(batch.rows)
        rows = np.repeat(rows, counts)
        positions = np.arange(num_tokens, dtype=np.int32) + (starts + counts - ends)[rows]
    inputs.query_start_loc[1 : num_rows + 1] = ends
    inputs.query_start_loc[num_rows + 1 :] = num_tokens
    inputs.seq_lens[:num_rows] = starts + counts
    inputs.logits_indices[:num_rows] = ends - 1
    if batch.has_forks:
        _place_forks(inputs, batch.rows)
    inputs.row_order[:] = np.argsort(-inputs.seq_lens, kind="stable")
    inputs.positions[:num_tokens] = positions
    inputs.slot_mapping[:num_tokens] = slots_of(inputs.block_tables, rows, positions, manager.block_size)
    if batch.has_scored:
        num_readonly = np.array([request.num_readonly_tokens for request in requests])[rows]
        inputs.slot_mapping[:num_tokens][positions < num_readonly] = NULL_BLOCK * manager.block_size
    return packed


def _place_forks(inputs: StepInputs, rows: list[ScheduledRow]) -> None:
    """Rows without a token of their own attend to nothing and take another row's logits."""
    for index, row in enumerate(rows):
        if row.fork_index >= 0:
            inputs.seq_lens[index] = 0
            inputs.logits_indices[index] = inputs.logits_indices[row.fork_index]


def _decode_token_ids(rows: list[ScheduledRow], previous: np.ndarray) -> np.ndarray:
    """_token_ids where every row has one token."""
    token_ids = -1 - previous
    for index in np.flatnonzero(previous < 0).tolist():
        token_ids[index] = rows[index].request.token_ids[rows[index].start]
    return token_ids


def pack_copies(copies: Sequence[BlockCopy], num_copies: int) -> np.ndarray:
    """int32 [2, num_copies], sources and targets; padding copies the null block onto itself."""
    pairs = np.full((2, num_copies), NULL_BLOCK, np.int32)
    pairs[:, : len(copies)] = np.array(copies, np.int32).T
    return pairs


def _gather_tables(block_tables: np.ndarray, table_rows: np.ndarray, out: np.ndarray) -> None:
    """The rows' tables, the null block past them; out may be wider (max_model_len was lowered to fit the pool)."""
    num_rows, width = len(table_rows), block_tables.shape[1]
    out[num_rows:] = NULL_BLOCK
    if width == out.shape[1]:
        np.take(block_tables, table_rows, axis=0, out=out[:num_rows], mode="clip")
    else:
        out[:num_rows, width:] = NULL_BLOCK
        out[:num_rows, :width] = block_tables[table_rows]


def slots_of(tables: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Slot of each (row, position): int32, asserted to lie outside the null block."""
    block_ids = tables[rows, positions // block_size]
    assert (block_ids != NULL_BLOCK).all(), "a token has no block"
    return block_ids * np.int32(block_size) + positions % block_size


def _token_ids(rows: list[ScheduledRow]) -> list[int]:
    token_ids: list[int] = []
    for request, start, num_tokens, _, previous_index, _ in rows:
        if previous_index >= 0:
            token_ids.append(-1 - previous_index)
        elif num_tokens == 1:
            token_ids.append(request.token_ids[start])
        else:
            token_ids += request.token_ids[start : start + num_tokens]
    return token_ids


class ScoredChunk(NamedTuple):
    """Some tokens of a batch whose successors in the prompt are known."""

    request: Request
    start: int  # position in the prompt of the first of them
    first: int  # the same in the batch
    targets: list[int]  # the token after each


def scored_chunks(rows: list[ScheduledRow], size: int) -> list[ScoredChunk]:
    """The tokens of a batch whose logits give log-probabilities of prompt tokens, at most size at a time."""
    chunks, first = [], 0
    for request, start, num_tokens, _, _, _ in rows:
        end = min(start + num_tokens, request.num_prompt_tokens - 1) if request.is_scored else start
        for begin in range(start, end, size):
            targets = request.token_ids[begin + 1 : min(begin + size, end) + 1]
            chunks.append(ScoredChunk(request, begin, first + begin - start, targets))
        first += num_tokens
    return chunks


def pack_scored(chunk: ScoredChunk, size: int) -> np.ndarray:
    """int32 [1 + size]: where the chunk's first token is in the batch, then its targets, padded with zeros."""
    packed = np.zeros(1 + size, np.int32)
    packed[0] = chunk.first
    packed[1 : 1 + len(chunk.targets)] = chunk.targets
    return packed


class SamplingInputs(NamedTuple):
    """How each row's token is drawn; float fields travel as the bits of float32."""

    temperature: Any  # float32 [num_rows], 0 is greedy
    top_p: Any  # float32 [num_rows]
    min_p: Any  # float32 [num_rows]
    top_k: Any  # int32 [num_rows], at least 1; the vocabulary size or more keeps all
    seed_low: Any  # int32 [num_rows], the bits of a uint32
    seed_high: Any  # int32 [num_rows]
    position: Any  # int32 [num_rows], index in its sequence of the token to be drawn
    suppressed: Any  # int32 [num_rows, MAX_SUPPRESSED], ids that cannot be drawn; NO_TOKEN for none


POSITION = 6  # column of SamplingInputs.position
NUM_SAMPLING_INTS = 7 + MAX_SUPPRESSED


def pack_sampling(rows: list[ScheduledRow], num_rows: int) -> np.ndarray:
    """int32 [num_rows, NUM_SAMPLING_INTS], padded with greedy rows."""
    packed = np.zeros((num_rows, NUM_SAMPLING_INTS), np.int32)
    packed[:, 3] = 1
    for index, row in enumerate(rows):
        request = row.request
        if request.packed_params is None:
            request.packed_params = _pack_params(request)
        packed[index] = request.packed_params
        position = row.start + row.num_tokens
        packed[index, POSITION] = position
        if position - request.num_prompt_tokens >= request.params.min_tokens:
            packed[index, POSITION + 1 :] = NO_TOKEN
    return packed


def _pack_params(request: Request) -> np.ndarray:
    """A row of pack_sampling as it is while min_tokens are not reached, its position still 0."""
    params = request.params
    floats = np.array([0.0 if params.is_greedy else params.temperature, params.top_p, params.min_p], np.float32)
    seed = request.seed % 2**64
    top_k = params.top_k if params.top_k > 0 else NO_TOKEN
    words = np.array([top_k, seed % 2**32, seed >> 32, 0], np.uint32)
    suppressed = np.full(MAX_SUPPRESSED, NO_TOKEN, np.int32)
    ids = sorted(request.eos_token_ids | request.stop_token_ids)
    suppressed[: len(ids)] = ids
    return np.concatenate([floats.view(np.int32), words.view(np.int32), suppressed])


def needs_sampler(rows: list[ScheduledRow]) -> bool:
    """Whether the most likely token of the raw logits is not all that the batch wants."""
    return any(row.request.needs_sampler for row in rows if row.is_sampled)


def needs_logprobs(rows: list[ScheduledRow]) -> bool:
    """Whether any row wants log-probabilities."""
    return any(row.request.params.logprobs is not None for row in rows if row.is_sampled)
