"""The command line, up to the point where JAX would be imported."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from absl import flags

from paxpage import serve
from paxpage.config import EngineConfig
from paxpage.server.listen import bind
from paxpage.server.options import API_KEY_VARIABLE, ServeOptions


def options(*arguments: str) -> ServeOptions:
    return serve.make_options(serve.parse_flags(["serve", *arguments]))


@pytest.fixture(autouse=True)
def without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


def test_no_flags_means_the_defaults() -> None:
    assert options() == ServeOptions(
        engine=EngineConfig(),
        model=None,
        tokenizer=None,
        served_model_name=None,
        generation_config="auto",
        chat_template=None,
        tool_call_parser="auto",
        enable_auto_tool_choice=None,
        max_num_queued_reqs=None,
        host="127.0.0.1",
        port=8000,
        api_key=None,
        log_format="text",
    )


@pytest.mark.parametrize("spelling", ["--max_num_seqs=7", "--max-num-seqs=7", "--max-num-seqs 7", "--max_num-seqs=7"])
def test_dashes_and_underscores_are_the_same(spelling: str) -> None:
    assert options(*spelling.split()).engine.max_num_seqs == 7


@pytest.mark.parametrize(("value", "names"), [(None, ()), ("a", ("a",)), ("a,b/c", ("a", "b/c"))])
def test_a_model_may_have_several_names(value: str | None, names: tuple[str, ...]) -> None:
    assert options(*([] if value is None else [f"--served_model_name={value}"])).served_names == names


def test_dashes_in_values_stay() -> None:
    assert options("--served-model-name=a-b", "--model", "x/y-z").served_model_name == "a-b"


@pytest.mark.parametrize(
    "spelling", ["--no-enable-prefix-caching", "--noenable_prefix_caching", "--enable_prefix_caching=false"]
)
def test_ways_to_turn_a_switch_off(spelling: str) -> None:
    assert options(spelling).engine.enable_prefix_caching is False


def test_every_engine_option_has_a_flag() -> None:
    names = {flag.name for group in serve.FLAGS_BY_GROUP.values() for flag in group}
    assert names >= set(EngineConfig.__dataclass_fields__)
    assert names >= set(ServeOptions.__dataclass_fields__) - {"engine"}


def test_flags_default_to_the_engine_s_defaults() -> None:
    defaults = EngineConfig()
    for flag in (flag for group in serve.FLAGS_BY_GROUP.values() for flag in group):
        if flag.default is not None and hasattr(defaults, flag.name):
            assert flag.default == getattr(defaults, flag.name), flag.name


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("--block-size=7", "block_size is 7"),
        ("--port=70000", "port is 70000"),
        ("--port=x", "port"),
        ("--max_num_queued_reqs=-1", "max_num_queued_reqs is -1"),
        ("--gpu-memory-utilization=2", "gpu_memory_utilization is 2.0"),
        ("--generation_config=vllm", "generation_config is 'vllm'"),
        ("--served_model_name=a,,b", "served_model_name is 'a,,b'"),
        ("--served_model_name=", "served_model_name is ''"),
        ("--max_logprobs=-2", "max_logprobs is -2"),
        ("--tool-call-parser=mistral", "tool_call_parser is 'mistral'; allowed: auto, hermes, llama3_json, none"),
        ("--log-format=xml", "log_format is 'xml'"),
        ("--chat_template=/nowhere", "chat_template is '/nowhere'"),
        ("--no-such-flag=1", "no_such_flag"),
        ("model", "--model=model"),
        ("--dtype=int8", "dtype is 'int8'"),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(argument: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["serve", argument]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert named in captured.err


def test_the_key_comes_from_the_flag_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "from-env")
    assert options().api_key == "from-env"
    assert options("--api_key=own").api_key == "own"


def test_a_chat_template_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert options(f"--chat_template={file}").chat_template == "{{ messages }}"
    assert options("--chat_template={{ x }}").chat_template == "{{ x }}"


def test_parsing_leaves_absl_s_own_flags_alone() -> None:
    options("--port=1")
    assert "max_num_seqs" not in flags.FLAGS


def test_help_is_instant_and_lists_every_flag_once() -> None:
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "paxpage.serve", "--help"], capture_output=True, text=True
    )
    assert time.monotonic() - start_s < 5
    assert done.returncode == 0
    for flag in (flag for group in serve.FLAGS_BY_GROUP.values() for flag in group):
        assert done.stdout.count(f"--{flag.name}") >= 1
    assert not any(
        line.split("|")[-1].strip() in ("jax", "transformers", "fastapi") for line in done.stderr.splitlines()
    )


def test_a_port_in_use_is_one_line_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run([sys.executable, "-m", "paxpage.serve", f"--port={port}"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"paxpage.serve: port {port} of 127.0.0.1 is in use; choose another with --port\n"


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 8000), ("no.such.host.invalid", 8000)])
def test_an_address_of_another_machine_is_one_line_and_exit_code_1(host: str, port: int) -> None:
    command = [sys.executable, "-m", "paxpage.serve", f"--host={host}", f"--port={port}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"paxpage.serve: cannot listen on port {port} of {host}: ")
    assert done.stderr.count("\n") == 1


def test_bind_gives_a_socket_that_does_not_listen_yet() -> None:
    with bind("127.0.0.1", 0) as bound, socket.socket() as client:
        assert client.connect_ex(bound.getsockname()) != 0
