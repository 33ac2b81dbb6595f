"""Offline throughput and latency on this machine's GPU, with random weights and prompts of token ids.

    python scripts/bench_offline.py llama8b llama1b [--tests 123456] [--out FILE]

Prints one JSON line a result. Greedy, ends of sequence ignored, every figure the median of several repetitions.

1: 512 requests at once with ShareGPT-like lengths (scripts/workloads.py), output tokens a second.
2: one request, 128 tokens in, 256 out: ms a decode step, and the time to the first token.
3: 64 requests with 4000 tokens in common and 32 of their own, 128 out, nothing cached before: output tokens a second.
4: 64 requests of 1024 tokens in, 128 out: ms a decode step of 64 rows, and prefill tokens a second.
5: 256 of test 1's requests that arrive one by one (Poisson), at each of --rates a second: time to the first token, time
   between tokens (50th and 99th percentile), mean of a request's whole time divided by its number of tokens.
6: 256 requests of 448 tokens in, 128 out: ms a decode step of 256 rows at 512 tokens of context.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax

from paxpage import LLM, SamplingParams
from paxpage.engine.engine import Engine
from paxpage.outputs import CompletionDelta
from scripts.workloads import END_TOKEN_ID, FIRST_TOKEN_ID, WorkloadRequest, requests

SEED = 0
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama8b": COMMON
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"head_dim": 128, "rope_scaling": LLAMA3 | {"factor": 8.0}, "tie_word_embeddings": False},
    "llama1b": COMMON
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"head_dim": 64, "rope_scaling": LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True},
}


class Bench:
    """One model's engine and what is measured on it."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.args = args
        self.rng = np.random.default_rng([SEED, 7])
        started_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "config.json").write_text(json.dumps(CONFIGS[name]))
            self.llm = LLM(
                folder,
                load_format="dummy",
                dtype="bfloat16",
                max_num_seqs=args.max_num_seqs,
                max_model_len=4352,
                max_num_batched_tokens=args.max_num_batched_tokens,
                gpu_memory_utilization=0.9,
            )
        self.vocab_size = self.llm.engine.vocab_size
        blocks = self.llm.engine.stats().num_blocks_usable
        self.emit("setup", {"init_s": round(time.perf_counter() - started_s, 2), "num_blocks": blocks})

    def emit(self, test: str, fields: dict[str, Any]) -> None:
        """Prints one result."""
        line = json.dumps({"engine": "paxpage", "model": self.name, "test": test} | fields)
        print(line, flush=True)
        if self.args.out:
            with open(self.args.out, "a") as file:
                file.write(line + "\n")

    def prompt(self, num_tokens: int) -> list[int]:
        """Random token ids."""
        return self.rng.integers(FIRST_TOKEN_ID, min(self.vocab_size, END_TOKEN_ID), num_tokens).tolist()

    def seconds(self, prompts: list[list[int]], num_outputs: list[int]) -> float:
        """Time of one submission of everything, with nothing cached; checks that each gave its number of tokens."""
        self.llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in num_outputs]
        started_s = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        elapsed_s = time.perf_counter() - started_s
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == num_outputs, "a request gave another number of tokens than it was asked for"
        return elapsed_s

    def median(
        self, make: Callable[[], tuple[list[list[int]], list[int]]], repetitions: int
    ) -> tuple[float, list[float]]:
        """Median seconds, and all of them."""
        times = [self.seconds(*make()) for _ in range(repetitions)]
        return statistics.median(times), [round(t, 4) for t in times]

    def warm_up(self) -> None:
        """A few requests of mixed length, one full-width batch, one long prompt."""
        self.seconds([self.prompt(n) for n in (5, 40, 300, 1000)], [8, 16, 32, 8])
        self.seconds([self.prompt(64) for _ in range(self.args.max_num_seqs)], [8] * self.args.max_num_seqs)
        self.seconds([self.prompt(4000)], [8])

    def test_1(self) -> None:
        """Throughput."""
        work = requests(512, SEED, self.vocab_size)
        prompts, num_outputs = [r.prompt_token_ids for r in work], [r.num_output_tokens for r in work]
        meter, before = self.llm.engine.idle_meter, self.llm.engine.stats().num_steps
        meter.idle_s, meter.num_idle_launches = 0.0, 0
        median_s, times = self.median(lambda: (prompts, num_outputs), self.args.reps1)
        num_steps = (self.llm.engine.stats().num_steps - before) / self.args.reps1
        slots = self.llm.engine.slots
        result = {
            "secs": times,
            "out_tok_s": round(sum(num_outputs) / median_s, 1),
            "num_steps": num_steps,
            "ms_per_step": round(1e3 * median_s / num_steps, 3),
            "device_idle_percent_at_most": round(100 * meter.idle_s / sum(times), 2),
            "idle_launches_percent": round(100 * meter.num_idle_launches / (num_steps * self.args.reps1), 2),
            "waste_percent": round(100 * slots.waste_fraction, 2),
        }
        self.emit("1_offline_throughput", result)

    def test_2(self) -> None:
        """One request."""
        first_s, firsts = self.median(lambda: ([self.prompt(128)], [1]), self.args.reps)
        whole_s, times = self.median(lambda: ([self.prompt(128)], [256]), self.args.reps)
        step_ms = round(1e3 * (whole_s - first_s) / 255, 4)
        self.emit("2_single_latency", {"secs": times, "first_token_s": firsts, "ms_per_decode_step": step_ms})

    def test_3(self) -> None:
        """A shared prefix."""

        def make() -> tuple[list[list[int]], list[int]]:
            shared = self.prompt(4000)
            return [shared + self.prompt(32) for _ in range(64)], [128] * 64

        before = self.llm.engine.stats()
        median_s, times = self.median(make, self.args.reps)
        after = self.llm.engine.stats()
        num_hits = after.num_prefix_hits - before.num_prefix_hits
        share = num_hits / (after.num_prefix_queries - before.num_prefix_queries)
        result = {"secs": times, "out_tok_s": round(64 * 128 / median_s, 1), "cached_percent": round(100 * share, 2)}
        self.emit("3_shared_prefix", result)

    def test_4(self) -> None:
        """A batch of 64."""
        first_s, firsts = self.median(lambda: ([self.prompt(1024) for _ in range(64)], [1] * 64), self.args.reps)
        whole_s, times = self.median(lambda: ([self.prompt(1024) for _ in range(64)], [128] * 64), self.args.reps)
        step_ms = round(1e3 * (whole_s - first_s) / 127, 4)
        prefill = round(64 * 1024 / first_s, 1)
        result = {"secs": times, "prefill_s": firsts, "ms_per_decode_step": step_ms, "prefill_tok_s": prefill}
        self.emit("4_batch_decode", result)

    def test_5(self) -> None:
        """Arrivals one by one."""
        work = requests(512, SEED, self.vocab_size)[:256]
        for rate in map(float, self.args.rates.split(",")):
            self.llm.reset_prefix_cache()
            due_s = np.cumsum(np.random.default_rng([SEED, 5]).exponential(1 / rate, len(work)))
            result = Arrivals(self.llm.engine, work, due_s.tolist()).run()
            self.emit("5_poisson_arrivals", {"rate_req_s": rate, "n": len(work)} | result)

    def test_6(self) -> None:
        """A batch of 256."""
        first_s, _ = self.median(lambda: ([self.prompt(448) for _ in range(256)], [1] * 256), self.args.reps)
        whole_s, times = self.median(lambda: ([self.prompt(448) for _ in range(256)], [128] * 256), self.args.reps)
        step_ms = round(1e3 * (whole_s - first_s) / 127, 4)
        self.emit("6_large_batch_decode", {"secs": times, "ms_per_decode_step": step_ms})


