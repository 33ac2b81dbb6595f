"""The founding scenario: ten users, one long system prompt, and a cache too small for all of them at once.

    python scripts/demo_shared_prompt.py

Watch blocks being handed out as tokens come, users waiting, and a finished user's blocks serve a waiting one on the
very next pass. The system prompt's blocks are computed once and held once, whoever reads them. At the end: what that
saved, what was wasted, and what contiguous reservation would have held.
"""

import argparse
import dataclasses
from collections.abc import Sequence

from paxpage import LLM, SamplingParams
from paxpage.engine.engine import Engine
from paxpage.models.embedded import default_model_path
from paxpage.prompts import render_chat

SYSTEM = (
    "You are the librarian of a small town library. You answer in one or two short sentences, in plain words, and you "
    "never invent a book. When you do not know, you say so and name someone who might. You are glad of every question. "
) * 5
QUESTIONS = (
    "What is a good book for a rainy day?",
    "Who wrote Romeo and Juliet?",
    "Where do I find books about whales?",
    "What does the word 'novel' mean?",
    "Can you name a famous detective?",
    "How many lines has a haiku?",
    "What is the capital of France?",
    "Why do people read poems aloud?",
    "Which planet is closest to the sun?",
    "What should I read to a child of four?",
)


@dataclasses.dataclass
class Reuse:
    """A request let in by the blocks that others had just given back: in the pass before there was no room for it."""

    step: int
    finished: list[str]
    num_freed: int  # blocks that nobody held any more when these had finished
    admitted: str
    num_taken: int  # of its own, at once; the prompt's are shared


@dataclasses.dataclass
class Report:
    """What the demo saw."""

    texts: dict[str, str]
    reuses: list[Reuse]
    num_steps: int
    waste_fraction: float  # empty slots over allocated ones, summed over steps
    contiguous_waste_fraction: float  # the same, had each running request reserved a whole context
    num_prompt_blocks: int  # full blocks of the shared prompt
    num_prompt_holders: int  # most requests that held them at one moment
    num_prompt_copies: int  # most different blocks in the place of one of them at one moment: 1 if they are shared
    num_prompt_tokens: int  # of all requests
    num_cached_tokens: int  # of these, tokens that were not computed again


