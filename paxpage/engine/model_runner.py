"""Sole owner of what lives on the device: params, cache, and the compiled step functions."""

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.paged_attention import cascade
from pallas_kernels.paged_attention.api import choose_backend
from pallas_kernels.paged_attention.config import Geometry
from paxpage.engine import batch as batches
from paxpage.engine import kv_cache, sampler, step
from paxpage.engine.batch import StepShape
from paxpage.engine.executables import Compiler, Program
from paxpage.engine.onward import Onward
from paxpage.engine.programs import Jobs, Programs
from paxpage.engine.sharing import PrefixFinder
from paxpage.models.registry import Params

# Padded numbers of rows and of tokens, by platform; few, since each is seconds of compilation. On a CPU
# each costs half a second of a warm start too; on a GPU padding costs time from 128 tokens on (BUILD_NOTES.md,
# 2026-11-30, has a step's time by number of tokens).
ROW_BUCKETS = {"cpu": (1, 8, 32, 128), "gpu": (1, 4, 8, 32, 64, 128, 160, 192, 224, 256, 512)}
TOKEN_BUCKETS = {"cpu": (64, 256, 1024), "gpu": (64, 128, 256, 320, 384, 512, 768, 1024, 2048, 4096, 8192)}
# Rows of decode steps that read shared prefixes once: fewer than ROW_BUCKETS, as what they save outweighs some padding.
SHARING_BUCKETS = {"cpu": (), "gpu": (64, 128, 192, 256, 512)}
MAX_SHARING_TOKENS = 4096  # of a mixed step; what prefixes give is kept in float32, 45 KiB for a token of 8B
# Whether there is a sampler without log-probabilities too: on a CPU they cost next to nothing beside the draw.
SAMPLER_VARIANTS = {"cpu": (True,), "gpu": (False, True)}
# Whether only the largest steps, in which every batch fits, and the smallest decode step are compiled before the first
# request. On a GPU all are: compiling times kernels there, which wants a quiet device.
STARTS_WITH_LARGEST = {"cpu": True, "gpu": False}
# Threads that compile. On a GPU they wait for their turn to time kernels, and one that has to wait for a thread, too,
# ends last: the four steps that came last of 24 ended 15 s after the others (BUILD_NOTES.md, 2026-11-30).
THREADS_PER_CORE = {"cpu": 1, "gpu": 2}
# How often each step runs on padding before the first request: what a device does when a program runs first, such as
# loading kernels and making a graph of them, is then over. A CPU has nothing of the kind to do.
REHEARSALS = {"cpu": 0, "gpu": 2}
# Rows for which there is no sampler, and none of what goes with it: a step of the next number costs the same there.
UNSAMPLED_ROWS = {"cpu": (), "gpu": (4,)}


def step_shapes(
    platform: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    blocks_per_row: int,
    *,
    sharing_rules: cascade.Rules | None = None,
) -> list[StepShape]:
    """Every padded size that a step can have, smallest first: decode shapes, then mixed ones.

    platform: a key of ROW_BUCKETS. A mixed shape has more tokens than rows, so the two kinds cannot be confused.
    sharing_rules: also decode shapes for batches with shared prefixes, which the mixed ones then take too. Where there
    are none that costs a kernel a layer: of a decode step an estimated 2%, worth shapes of its own, of a mixed one 1%.
    """
    rows = [n for n in ROW_BUCKETS[platform] if n < max_num_seqs] + [max_num_seqs]
    sharing = [n for n in SHARING_BUCKETS[platform] if n < max_num_seqs] + [max_num_seqs] if sharing_rules else []
    most = max(max_num_batched_tokens, max_num_seqs + 1)
    mixed = [(n, max(r for r in rows if r < n)) for n in TOKEN_BUCKETS[platform] if n < most] + [(most, max_num_seqs)]
    decode = [StepShape(n, n, blocks_per_row) for n in rows]
    decode += [StepShape(n, n, blocks_per_row, cascade.MAX_PIECES) for n in sharing]

    def pieces_of(num_tokens: int) -> int:
        if sharing_rules is None or num_tokens > MAX_SHARING_TOKENS:
            return 0
        return cascade.max_pieces(num_tokens, sharing_rules)

    return decode + [StepShape(*size, blocks_per_row, pieces_of(size[0])) for size in mixed]