class Arrivals:
    """Requests submitted to a running engine when they are due, and when each one's tokens came."""

    def __init__(self, engine: Engine, work: list[WorkloadRequest], due_s: list[float]) -> None:
        self.engine = engine
        self.work = work
        self.due_s = due_s
        self.first_s: dict[int, float] = {}  # from when it was due
        self.last_s: dict[int, float] = {}
        self.gaps_s: list[float] = []
        self.normalised_s: list[float] = []

    def run(self) -> dict[str, float]:
        """Drives the engine until all have finished; milliseconds."""
        num_submitted, start_s = 0, time.perf_counter()
        while num_submitted < len(self.work) or self.engine.has_unfinished_requests():
            now_s = time.perf_counter() - start_s
            while num_submitted < len(self.work) and self.due_s[num_submitted] <= now_s:
                request = self.work[num_submitted]
                params = SamplingParams(
                    temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False
                )
                self.engine.add_request(str(num_submitted), request.prompt_token_ids, params)
                num_submitted += 1
            if self.engine.has_unfinished_requests():
                deltas = self.engine.step()
                self._take_in(deltas, time.perf_counter() - start_s)
            else:
                time.sleep(max(0.0, min(0.001, self.due_s[num_submitted] - now_s)))
        return self._summary(time.perf_counter() - start_s)

    def _take_in(self, deltas: list[CompletionDelta], now_s: float) -> None:
        for delta in deltas:
            index = int(delta.request_id)
            if index in self.last_s:
                self.gaps_s.append(now_s - self.last_s[index])
            else:
                self.first_s[index] = now_s - self.due_s[index]
            self.last_s[index] = now_s
            if delta.finish_reason is not None:
                self.normalised_s.append((now_s - self.due_s[index]) / self.work[index].num_output_tokens)

    def _summary(self, elapsed_s: float) -> dict[str, float]:
        num_tokens = sum(request.num_output_tokens for request in self.work)
        assert len(self.gaps_s) + len(self.first_s) == num_tokens, "a request gave another number of tokens"
        firsts_s = list(self.first_s.values())
        result = {"secs": elapsed_s}
        for name, values in (("ttft", firsts_s), ("itl", self.gaps_s)):
            result |= {f"{name}_ms_p{p}": 1e3 * float(np.percentile(values, p)) for p in (50, 99)}
        result["normalised_latency_ms_mean"] = 1e3 * statistics.mean(self.normalised_s)
        return {name: round(value, 2) for name, value in result.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(CONFIGS))
    parser.add_argument("--tests", default="2431")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--reps1", type=int, default=3)
    parser.add_argument("--rates", default="8,16,24", help="test 5: arrivals a second")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    parser.add_argument("--out", help="append the lines to this file")
    args = parser.parse_args()
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}", file=sys.stderr)
    for name in args.models:
        bench = Bench(name, args)
        bench.warm_up()
        for test in args.tests:
            getattr(bench, f"test_{test}")()
        bench.llm.close()


if __name__ == "__main__":
    main()
