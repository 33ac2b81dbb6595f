"""The command lines of paxpage.bench, up to where anything is measured."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paxpage.bench import kernels, offline, serve
from paxpage.bench.results import ROOT, ResultWriter, commit
from paxpage.command_line import Flag, help_text, parse_flags, values_of
from tests.bench.conftest import json_lines

Bench = Callable[..., tuple[int, str, str]]
GROUPS = {
    "some": (Flag("num_things", int, 3, "how many"), Flag("is_on", bool, True, "on"), Flag("name", str, None, ""))
}


@pytest.mark.parametrize("command", ["serve", "offline", "kernels"])
def test_help_lists_every_flag_and_loads_no_jax(command: str) -> None:
    arguments = ["-X", "importtime", "-m", "paxpage.bench", command, "--help"]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    groups = {"serve": serve, "offline": offline, "kernels": kernels}[command].FLAGS_BY_GROUP
    assert all(f"--{flag.name}" in done.stdout for group in groups.values() for flag in group)
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"jax", "transformers", "matplotlib"}


def test_help_without_a_command(bench: Bench) -> None:
    exit_code, out, _ = bench("--help")
    assert exit_code == 0 and all(name in out for name in ("serve", "offline", "kernels"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "command is ''; allowed: serve, offline, kernels"),
        (("train",), "command is 'train'"),
        (("serve", "--nothing=1"), "nothing"),
        (("serve", "somewhere"), "'somewhere' is not a flag"),
        (("serve", "--request-rate=8,fast"), "request_rate is '8,fast'"),
        (("serve", "--request-rate=0"), "request_rate is '0'"),
        (("serve", "--burstiness=0"), "burstiness is 0.0"),
        (("serve", "--endpoint=/v1/embeddings"), "endpoint is '/v1/embeddings'"),
        (("serve", "--base-url=localhost:8000"), "base_url is 'localhost:8000'"),
        (("serve", "--max-concurrency=0"), "max_concurrency is 0"),
        (("serve", "--num-prompts=0"), "num_prompts is 0"),
        (("serve", "--dataset-name=wiki"), "dataset_name is 'wiki'"),
        (("serve", "--dataset-name=custom"), "dataset_path is None"),
        (("serve", "--dataset-name=custom", "--dataset-path=/nowhere"), "dataset_path is '/nowhere'"),
        (("serve", "--endpoint=/v1/chat/completions", "--prompt-format=token_ids"), "prompt_format is 'token_ids'"),
        (("serve", "--random-range-ratio=1"), "random_range_ratio is 1.0"),
        (("serve", "--vocab-size=50"), "vocab_size is 50"),
        (("offline", "--tests=8"), "tests is '8'"),
        (("offline", "--scale=smoke", "--max-model-len=32"), "max_model_len is 32"),
        (("offline", "--scale=huge"), "scale is 'huge'"),
        (("offline", "--reps=0"), "reps is 0"),
        (("offline", "--rates=x"), "request_rate is 'x'"),
        (("offline", "--dtype=int8"), "dtype is 'int8'"),
        (("kernels", "--scale=huge"), "scale is 'huge'"),
        (("kernels", "--backends=cuda"), "backends is 'cuda'"),
        (("kernels", "--only=backward", "--scale=smoke"), "only is 'backward'"),
        (("kernels", "--paging", "--only=decode 7", "--scale=smoke"), "only is 'decode 7'"),
    ],
)
def test_a_bad_command_line_is_one_line_and_exit_code_2(bench: Bench, arguments: tuple[str, ...], named: str) -> None:
    exit_code, out, err = bench(*arguments)
    said = [line for line in err.splitlines() if not line.startswith("#")]
    assert exit_code == 2 and out == "" and len(said) == 1 and named in said[0]


def test_spellings() -> None:
    spellings = ["--num-things=5", "--no-is-on", "--name", "a-b"]
    assert values_of(parse_flags(GROUPS, ["x", *spellings])) == {"num_things": 5, "is_on": False, "name": "a-b"}
    assert values_of(parse_flags(GROUPS, ["x"])) == {"num_things": 3, "is_on": True, "name": None}
    assert "--num_things=3" in help_text(["title"], GROUPS)


def test_results_are_appended_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    for number in (1, 2):
        ResultWriter({"engine": "x", "n": 0}, str(path), is_printed=number == 2).write({"n": number})
    assert json_lines(path.read_text()) == [{"engine": "x", "n": 1}, {"engine": "x", "n": 2}]
    assert json_lines(capsys.readouterr().out) == [{"engine": "x", "n": 2}]


def test_the_commit_of_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(tmp_path)]
    monkeypatch.setattr("paxpage.bench.results.ROOT", tmp_path)
    assert commit() is None
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    found = commit()
    assert found is not None and len(found) == 12 and head.startswith(found)