class Demo:
    """Runs the scenario on an engine that nobody else uses, one step at a time."""

    def __init__(self, engine: Engine, num_users: int, max_tokens: int) -> None:
        self.engine = engine
        self.texts: dict[str, str] = {}
        self.reuses: list[Reuse] = []
        self.tables: dict[str, list[int]] = {}  # block tables of those running after the last step
        self.released: dict[str, list[int]] = {}  # of those that the last step finished
        self.num_steps = 0
        self.contiguous_slots = self.contiguous_tokens = 0  # with a whole context reserved for each running request
        self.num_prompt_holders = 0
        self.num_prompt_copies = 0
        prompts = [conversation(engine, QUESTIONS[index % len(QUESTIONS)]) for index in range(num_users)]
        self.num_shared_tokens = num_common_tokens(prompts)
        self.num_prompt_blocks = self.num_shared_tokens // engine.config.block_size
        for index, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=max_tokens - index % 4 * (max_tokens // 6))
            engine.add_request(f"user-{index}", {"prompt_token_ids": prompt}, params)

    def run(self) -> Report:
        """Steps until everybody is served."""
        print(f"{'step':>5} {'running':>8} {'waiting':>8} {'blocks used':>12} {'free':>6} {'waste':>7}  events")
        while self.engine.has_unfinished_requests():
            self.step()
        account, stats = self.engine.slots, self.engine.stats()
        return Report(
            texts=self.texts,
            reuses=self.reuses,
            num_steps=self.num_steps,
            waste_fraction=account.waste_fraction,
            contiguous_waste_fraction=1 - self.contiguous_tokens / self.contiguous_slots,
            num_prompt_blocks=self.num_prompt_blocks,
            num_prompt_holders=self.num_prompt_holders,
            num_prompt_copies=self.num_prompt_copies,
            num_prompt_tokens=stats.num_prefix_queries,
            num_cached_tokens=stats.num_prefix_hits,
        )

    def step(self) -> None:
        """One pass; prints a line when something changed, or now and then."""
        deltas = self.engine.step()
        self.num_steps += 1
        finished = [delta.request_id for delta in deltas if delta.output is not None]
        self.texts |= {delta.request_id: delta.output.outputs[0].text for delta in deltas if delta.output is not None}
        tables = {name: self.engine.block_ids(name)[0] for name in self.engine.unfinished_request_ids()}
        tables = {name: block_ids for name, block_ids in tables.items() if block_ids}
        reuses = self.find_reuses(tables)
        self.reuses += reuses
        running = self.engine.scheduler.running
        self.contiguous_slots += self.engine.max_model_len * len(running)
        self.contiguous_tokens += sum(request.num_computed_tokens for request in running)
        holders = [block_ids for block_ids in tables.values() if len(block_ids) >= self.num_prompt_blocks]
        self.num_prompt_holders = max(self.num_prompt_holders, len(holders))
        places = zip(*(block_ids[: self.num_prompt_blocks] for block_ids in holders), strict=True)
        self.num_prompt_copies = max([self.num_prompt_copies, *(len(set(place)) for place in places)])
        held = {block_id for block_ids in tables.values() for block_id in block_ids}
        self.released = {name: [b for b in self.tables.get(name, []) if b not in held] for name in finished}
        self.tables = tables
        events = [f"{r.admitted} is let in by {r.num_freed} blocks of {', '.join(r.finished)}" for r in reuses]
        self.print_line(events + [f"{name} finished" for name in finished])

    def find_reuses(self, tables: dict[str, list[int]]) -> list[Reuse]:
        """Requests admitted in this pass, after others had ended in the last."""
        num_freed = sum(map(len, self.released.values()))
        if not num_freed:
            return []
        held = {block_id for block_ids in self.tables.values() for block_id in block_ids}
        admitted = [(name, len(set(ids) - held)) for name, ids in tables.items() if name not in self.tables]
        return [Reuse(self.num_steps, list(self.released), num_freed, name, taken) for name, taken in admitted]

    def print_line(self, events: Sequence[str]) -> None:
        """The state after this step."""
        if not events and self.num_steps % 10 != 1:
            return
        stats, last = self.engine.stats(), self.engine.slots.last
        num_used = stats.num_blocks_usable - stats.num_blocks_free
        waste = 1 - last.holding / last.allocated if last.allocated else 0
        line = f"{self.num_steps:5d} {stats.num_running:8d} {stats.num_waiting:8d} {num_used:12d}"
        print(f"{line} {stats.num_blocks_free:6d} {waste:7.1%}  {'; '.join(events)}", flush=True)


def conversation(engine: Engine, question: str) -> list[int]:
    """Token ids of the system prompt and one question."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return render_chat(engine.tokenizer, messages)


def num_common_tokens(prompts: list[list[int]]) -> int:
    """How many leading tokens all prompts share."""
    columns = zip(*prompts, strict=False)
    return next((index for index, column in enumerate(columns) if len(set(column)) > 1), min(map(len, prompts)))


def print_report(report: Report, block_size: int) -> None:
    """The sums."""
    print(f"\n{len(report.texts)} users served in {report.num_steps} steps")
    print(f"waste: {report.waste_fraction:.1%} of the allocated slots held no token")
    contiguous = report.contiguous_waste_fraction
    print(f"contiguous reservation of a whole context per request would have wasted {contiguous:.1%}")
    for reuse in report.reuses[:3]:
        who = ", ".join(reuse.finished)
        print(
            f"step {reuse.step}: {reuse.num_freed} blocks of {who}, which had just finished, let {reuse.admitted} in, "
            f"which takes {reuse.num_taken} beside the prompt's"
        )
    blocks, holders, copies = report.num_prompt_blocks, report.num_prompt_holders, report.num_prompt_copies
    print(
        f"the shared prompt fills {blocks} blocks of {block_size} tokens; {holders} requests held it at once, in "
        f"{blocks * copies} blocks where {blocks * holders} would have been copies: {blocks * (holders - copies)} saved"
    )
    share = report.num_cached_tokens / report.num_prompt_tokens
    tokens = f"{report.num_cached_tokens:,} of {report.num_prompt_tokens:,} prompt tokens ({share:.0%})"
    print(f"{tokens} were not computed again")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=48, help="of the first user; others stop a little earlier")
    parser.add_argument("--num-blocks", type=int, default=33, help="of 16 tokens, the null block included")
    args = parser.parse_args()
    with LLM(
        default_model_path(),
        num_blocks=args.num_blocks,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=512,
    ) as llm:
        report = Demo(llm.engine, args.users, args.max_tokens).run()
        print_report(report, llm.engine.config.block_size)
        print("\n" + "\n".join(f"{name}: {text.strip()[:100]!r}" for name, text in report.texts.items()))


if __name__ == "__main__":
    main()