def sampled_shapes(shapes: Iterable[StepShape], platform: str) -> list[StepShape]:
    """Those of shapes, whose last has the most rows, that a batch may take which needs a sampler."""
    shapes = list(shapes)
    unsampled = set(UNSAMPLED_ROWS[platform]) - {shapes[-1].num_rows}
    return [shape for shape in shapes if not (shape.is_decode and shape.num_rows in unsampled)]


def choose_shape(shapes: Iterable[StepShape], batch: batches.ScheduledBatch, *, has_shared: bool = False) -> StepShape:
    """The smallest shape that a batch fits in; decode shapes are for batches of one token a row.

    has_shared: of a decode batch, whether rows share beginnings.
    """
    is_decode, num_tokens, num_rows = batch.is_decode, batch.num_tokens, len(batch.rows)
    return next(
        shape
        for shape in shapes
        if shape.is_decode == is_decode
        and (not is_decode or (shape.max_pieces > 0) == has_shared)
        and shape.num_tokens >= num_tokens
        and shape.num_rows >= num_rows
    )


COPY = "copy"  # where ModelRunner keeps the compiled step.copy_blocks
ADJUST = "adjust"  # and, with a number of rows, sampler.adjust
MASK = "mask"  # with a number of rows, sampler.mask
SCORE, STATES = "score", "states"  # step.score; with a number of tokens, step.states_to_score


class Scored(NamedTuple):
    """Log-probabilities of a prompt's tokens, a row for each of chunk.targets."""

    chunk: batches.ScoredChunk
    values: Any  # what sampler.describe gives, on the device until it is fetched


class HostTokens(NamedTuple):
    """What came of a step, on the host."""

    token_ids: list[int]
    described: Sequence[np.ndarray] | None  # what sampler.describe gives, when somebody asked for it
    scored: list[Scored]
    logits: np.ndarray | None = None  # of every row, when somebody wants more of them than the sampler describes


class Started(NamedTuple):
    """A step whose forward pass is on its way, and which has no tokens yet."""

    batch: batches.ScheduledBatch
    output: step.StepOutput
    scored: list[Scored]
    has_sampler: bool  # its tokens are a sampler's, not the forward pass's greedy ones
    has_buffer: bool  # its logits lie where those of the next step of as many rows may


class Launched(NamedTuple):
    """A step in flight."""

    token_ids: jax.Array  # int32 [max_rows]
    details: sampler.SampledTokens | None  # when somebody wants log-probabilities
    scored: list[Scored]
    logits: jax.Array | None = None

    def is_running(self) -> bool:
        """Whether the device has not finished it yet; does not wait."""
        return not self.token_ids.is_ready()  # type: ignore[attr-defined]


