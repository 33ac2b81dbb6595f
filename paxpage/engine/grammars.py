"""Grammars of structured outputs, through llguidance: compiled for a tokenizer, followed token by token, as masks.

All of it is the host's. A grammar's state is a function of the output's tokens alone, so nothing is to be done for it
when a request is preempted, computed again, or finds its prompt in the prefix cache; each sample has its own.
"""

import functools
import importlib.util
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple

import numpy as np

from paxpage.config import require
from paxpage.engine.batch import num_mask_words
from paxpage.engine.request import FinishReason, Request, RequestStatus
from paxpage.engine.scheduler import ScheduledRow
from paxpage.engine.structured_outputs import WHITE_SPACE, GrammarSource, StructuredOutputsParams

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 10.0  # llguidance's own limits end everything that was tried within 1 s
NUM_COMPILE_THREADS = 2
MAX_KEPT_GRAMMARS = 64
MAX_LEXER_STATES = 20_000  # of one sample, 1 to 2 KiB each; a schema of 45 properties does with 2,000
MAX_MESSAGE_CHARS = 300
ALL_ALLOWED = 2**32 - 1
MISSING = "nothing: llguidance is not installed (pip install 'paxpage[structured]')"


class Vocabulary(NamedTuple):
    """A tokenizer as llguidance has it."""

    tokenizer: Any  # LLTokenizer
    executor: Any  # LLExecutor
    end_id: int  # the token whose bit in a mask says that the output may end
    num_words: int  # uint32 of a mask of its own
    size: int  # of the model's vocabulary


class GrammarState:
    """One sample's place in its grammar."""

    def __init__(self, matcher: Any, allowed: np.ndarray | None) -> None:
        """allowed: a mask of the tokens that the request's other options leave, None for all."""
        self.matcher = matcher
        self.allowed = allowed
        self.finish_reason: FinishReason | None = None  # STOP at the grammar's end, ERROR when it cannot go on
        self.error: str | None = None

    def accept(self, token_id: int) -> bool:
        """Takes a token of text in. False: it is none of the output's, which has ended before it."""
        if self.finish_reason is not None:
            return False
        if not self.matcher.consume_token(token_id):
            self.fail(_message(self.matcher))
            return False
        if self.matcher.is_stopped():
            self.finish_reason = FinishReason.STOP
        return True

    def fail(self, message: str) -> None:
        """Ends the sample, and nothing else."""
        self.finish_reason, self.error = FinishReason.ERROR, f"structured_outputs cannot be followed: {message}"


class Grammar:
    """A compiled grammar, of which samples take copies."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def start(self, request: Request) -> GrammarState:
        """The state before a request's first output token."""
        ids = request.params.allowed_token_ids
        allowed = None if ids is None else token_mask(ids, self._vocabulary.size)
        return GrammarState(self._matcher.deep_copy(), allowed)


class GrammarCompiler:
    """Compiles grammars for one model, each once while it is kept. Threads may share it."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """tokenizer: a transformers tokenizer, or None. vocab_size: width of the model's logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._kept: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_COMPILE_THREADS, thread_name_prefix="grammar")

    def load(self) -> None:
        """Reads the tokenizer, so that the first request need not wait for that; nothing if there is none to read.

        If it cannot be read the log says so, and requests are refused.
        """
        if self._tokenizer is None or importlib.util.find_spec("llguidance") is None:
            return
        try:
            with self._lock:
                _ = self._vocabulary
        except ValueError as error:
            logger.warning("%s", error)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of params; waits up to COMPILE_TIMEOUT_S. Raises ValueError saying why there is none."""
        source = params.source
        require(self._tokenizer is not None, "structured_outputs", source.kind, "None: this model has no tokenizer")
        is_installed = importlib.util.find_spec("llguidance") is not None
        require(is_installed, "structured_outputs", source.kind, MISSING)
        with self._lock:
            vocabulary, grammar = self._vocabulary, self._kept.get(source)
        if grammar is None:
            compiling = self._threads.submit(compile_grammar, source, vocabulary)
            try:
                grammar = compiling.result(COMPILE_TIMEOUT_S)
            except FutureTimeoutError:
                compiling.cancel()
                raise _refusal(source, f"compiling it takes longer than {COMPILE_TIMEOUT_S:g} s") from None
        self._keep(source, grammar)
        return grammar

    def masks(self, rows: Sequence[ScheduledRow], num_rows: int) -> np.ndarray:
        """uint32 [num_rows, num_mask_words]: bit i of row r is set if its next token may be i.

        Rows without a grammar have all set. The host must know all tokens of the rows' requests. A sample whose grammar
        has come to its end, or cannot go on, is marked as ending before its next token. The engine's thread alone may
        call it.
        """
        vocabulary = self._vocabulary
        masks = np.full((num_rows, vocabulary.num_words), ALL_ALLOWED, np.uint32)
        followed = [(index, row.request, grammar_of(row)) for index, row in enumerate(rows)]
        jobs = [(state.matcher, index) for index, _, state in followed if state is not None]
        if jobs:
            vocabulary.executor.unsafe_compute_mask_ptr(jobs, masks.ctypes.data, masks[0].nbytes, num_rows)
        word, bit = divmod(vocabulary.end_id, 32)
        may_end = masks[:, word] >> bit & 1
        masks = np.ascontiguousarray(masks[:, : num_mask_words(vocabulary.size)])
        for index, request, state in followed:
            if state is not None:
                _set_bits(masks[index], (vocabulary.end_id,), 0)
                masks[index, -1] &= (1 << vocabulary.size % 32) - 1  # past the model's vocabulary
                finish_mask(state, request, masks[index], may_end=bool(may_end[index]))
        return masks

    def close(self) -> None:
        """Forgets all grammars."""
        with self._lock:
            self._kept.clear()

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return read_vocabulary(self._tokenizer, self._vocab_size)

    def _keep(self, source: GrammarSource, grammar: Grammar) -> None:
        with self._lock:
            self._kept[source] = grammar
            self._kept.move_to_end(source)
            if len(self._kept) > MAX_KEPT_GRAMMARS:
                self._kept.popitem(last=False)


def grammar_of(row: ScheduledRow) -> GrammarState | None:
    """What chooses among the row's next tokens; None if there is no grammar, or no token to come."""
    state, is_over = row.request.grammar, not row.is_sampled or row.request.status is RequestStatus.FINISHED
    assert state is None or isinstance(state, GrammarState)
    return None if is_over else state


