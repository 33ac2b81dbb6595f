"""The bridge: a ScheduledBatch on the host becomes padded arrays for the device. Pure functions.

All integers of a step travel in one int32 array (a transfer costs more than its bytes), so pack and unpack share one
layout. Shapes come from a short list of StepShapes, compiled ahead.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.paged_attention.cascade import Piece, SharedPrefixes
from paxpage.engine.adjustments import BANNED_ALWAYS
from paxpage.engine.block_pool import NULL_BLOCK
from paxpage.engine.kv_cache_manager import BlockCopy, KVCacheManager
from paxpage.engine.request import Request
from paxpage.engine.sampling_params import ALL_LOGPROBS, MAX_STOP_TOKEN_IDS
from paxpage.engine.scheduler import ScheduledBatch, ScheduledRow

MAX_SUPPRESSED = MAX_STOP_TOKEN_IDS + 16  # stop tokens and the model's own ends of sequence
NO_TOKEN = 2**31 - 1  # past every vocabulary: a scatter with mode="drop" leaves it out


class StepShape(NamedTuple):
    """Padded size of a step. With num_tokens == num_rows every row has one query: a decode step."""

    num_tokens: int
    num_rows: int
    blocks_per_row: int
    max_pieces: int = 0  # of shared prefixes; 0: the step takes none

    @property
    def is_decode(self) -> bool:
        """Whether each row has exactly one query."""
        return self.num_tokens == self.num_rows

    @property
    def num_ints(self) -> int:
        """Length of the packed array."""
        num_shared = sum(map(math.prod, self.shared_shapes))
        return 3 * self.num_tokens + 4 * self.num_rows + 1 + num_shared + self.num_rows * self.blocks_per_row

    @property
    def shared_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the fields of pallas_kernels.paged_attention.cascade.SharedPrefixes; none if the step takes none."""
        if not self.max_pieces:
            return ()
        return (self.max_pieces, len(Piece._fields)), (1,), *[(self.num_rows,)] * (len(SharedPrefixes._fields) - 2)


class StepInputs(NamedTuple):
    """One step's integers, int32. Padding tokens have slot 0 (null block); padding rows have seq_len 0."""

    token_ids: Any  # [num_tokens]; -1 - i stands for the token that row i of the step before has sampled
    positions: Any  # [num_tokens], index in the token's own sequence
    slot_mapping: Any  # [num_tokens], block_id * block_size + offset where the token's key and value go
    query_start_loc: Any  # [num_rows + 1], row r's tokens are query_start_loc[r] .. query_start_loc[r + 1] - 1
    seq_lens: Any  # [num_rows], tokens in the cache once this step has written its own
    logits_indices: Any  # [num_rows], each row's last token in this step
    row_order: Any  # [num_rows], the rows, those with the most keys of their own first
    block_tables: Any  # [num_rows, blocks_per_row]


