"""Faults around a real server: a full disk, a kill, memory that is not there, models that are damaged, clients gone."""

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from paxpage.models.embedded import default_model_path
from tests.server.process import AbandonedRequest, ServerProcess, free_port, wait_until

MOST_BYTES = 16384  # of a file: less than a compiled step takes
FULL_DISK = ("-m", "tests.server.limited_server", "1000", str(MOST_BYTES), "60")
ONE_ROW = ("--max_num_seqs=1", "--max_num_batched_tokens=48")
LONG = {"prompt": [60, 61], "max_tokens": 8000, "temperature": 0, "ignore_eos": True}


def test_a_full_disk_then_a_kill_then_the_same_port_and_cache(tiny_dir: Path, tmp_path: Path) -> None:
    """What cannot be kept is said and costs nothing but time; half-written entries do not harm the next server."""
    flags = (f"--model={tiny_dir}", *ONE_ROW, f"--compilation_cache_dir={tmp_path}")
    port = free_port()
    with ServerProcess(*flags, command=FULL_DISK, port=port) as server:
        server.wait_ready()
        assert "File too large" in server.log(), "nothing was refused by the disk"
        first = server.complete([60, 61], max_tokens=16)["choices"][0]["token_ids"]
        stream = server.stream("completions", LONG)
        next(stream)
        server.process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(stream)
        assert server.process.wait(15) == -signal.SIGKILL
    assert any(path.stat().st_size == MOST_BYTES for path in tmp_path.rglob("*")), "no entry is half written"
    with ServerProcess(*flags, port=port) as server:
        server.wait_ready()
        assert server.complete([60, 61], max_tokens=16)["choices"][0]["token_ids"] == first
        server.wait_idle()
        assert server.stop() == 0
        assert "Traceback" not in server.log()


def damaged_folder(tiny_dir: Path, folder: Path) -> Path:
    """TINY without its model.safetensors."""
    folder.mkdir()
    for path in tiny_dir.iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).symlink_to(path)
    return folder


def undamaged(tiny_dir: Path, folder: Path) -> Path:
    return tiny_dir


def cut_short(tiny_dir: Path, folder: Path) -> Path:
    whole = (tiny_dir / "model.safetensors").read_bytes()
    (damaged_folder(tiny_dir, folder) / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return folder


def misfitting(tiny_dir: Path, folder: Path) -> Path:
    tensors = load_file(tiny_dir / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:100].copy()
    save_file(tensors, damaged_folder(tiny_dir, folder) / "model.safetensors")
    return folder


def cut_gguf(tiny_dir: Path, folder: Path) -> Path:
    folder.mkdir()
    with open(default_model_path(), "rb") as file:
        (folder / "cut.gguf").write_bytes(file.read(8 * 2**20))
    return folder / "cut.gguf"


def no_tokenizer(tiny_dir: Path, folder: Path) -> Path:
    damaged_folder(tiny_dir, folder)
    (folder / "model.safetensors").symlink_to(tiny_dir / "model.safetensors")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text("{")
    return folder


# What is served, flags, the exit code, and what the last line says
STARTS = {
    "a checkpoint cut short": (cut_short, (), 2, ("model.safetensors is damaged, cut short",)),
    "a checkpoint that lacks a tensor": (misfitting, (), 2, ("layers.1.mlp.up_proj.weight", "norm.weight", "100")),
    "a gguf file cut in the middle": (cut_gguf, (), 2, ("cut.gguf", f"{8 * 2**20} bytes")),
    "a tokenizer cut short": (no_tokenizer, (), 2, ("tokenizer in", "cannot be read")),
    "no memory for the cache": (undamaged, ("--num_blocks=100000000",), 1, ("--num_blocks",)),
}


@pytest.fixture(scope="module")
def starts(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    """All of STARTS, side by side."""
    folder = tmp_path_factory.mktemp("damaged")
    paths = [make(tiny_dir, folder / str(number)) for number, (make, *_) in enumerate(STARTS.values())]
    flags = [start[1] for start in STARTS.values()]
    servers = [ServerProcess(f"--model={path}", *ONE_ROW, *more) for path, more in zip(paths, flags, strict=True)]
    yield dict(zip(STARTS, servers, strict=True))
    for server in servers:
        server.__exit__()


@pytest.mark.parametrize("what", STARTS)
def test_a_start_that_fails_says_why_in_its_last_line(starts: dict[str, ServerProcess], what: str) -> None:
    _, _, exit_code, messages = STARTS[what]
    server = starts[what]
    try:
        assert server.process.wait(120) == exit_code, server.log()
    except subprocess.TimeoutExpired:
        pytest.fail(server.log())
    last = server.log().strip().splitlines()[-1]
    assert last.startswith("paxpage.serve: ") and all(message in last for message in messages), last
    assert "Traceback" not in server.log()


def test_clients_gone_at_any_moment(tiny: ServerProcess) -> None:
    """Before their request is whole, while it is read, tokenised, waits, is computed or answered, and after."""
    generator = random.Random(0)
    sizes = {"n": 3, "prompt": [[60], [61, 62]]}
    body = json.dumps({**LONG, "max_tokens": 200, "stream": True, **sizes}).encode()
    for number in range(60):
        num_bytes = None if number % 3 else generator.randrange(len(body) + 100)
        client = AbandonedRequest(tiny, "completions", body, num_bytes=num_bytes)
        time.sleep(generator.choice((0, 0.001, 0.003, 0.01, 0.03, 0.1)))
        client.leave()
    wait_until(tiny.is_idle)
    tiny.check_alive()
