"""Offline use: LLM.generate and LLM.chat over an engine in this process."""

import contextlib
import gc
import itertools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from flax import nnx
from tqdm import tqdm

from paxpage.config import EngineConfig, require
from paxpage.engine.build import build_engine
from paxpage.engine.engine import Engine, PreparedRequest
from paxpage.engine.kv_cache_manager import BlockReport
from paxpage.engine.sampling_params import SamplingParams
from paxpage.engine.served_model import Model
from paxpage.models.registry import Params, split
from paxpage.outputs import RequestOutput
from paxpage.prompts import render_chat

FROZEN_BY_PYTHON = 1000  # objects, more than the interpreter itself puts out of the collector's sight
SELDOM = (50_000, 20, 100)  # of gc.set_threshold: how many new objects are looked through at once, how often others
Message = dict[str, Any]
Prompts = str | dict[str, Any] | Sequence[str | dict[str, Any]]  # a dict has one key, "prompt_token_ids" or "prompt"


class LLM:
    """A model and its engine, in this process.

    model: a folder, a GGUF file or a hub name; a ModelConfig together with params; or an NNX module that meets
    paxpage.models.protocol, whose arrays are used where they lie. params: a pytree in the layout of
    models.registry.abstract_params, used without a copy in place of the checkpoint's. tokenizer: a path, or a
    transformers tokenizer. config: an EngineConfig for everything else; the other arguments are its fields, for those
    who know them from vLLM, and may not be given beside it. Threads may share an LLM: calls are served in turn.

        with LLM("path/to/model") as llm:
            outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
            print(outputs[0].outputs[0].text)
    """

    def __init__(
        self,
        model: Model,
        *,
        tokenizer: Any = None,
        params: Params | None = None,
        dtype: str = "auto",
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        num_blocks: int | None = None,
        enable_prefix_caching: bool = True,
        enable_cascade_attention: bool = True,
        tensor_parallel_size: int = 1,
        load_format: str = "auto",
        async_scheduling: bool | None = None,
        max_logprobs: int = 20,
        compilation_cache_dir: str | None = None,
        show_progress: bool = True,
    ) -> None:
        config = EngineConfig(
            dtype=dtype,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            enable_cascade_attention=enable_cascade_attention,
            tensor_parallel_size=tensor_parallel_size,
            load_format=load_format,
            async_scheduling=async_scheduling,
            max_logprobs=max_logprobs,
            compilation_cache_dir=compilation_cache_dir,
        )
        self.engine: Engine = build_engine(
            model, config, params=params, tokenizer=tokenizer, show_progress=show_progress
        )
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._is_closed = False

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts; one RequestOutput for each, in order.

        prompts: a str, {"prompt_token_ids": [...]}, or a list of these. sampling_params: one for all or one for each.
        Everything is checked before anything runs: ValueError names what is wrong. If interrupted (Ctrl-C too), the
        requests are aborted and the LLM stays usable.
        """
        each_prompt = _list_of_prompts(prompts)
        each_params = self._params_of_each(sampling_params, len(each_prompt))
        pairs = zip(each_prompt, each_params, strict=True)
        with without_old_garbage():
            requests = [self.engine.prepare(self._next_id(), *pair, is_streamed=False) for pair in pairs]
            return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Like generate, over conversations put through the tokenizer's chat template.

        messages: one conversation ([{"role": "user", "content": "Hi"}, ...]) or a list of conversations. tools:
        functions that the template may tell the model of, in OpenAI's form.
        """
        tokenizer = self.engine.tokenizer
        require(
            tokenizer is not None, "messages", "a conversation", "prompts of token ids: this model has no tokenizer"
        )
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        require(is_list, "messages", messages, "a list of messages, or a list of such lists")
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [
            {
                "prompt_token_ids": render_chat(
                    tokenizer,
                    list(conversation),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template=chat_template,
                    tools=tools,
                    check_text=self.engine.check_text,
                )
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def set_params(self, params: Params | nnx.Module) -> None:
        """Goes on with other weights, as between the steps of a training loop: nothing is compiled or copied.

        params: of the names, shapes and dtypes of those before, or an NNX module that holds such. The prefix cache is
        reset. ValueError names what differs. A module that was served and is changed in place has new arrays: give it
        here again. Arrays that are served must not be donated to another function.
        """
        with self._lock:
            self._check_open()
            self.engine.set_params(split(params)[1] if isinstance(params, nnx.Module) else params)

    def reset_prefix_cache(self) -> None:
        """Forgets what finished requests have left in the cache: the next ones compute everything themselves."""
        with self._lock:
            self.engine.reset_prefix_cache()

    def explain_cache(self, prompt: str | dict[str, Any]) -> list[BlockReport]:
        """Why a prompt would, or would not, be found in the prefix cache now: a report for each of its full blocks.

        Verdicts: "hit"; "differs" (with the block found and the index of the first token that differs); "evicted" (it
        was there and has been forgotten); "miss" (never seen); "off".
        """
        with self._lock:
            prepared = self.engine.prepare("explain", prompt, SamplingParams(max_tokens=1))
            return self.engine.explain_cache(prepared)

    def close(self) -> None:
        """Gives the weights' and the cache's device memory back to JAX's pool, for the rest of this process.

        jax.local_devices()[0].memory_stats() shows it. Other processes get the memory when this one ends: JAX's
        allocator keeps what it has taken. Afterwards the LLM cannot be used. Closing twice does nothing.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self.engine.close()
                self.engine.runner.join()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this LLM is closed")

    def _next_id(self) -> str:
        return str(next(self._ids))

    def _params_of_each(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or SamplingParams()] * num_prompts
        is_list = isinstance(sampling_params, Sequence)
        are_params = is_list and all(isinstance(params, SamplingParams) for params in sampling_params)
        require(are_params, "sampling_params", sampling_params, "a SamplingParams, a list of these, or None")
        is_each = len(sampling_params) == num_prompts
        require(is_each, "sampling_params", f"{len(sampling_params)} of them", f"one, or one for each of {num_prompts}")
        return sampling_params

    def _run(self, requests: list[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        with self._lock:
            self._check_open()
            with interrupts_between_steps() as let_interrupts_through:
                try:
                    for request in requests:
                        self.engine.submit(request)
                    return self._drain(requests, use_tqdm, let_interrupts_through)
                finally:
                    self.engine.abort([request.request_id for request in requests])

    def _drain(
        self, requests: list[PreparedRequest], use_tqdm: bool, let_interrupts_through: Callable[[], None]
    ) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        num_tokens = 0
        with tqdm(total=len(requests), desc="generating", unit="request", disable=not use_tqdm) as bar:
            while self.engine.has_unfinished_requests():
                let_interrupts_through()
                for delta in self.engine.step():
                    if delta.output is not None:
                        outputs[delta.request_id] = delta.output
                        num_tokens += sum(len(sample.token_ids) for sample in delta.output.outputs)
                        bar.set_postfix_str(f"{num_tokens:,} tokens", refresh=False)
                        bar.update()
        return [outputs[request.request_id] for request in requests]


@contextlib.contextmanager
def without_old_garbage() -> Iterator[None]:
    """Within it, Python looks for garbage only among what is made within it, and seldom.

    Looking through all that JAX and a model have made takes a third of a second, in the middle of some step; through
    what is made for the caller, half of the time that making it takes. What others have frozen for good stays so.
    """
    is_ours, thresholds = gc.get_freeze_count() < FROZEN_BY_PYTHON, gc.get_threshold()
    if is_ours:
        gc.freeze()
        gc.set_threshold(*(map(max, thresholds, SELDOM) if thresholds[0] else thresholds))  # 0: never
    try:
        yield
    finally:
        if is_ours:
            gc.set_threshold(*thresholds)
            gc.unfreeze()


@contextlib.contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Within it, Ctrl-C waits until the function that it gives is called: cutting a step in two would lose blocks.

    A second Ctrl-C does not wait. Signals come to the main thread alone; in others, or where SIGINT has no handler in
    Python, nothing is changed.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    held: list[FrameType | None] = []

    def hold(signal_number: int, frame: FrameType | None) -> None:
        if held:
            held.clear()
            handler(signal_number, frame)
        else:
            held.append(frame)

    def let_through() -> None:
        if held:
            handler(signal.SIGINT, held.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, handler)
        let_through()


def _list_of_prompts(prompts: Prompts) -> list[str | dict[str, Any]]:
    allowed = 'str, {"prompt_token_ids": [...]} or a list of these'
    require(isinstance(prompts, Iterable), "prompts", prompts, allowed)
    prompts = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
    for prompt in prompts:
        require(isinstance(prompt, (str, dict)), "prompts", prompt, allowed)
    return prompts