def unpack(packed: Any, shape: StepShape) -> StepInputs:
    """Slices the packed int32 array (numpy, jax or traced) into its fields."""
    num_tokens, num_rows, blocks_per_row, _ = shape
    lengths = (num_tokens, num_tokens, num_tokens, num_rows + 1, num_rows, num_rows, num_rows)
    ends = list(itertools.accumulate(lengths))
    fields = [packed[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return StepInputs._make([*fields, packed[-num_rows * blocks_per_row :].reshape(num_rows, -1)])


def unpack_shared(packed: Any, shape: StepShape) -> list[Any]:
    """The fields of SharedPrefixes, which stand before the block tables; none if the step takes none."""
    lengths = list(map(math.prod, shape.shared_shapes))
    end = shape.num_ints - shape.num_rows * shape.blocks_per_row
    starts = itertools.accumulate(lengths, initial=end - sum(lengths))
    parts = zip(starts, lengths, shape.shared_shapes, strict=False)
    return [packed[start : start + length].reshape(size) for start, length, size in parts]


def pack(
    batch: ScheduledBatch, shape: StepShape, manager: KVCacheManager, shared: Sequence[np.ndarray] | None = None
) -> np.ndarray:
    """Writes a batch into a packed int32 array of shape.num_ints, padded to shape.

    shared: SharedPrefixes of the batch, for a shape that takes them.
    """
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
    inputs.row_order[:] = np.argsort(_pack_shared(packed, shape, shared) - inputs.seq_lens, kind="stable")
    inputs.positions[:num_tokens] = positions
    inputs.slot_mapping[:num_tokens] = slots_of(inputs.block_tables, rows, positions, manager.block_size)
    if batch.has_scored:
        num_readonly = np.array([request.num_readonly_tokens for request in requests])[rows]
        inputs.slot_mapping[:num_tokens][positions < num_readonly] = NULL_BLOCK * manager.block_size
    return packed


def pack_nothing(shape: StepShape) -> np.ndarray:
    """A packed array of padding alone, which touches no block but the null block."""
    packed = np.zeros(shape.num_ints, np.int32)
    unpack(packed, shape).row_order[:] = np.arange(shape.num_rows)
    return packed


def _pack_shared(packed: np.ndarray, shape: StepShape, shared: Sequence[np.ndarray] | None) -> np.ndarray:
    """Writes shared prefixes, padded with zeros. Returns how many keys each row has in them."""
    fields = unpack_shared(packed, shape)
    for field, values in zip(fields, shared or (), strict=shared is not None):
        field[: len(values)] = values
    return fields[2] if fields else np.zeros(shape.num_rows, np.int32)


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


class AdjustedRows(NamedTuple):
    """Options of each row, and whether this is a step's first call; float fields travel as the bits of float32."""

    repetition: Any  # float32 [num_rows], 1 is none
    presence: Any  # float32 [num_rows]
    frequency: Any  # float32 [num_rows]
    is_restricted: Any  # int32 [num_rows], 1: only tokens that have an entry may come
    previous: Any  # int32 [num_rows], row of the step before whose token the host does not know yet; -1: it knows all


class AdjustedTokens(NamedTuple):
    """Entries, each for one token of one row, int32 [num_entries]; NO_TOKEN pads."""

    row: Any
    token_id: Any
    bias: Any  # float32
    count: Any  # 2 * times in the output that the host knows + whether in the prompt
    ban: Any  # IS_NO_BAN: the fields above count; BANNED_ALWAYS, or the token in flight that bans this one


IS_NO_BAN = BANNED_ALWAYS - 1
MIN_ENTRIES, ENTRIES_PER_ROW = 512, 128


def num_entries_of(num_rows: int) -> int:
    """How many entries one call takes; a step with more makes several calls."""
    return max(MIN_ENTRIES, ENTRIES_PER_ROW * num_rows)


def num_adjusting_ints(num_rows: int) -> int:
    """Length of each of pack_adjustments' arrays."""
    return 1 + len(AdjustedRows._fields) * num_rows + len(AdjustedTokens._fields) * num_entries_of(num_rows)


def pack_adjustments(rows: list[ScheduledRow], num_rows: int) -> list[np.ndarray]:
    """Arrays of num_adjusting_ints(num_rows), one for each call of sampler.adjust: int32.

    [whether it is the first call, AdjustedRows, AdjustedTokens]. Bans come after all other entries.
    """
    options = np.zeros((len(AdjustedRows._fields), num_rows), np.int32)
    options[:3].view(np.float32)[0] = 1
    options[4] = -1
    indices: list[int] = []
    parts, bans = [NO_ENTRIES], []
    for index, row in enumerate(rows):
        adjustments = row.request.adjustments
        if adjustments is None or not row.is_sampled:
            continue
        options[:4, index] = adjustments.options
        # By now the host may know the token that was on its way when the row was scheduled.
        has_pending = row.previous_index >= 0 and len(row.request.token_ids) == row.start
        options[4, index] = row.previous_index if has_pending else -1
        indices.append(index)
        parts.append(adjustments.entries())
        bans += [(index, *ban) for ban in adjustments.bans(has_pending=has_pending)]
    entries = _join_entries(indices, parts, bans, num_entries_of(num_rows))
    return [
        np.concatenate([[np.int32(place == 0)], options.ravel(), call.ravel()]) for place, call in enumerate(entries)
    ]


NO_ENTRIES = np.zeros((3, 0), np.int32)


def _join_entries(
    indices: list[int], parts: list[np.ndarray], bans: list[tuple[int, int, int]], size: int
) -> list[np.ndarray]:
    """AdjustedTokens of each call, int32 [5, size]. parts: an empty one, then that of each row of indices."""
    num_set = sum(part.shape[1] for part in parts)
    num_calls = max(1, -(-(num_set + len(bans)) // size))
    entries = np.full((len(AdjustedTokens._fields), num_calls * size), NO_TOKEN, np.int32)
    entries[0, :num_set] = np.repeat(np.array(indices, np.int32), [part.shape[1] for part in parts[1:]])
    np.concatenate(parts, axis=1, out=entries[1:4, :num_set])
    entries[4, :num_set] = IS_NO_BAN
    if bans:
        entries[[0, 1, 4], num_set : num_set + len(bans)] = np.array(bans, np.int32).T
    return np.split(entries, num_calls, axis=1)


def num_mask_words(vocab_size: int) -> int:
    """Words of 32 bits of a mask over the vocabulary; the last has at least one bit that is no token's."""
    return vocab_size // 32 + 1


def needs_masks(rows: list[ScheduledRow]) -> bool:
    """Whether a grammar says what some row's next token may be."""
    return any(row.request.grammar is not None for row in rows if row.is_sampled)


def needs_adjusting(rows: list[ScheduledRow]) -> bool:
    """Whether any row's logits are changed before its token is drawn."""
    return any(row.request.adjustments is not None for row in rows if row.is_sampled)


def needs_sampler(rows: list[ScheduledRow]) -> bool:
    """Whether the most likely token of the raw logits is not all that the batch wants."""
    return any(row.request.needs_sampler for row in rows if row.is_sampled)


def needs_logprobs(rows: list[ScheduledRow]) -> bool:
    """Whether any row wants log-probabilities."""
    return any(row.request.params.logprobs is not None for row in rows if row.is_sampled)


def needs_logits(rows: list[ScheduledRow], num_top: int) -> bool:
    """Whether any row wants more log-probabilities than the num_top that the sampler gives."""
    wanted = (row.request.params.logprobs for row in rows if row.is_sampled)
    return any(num is not None and (num == ALL_LOGPROBS or num > num_top) for num in wanted)