class ModelRunner:
    """Runs scheduled batches. The cache is donated to each step and replaced by what the step returns.

    launch() returns as soon as the step is on its way; its tokens stay on the device and feed the next launch, fetch()
    brings them to the host. After a step that raised, the cache may be gone: call reset() and compute everything again.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        abstract_params: Params,
        layout: kv_cache.CacheLayout,
        shapes: Sequence[StepShape],
        *,
        platform: str,
        max_logprobs: int,
        vocab_size: int | None = None,
        sharing_rules: cascade.Rules | None = None,
    ) -> None:
        """sharing_rules: for shapes with max_pieces; None to look for no shared prefixes.

        Nothing is on the device before reset(), beside which warm_up() may run; then set_params()."""
        self.shapes = list(shapes)
        self.num_blocks = layout.num_blocks
        self.max_rows = max(shape.num_rows for shape in shapes)
        self.params: Params = {}
        self._leaves: list[jax.Array] = []  # of the params, as the step functions take them
        self._logits: dict[int, jax.Array] = {}  # the last logits by number of rows; each step writes over them
        self.cache: kv_cache.KVCache | None = None
        self.compiler = Compiler()  # another may be set before warm_up()
        self._graphdef = graphdef
        self._abstract_params = abstract_params
        self.layout = layout
        self._max_logprobs = max_logprobs
        self._known_vocab_size = vocab_size
        self._finder = None if sharing_rules is None else PrefixFinder(sharing_rules, MAX_SHARING_TOKENS)
        self._sampler_variants = SAMPLER_VARIANTS[platform]
        self._sampled_shapes = sampled_shapes(shapes, platform)
        self._num_rehearsals = REHEARSALS[platform]
        self._starts_with_largest = STARTS_WITH_LARGEST[platform]
        self._compiled = Programs(THREADS_PER_CORE[platform])
        self._previous: jax.Array | None = None  # the tokens of the last step launched
        self._onward = Onward()

    def set_params(self, params: Params) -> None:
        """Takes the params, not copied, in the place of those before."""
        self.params, self._leaves = params, jax.tree.leaves(params)

    @functools.cached_property
    def attention_backend(self) -> str:
        """The backend of attention in mixed steps, as far as the cache decides it; a kernel logs where it differs."""
        spec, dtype = self.layout.spec, self.layout.dtype
        heads = (spec.num_kv_heads, spec.num_kv_heads, spec.head_dim)
        return choose_backend(Geometry(*heads, self.layout.block_size, dtype, dtype), self.max_rows, is_decode=False)

    @functools.cached_property
    def vocab_size(self) -> int:
        """Width of the model's logits; the model is traced if nobody has said."""
        if self._known_vocab_size is not None:
            return self._known_vocab_size
        cache = kv_cache.abstract_cache(*self.layout)
        return step.vocab_size_of(self._graphdef, self._abstract_params, cache, self.shapes[0])

    def _compile(self, shape: StepShape) -> jax.stages.Compiled:
        cache = kv_cache.abstract_cache(*self.layout)
        sizes = (self.max_rows, self.vocab_size)
        model = step.StepModel(self._graphdef, self._abstract_params, cache, *sizes)
        return self.compiler.step(model, shape)

    @property
    def warmed_up(self) -> Future[None]:
        """Done when nothing is left to compile, or after close(); its exception is why something could not be."""
        return self._compiled.ended

    def failure(self) -> BaseException | None:
        """Why something could not be compiled; None as long as everything could."""
        return self._compiled.error()

    def begin_warm_up(self) -> None:
        """Begins to compile what takes no lowered step; does not wait. For when other processes lower the steps."""
        jobs = self._usual_jobs()
        self._compiled.begin({key: jobs[key] for key in jobs if not isinstance(key, StepShape)})

    def wait_for_begun(self) -> None:
        """Until begin_warm_up()'s programs are there: compiling may take device memory. warm_up() raises what fails."""
        self._compiled.wait()

    def warm_up(self, *, show_progress: bool, go_on: Callable[[], None] = lambda: None) -> None:
        """Compiles what answers any request that asks for nothing rare. go_on: as for Programs.compile."""
        jobs = self._usual_jobs()
        first = {key: jobs[key] for key in jobs if self._is_first(key)}
        self._compiled.compile(first, show_progress=show_progress, go_on=go_on)

    def rehearse(self) -> None:
        """Runs every step that is compiled on padding: first requests then do not wait for what only a first run does.

        After reset(), warm_up() and set_params(), and before any request.
        """
        for shape in filter(self._compiled.has, self.shapes * self._num_rehearsals):
            output, has_buffer = self._forward(shape, batches.pack_nothing(shape))
            if has_buffer:
                self._logits[shape.num_rows] = output.logits
        jax.block_until_ready(self.cache)

    def _forward(self, shape: StepShape, packed: np.ndarray | jax.Array) -> tuple[step.StepOutput, bool]:
        """Starts a step. Also, whether its logits lie where the next ones of as many rows may: then keep them."""
        logits = self._logits.pop(shape.num_rows, None)
        output, self.cache = self._compiled[shape](self._leaves, self.cache, packed, self._previous, logits)
        return output, logits is not None

    def warm_up_behind(self) -> None:
        """Leaves everything else to threads, what one small request takes first: see warmed_up. Does not wait."""
        jobs = self._usual_jobs()
        mixed = next(shape for shape in self.shapes if not shape.is_decode)
        late = {key: jobs[key] for key in (mixed, *jobs) if not self._is_first(key)}
        self._compiled.compile_behind(late | self._rare_jobs())

    def _usual_jobs(self) -> Jobs:
        """Steps, copies and samplers; the longest compilations first, as they are on a CPU."""
        steps = {shape: functools.partial(self._compile, shape) for shape in reversed(self.shapes)}
        copy = {COPY: self._compile_copy}
        return {**steps, **copy, **self._sampler_jobs(has_logprobs=self._sampler_variants[0])}

    def _is_first(self, key: Any) -> bool:
        """Whether the first request waits for it: everything, or the steps for batches of any size, and what one
        request decodes with."""
        if key == COPY or not self._starts_with_largest:
            return True
        rows = (self.max_rows, self.shapes[0].num_rows)
        if not isinstance(key, StepShape):
            return key[0] in rows
        return (key.is_decode and key.num_rows in rows) or key == self.shapes[-1]

    def _usable_shapes(self, *, has_sampler: bool) -> Sequence[StepShape]:
        """For a batch that needs a sampler or none; until everything is compiled, those that are."""
        shapes = self._sampled_shapes if has_sampler else self.shapes
        if self.warmed_up.done():
            return shapes
        has, variant = self._compiled.has, self._sampler_variants[0]
        return [shape for shape in shapes if has(shape) and (not has_sampler or has((shape.num_rows, variant)))]

    @property
    def _sampled_rows(self) -> list[int]:
        return sorted({shape.num_rows for shape in self._sampled_shapes})

    def _sampler_jobs(self, *, has_logprobs: bool) -> Jobs:
        rows = self._sampled_rows
        return {(n, has_logprobs): functools.partial(self._compile_sampler, n, has_logprobs) for n in rows}

    def _rare_jobs(self) -> Jobs:
        """What few requests ask for: changed or masked logits, log-probabilities if a sampler's own, scored prompts.

        None of it is needed to know how much memory steps take: build.sampling_bytes bounds that.
        """
        adjust = {(ADJUST, n): functools.partial(self._compile_adjust, n) for n in self._sampled_rows}
        mask = {(MASK, n): functools.partial(self._compile_mask, n) for n in self._sampled_rows}
        logprobs = [self._sampler_jobs(has_logprobs=variant) for variant in self._sampler_variants[1:]]
        mixed = [shape for shape in self.shapes if not shape.is_decode]
        states = {(STATES, s.num_tokens): functools.partial(self._compile_states, s) for s in mixed}
        score = {SCORE: functools.partial(self._compile_score, mixed[0])}
        return {**adjust, **mask, **{key: job for jobs in logprobs for key, job in jobs.items()}, **states, **score}

    def _hidden_like(self, shape: StepShape) -> jax.ShapeDtypeStruct:
        """A mixed step's hidden states, which its compiled step knows."""
        like = self._compiled[shape].out_info[0].hidden
        return jax.ShapeDtypeStruct(like.shape, like.dtype)

    def _compile_states(self, shape: StepShape) -> jax.stages.Compiled:
        packed = jax.ShapeDtypeStruct((1 + step.SCORED_PER_CALL,), jnp.int32)
        return self._compile_with(STATES, step.states_to_score, self._hidden_like(shape), packed)

    def _compile_score(self, shape: StepShape) -> jax.stages.Compiled:
        like = self._hidden_like(shape)
        states = jax.ShapeDtypeStruct((step.SCORED_PER_CALL, like.shape[1]), like.dtype)
        packed = jax.ShapeDtypeStruct((1 + step.SCORED_PER_CALL,), jnp.int32)
        num_top = min(self._max_logprobs, self.vocab_size)
        score = functools.partial(step.score, graphdef=self._graphdef, num_top=num_top)
        return self._compile_with(f"{SCORE} {num_top}", score, self._abstract_params, states, packed)

    def memory_analysis(self) -> dict[StepShape, Any]:
        """What the compiler says each compiled step takes, by shape."""
        return {shape: self._compiled[shape].memory_analysis() for shape in self.shapes}

    def launch(self, batch: batches.ScheduledBatch, manager: batches.KVCacheManager) -> Launched:
        """Starts one step that gives a token for every row; does not wait for it."""
        return self.draw(self.start(batch, manager))

    def start(self, batch: batches.ScheduledBatch, manager: batches.KVCacheManager) -> Started:
        """The first half of launch(): the forward pass. draw() comes before anything else is launched."""
        shared = self._finder.find(batch, manager) if self._finder else None
        has_sampler = batches.needs_sampler(batch.rows)
        shape = choose_shape(self._usable_shapes(has_sampler=has_sampler), batch, has_shared=shared is not None)
        packed: np.ndarray | jax.Array | None = self._onward.take(batch, shape, manager)
        if packed is None:
            packed = batches.pack(batch, shape, manager, shared if shape.max_pieces else None)
        for start in range(0, len(batch.copies), step.COPIES_PER_CALL):
            pairs = batches.pack_copies(batch.copies[start : start + step.COPIES_PER_CALL], step.COPIES_PER_CALL)
            self.cache = self._compiled[COPY](self.cache, pairs)
        output, has_buffer = self._forward(shape, packed)
        self._onward.keep(batch, shape, manager, output.advanced)
        scored = [self._score(chunk, output.hidden) for chunk in self._scored_chunks(batch)]
        return Started(batch, output, scored, has_sampler, has_buffer)

    def draw(self, started: Started, masks: np.ndarray | None = None) -> Launched:
        """The second half: the tokens. masks: uint32 [num_rows, num_mask_words], as engine.grammars makes them."""
        batch, output, scored, has_sampler, has_buffer = started
        launched = Launched(output.token_ids, None, scored)
        if has_sampler:
            launched = self._sample(batch, output.logits, scored, masks)
        num_rows = output.logits.shape[0]
        if has_buffer:
            self._logits[num_rows] = self._next_buffer(output.logits, is_kept=launched.logits is not None)
        self._previous = launched.token_ids
        for array in launched.details or launched[:1]:
            array.copy_to_host_async()
        return launched

    def _sample(
        self, batch: batches.ScheduledBatch, logits: jax.Array, scored: list[Scored], masks: np.ndarray | None
    ) -> Launched:
        """Starts the sampler, and before it what changes the logits that it draws from."""
        num_rows, has_logprobs = logits.shape[0], batches.needs_logprobs(batch.rows)
        params = batches.pack_sampling(batch.rows, num_rows)
        sampler_key = (num_rows, has_logprobs or False not in self._sampler_variants)
        adjusted = self._adjust(batch, logits)
        if masks is not None:
            adjusted = self._compiled[MASK, num_rows](adjusted, masks)
        sampled = self._compiled[sampler_key](logits, adjusted, params)
        is_whole = has_logprobs and batches.needs_logits(batch.rows, min(self._max_logprobs, self.vocab_size))
        details = sampled if has_logprobs else None
        return Launched(sampled.token_ids, details, scored, logits if is_whole else None)

    def _next_buffer(self, logits: jax.Array, *, is_kept: bool) -> jax.Array:
        """What the next step of as many rows may write its logits over; others than these while they are wanted."""
        return jnp.zeros(logits.shape, logits.dtype) if is_kept else logits

    def _adjust(self, batch: batches.ScheduledBatch, logits: jax.Array) -> jax.Array:
        """The logits to draw from: the same array if no row changes any."""
        adjusted, num_rows = logits, logits.shape[0]
        if batches.needs_adjusting(batch.rows):
            for packed in batches.pack_adjustments(batch.rows, num_rows):
                adjusted = self._compiled[ADJUST, num_rows](logits, adjusted, packed, self._previous)
        return adjusted

    def fetch(self, launched: Launched) -> HostTokens:
        """Waits for a step's tokens. Raises what the step raised."""
        token_ids = np.asarray(launched.token_ids).tolist()
        described = jax.device_get(launched.details[1:]) if launched.details else None
        scored = [part._replace(values=jax.device_get(part.values)) for part in launched.scored]
        logits = None if launched.logits is None else np.asarray(launched.logits)
        return HostTokens(token_ids, described, scored, logits)

    def _scored_chunks(self, batch: batches.ScheduledBatch) -> list[batches.ScoredChunk]:
        return batches.scored_chunks(batch.rows, step.SCORED_PER_CALL) if batch.has_scored else []

    def _score(self, chunk: batches.ScoredChunk, hidden: jax.Array | None) -> Scored:
        assert hidden is not None, "a prompt is scored in mixed steps"
        packed = batches.pack_scored(chunk, step.SCORED_PER_CALL)
        states = self._compiled[STATES, hidden.shape[0]](hidden, packed)
        return Scored(chunk, self._compiled[SCORE](self.params, states, packed))

    def reset(self) -> None:
        """A new cache of zeros, whatever became of the old one, and no step before the next one."""
        self.cache, self._logits, self._onward = None, {}, Onward()  # first, so that both need not fit
        self.cache = kv_cache.allocate(*self.layout)
        buffers = {rows: step.logits_buffer_of(rows, self.vocab_size) for rows in {s.num_rows for s in self.shapes}}
        self._logits = {rows: jnp.zeros(like.shape, like.dtype) for rows, like in buffers.items() if like is not None}
        self._previous = jnp.zeros((self.max_rows,), jnp.int32)

    def close(self) -> None:
        """Drops params, cache and compiled functions: their memory is JAX's to reuse in this process.

        A compilation may still be running: join() waits for it.
        """
        self.set_params({})
        self.cache, self._logits, self._onward = None, {}, Onward()
        self._compiled.close()

    def join(self) -> None:
        """Waits for the threads that compile; after close() they end with what they are at."""
        self._compiled.join()

    def _compile_sampler(self, num_rows: int, has_logprobs: bool) -> jax.stages.Compiled:
        num_top = min(self._max_logprobs, self.vocab_size) if has_logprobs else None
        logits = jax.ShapeDtypeStruct((num_rows, self.vocab_size), jnp.float32)
        packed = jax.ShapeDtypeStruct((num_rows, batches.NUM_SAMPLING_INTS), jnp.int32)
        run = functools.partial(sample_padded, num_top=num_top, max_rows=self.max_rows)
        return self._compile_with(f"sample {num_top} {self.max_rows}", run, logits, logits, packed)

    def _compile_adjust(self, num_rows: int) -> jax.stages.Compiled:
        logits = jax.ShapeDtypeStruct((num_rows, self.vocab_size), jnp.float32)
        packed = jax.ShapeDtypeStruct((batches.num_adjusting_ints(num_rows),), jnp.int32)
        previous = jax.ShapeDtypeStruct((self.max_rows,), jnp.int32)
        return self._compile_with(ADJUST, sampler.adjust, logits, logits, packed, previous)

    def _compile_copy(self) -> jax.stages.Compiled:
        cache = kv_cache.abstract_cache(*self.layout)
        lower = functools.partial(step.lower_copy, cache)
        program = Program(COPY, (cache, step.abstract_pairs()), lower, step.COMPILER_OPTIONS)
        return self.compiler.program(program)

    def _compile_with(self, name: str, function: Callable[..., Any], *likes: Any) -> jax.stages.Compiled:
        """name: with the shapes of likes, all that function depends on."""
        program = Program(name, likes, lambda: jax.jit(function).lower(*likes), step.UNTIMED_OPTIONS)
        return self.compiler.program(program)

    def _compile_mask(self, num_rows: int) -> jax.stages.Compiled:
        logits = jax.ShapeDtypeStruct((num_rows, self.vocab_size), jnp.float32)
        masks = jax.ShapeDtypeStruct((num_rows, batches.num_mask_words(self.vocab_size)), jnp.uint32)
        return self._compile_with(MASK, sampler.mask, logits, masks)


def sample_padded(
    logits: jax.Array, adjusted: jax.Array, packed: jax.Array, *, num_top: int | None, max_rows: int
) -> sampler.SampledTokens:
    """sampler.sample, its token_ids padded to the one length that every step takes them in."""
    tokens = sampler.sample(logits, adjusted, packed, num_top=num_top)
    return tokens._replace(token_ids=step.pad_rows(tokens.token_ids, max_rows))
