"""Case 29, offline: however a script ends, it ends, and says how."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.shelf import ROOMY, Shelf

ENDS = {
    "never closed": ("", 0, ""),
    "deleted": ("del llm", 0, ""),
    "closed": ("llm.close()", 0, ""),
    "an exception in the script": ("raise RuntimeError('the script went wrong')", 1, "the script went wrong"),
    "an exception inside generate": ("llm.generate({'prompt_token_ids': [9999]})", 1, "9999"),
    "ctrl-c inside generate": (
        "import signal, threading\n"
        "threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()\n"
        "while True: llm.generate([PROMPT] * 8, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)",
        None,
        "KeyboardInterrupt",
    ),
}


def run_script(folder: Path, ending: str) -> subprocess.CompletedProcess[str]:
    """A script that generates with TINY, then ends as told."""
    limits = {name: value for name, value in ROOMY._asdict().items() if value is not None}
    limits["enable_prefix_caching"] = limits.pop("has_prefix_cache")
    script = (
        "from paxpage import LLM, SamplingParams\n"
        "PROMPT = {'prompt_token_ids': [5, 6, 7]}\n"
        f"llm = LLM({str(folder)!r}, show_progress=False, **{limits!r})\n"
        "assert len(llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids) == 16\n"
        f"{ending}\n"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("how", list(ENDS))
def test_a_script_ends(shelf: Shelf, how: str) -> None:
    ending, exit_code, message = ENDS[how]
    done = run_script(shelf.tiny_folder, ending)
    assert message in done.stderr
    if exit_code is None:
        assert done.returncode != 0
    else:
        assert done.returncode == exit_code, done.stderr[-2000:]
    if exit_code == 0:
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