def finish_mask(state: GrammarState, request: Request, mask: np.ndarray, *, may_end: bool) -> None:
    """Adds to a row what llguidance does not know: where a request ends, and what else it allows.

    mask: uint32 [num_mask_words], the grammar's tokens of text, changed in place. may_end: whether the output may end
    here: then, and only then, ends of sequence may come, and stop tokens even where they are no text of the grammar's.
    """
    if state.matcher.is_error():
        state.fail(_message(state.matcher))
    _set_bits(mask, request.eos_token_ids, int(may_end))
    if may_end and request.num_output_tokens + 1 >= request.min_tokens:
        _set_bits(mask, request.stop_token_ids, 1)
    if state.allowed is not None:
        mask &= state.allowed
    if np.count_nonzero(mask) == 0:  # a third of the time of any()
        if may_end:
            state.finish_reason = FinishReason.STOP
        elif state.error is None:
            state.fail("no token is left that may come")
    if state.finish_reason is not None:  # whatever is drawn will be dropped
        mask[:] = ALL_ALLOWED


def token_mask(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """uint32 [num_mask_words] with the bits of these tokens set."""
    mask = np.zeros(num_mask_words(vocab_size), np.uint32)
    _set_bits(mask, token_ids, 1)
    return mask


def _set_bits(mask: np.ndarray, token_ids: Iterable[int], value: int) -> None:
    for token_id in token_ids:
        word, bit = divmod(token_id, 32)
        if word < len(mask):
            mask[word] = int(mask[word]) & ~(1 << bit) | value << bit


def read_vocabulary(tokenizer: Any, vocab_size: int) -> Vocabulary:
    """A transformers tokenizer for llguidance. Seconds with a large one, most of them under Python's lock.

    Of its special tokens one stands for the output's end in masks; none can come as text. ValueError if it cannot be
    read, or has none.
    """
    from llguidance import LLExecutor, LLTokenizer

    candidates = [token_id for token_id in (tokenizer.eos_token_id, *tokenizer.all_special_ids) if token_id is not None]
    require(len(candidates) > 0, "structured_outputs", "given", "None: this model's tokenizer has no special tokens")
    size = max(vocab_size + 1, len(tokenizer))  # 1 more, for the number of words to be the one of num_mask_words
    try:
        read = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=size, eos_token=candidates[:1])
    except Exception as error:  # whatever Rust makes of it
        raise ValueError(f"structured_outputs cannot be had with this model's tokenizer: {error}") from error
    return Vocabulary(read, LLExecutor(), candidates[0], -(-read.vocab_size // 32), vocab_size)


def compile_grammar(source: GrammarSource, vocabulary: Vocabulary) -> Grammar:
    """Compiles a grammar and its first mask, as far as llguidance's limits let it. ValueError saying why not."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(vocabulary.tokenizer, _grammar_text(source), log_level=0, limits=limits)
    mask = np.zeros(vocabulary.num_words, np.uint32)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        raise _refusal(source, _message(matcher))
    if not mask.any():
        raise _refusal(source, "no output matches it")
    return Grammar(matcher, vocabulary)


def _grammar_text(source: GrammarSource) -> str:
    """In llguidance's own form."""
    from llguidance import LLMatcher, grammar_from

    try:
        if source.kind in ("json", "json_object"):
            has_options = '"x-guidance"' in source.text  # llguidance's own, which say what white space there may be
            return LLMatcher.grammar_from_json_schema(
                source.text, defaults=None if has_options else {"whitespace_pattern": WHITE_SPACE}
            )
        return grammar_from(source.kind, source.text)  # type: ignore[arg-type]
    except Exception as error:  # of a schema that is nested too deeply, or of the translation from GBNF
        raise _refusal(source, str(error)) from error


def _refusal(source: GrammarSource, reason: str) -> ValueError:
    return ValueError(f"structured_outputs.{source.kind} cannot be followed: {reason}")


def _message(matcher: Any) -> str:
    """Why a matcher has failed, in one short line."""
    lines = [line.strip() for line in matcher.get_error().splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("<"))[:MAX_MESSAGE_CHARS]
