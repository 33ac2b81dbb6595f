"""A server of TINY for benchmarks, and what its lines of JSON say."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import ServerProcess
from tests.server.tiny import MAX_MODEL_LEN, VOCAB_SIZE, make_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 144,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LIMITS = ("--load_format=dummy", "--max_num_seqs=4", "--max_num_batched_tokens=48")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of tests/server's TINY, with its tokenizer and without weights."""
    folder = tmp_path_factory.mktemp("bench") / "TINY"
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="session")
def server(tiny_dir: Path) -> Iterator[ServerProcess]:
    """python -m paxpage.serve on TINY."""
    with ServerProcess(f"--model={tiny_dir}", *LIMITS) as process:
        yield process.wait_ready()


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs python -m paxpage.bench in this process: exit code, stdout, stderr."""
    # Imported here: the root conftest gives JAX its settings after this file has been read.
    from paxpage.bench.__main__ import main

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        exit_code = main(["bench", *arguments])
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return run


def json_lines(text: str) -> list[dict[str, Any]]:
    """Every line parsed."""
    return [json.loads(line) for line in text.splitlines()]
