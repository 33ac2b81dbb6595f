"""The command line, up to the point where JAX would be imported."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from absl import flags

from paxpage import serve
from paxpage.config import EngineConfig
from paxpage.server.launch import check_template
from paxpage.server.lifecycle import ABORT_S
from paxpage.server.listen import bind
from paxpage.server.options import API_KEY_VARIABLE, ServeOptions
from tests.server.process import ROOT
from tests.server.tiny import make_tokenizer


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
        max_num_queued_reqs=4096,
        host="127.0.0.1",
        port=8000,
        api_key=None,
        log_format="text",
        shutdown_timeout=4,
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
        ("--shutdown_timeout=-1", "shutdown_timeout is -1"),
        ("--shutdown-timeout=1.5", "shutdown_timeout"),
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


@pytest.mark.parametrize("key", ["", " ", "a\n", "k\u00e9y"])
def test_a_key_that_no_client_could_send_is_refused_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one above all: it would ask nobody for anything."""
    with pytest.raises(ValueError, match=r"^api_key is 'not shown'; allowed: printable"):
        options(f"--api_key={key}")
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    with pytest.raises(ValueError, match=r"^api_key is 'not shown'"):
        options()
    assert options("--api_key=own").api_key == "own"


def test_a_chat_template_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert options(f"--chat_template={file}").chat_template == "{{ messages }}"
    assert options("--chat_template={{ x }}").chat_template == "{{ x }}"


def test_a_chat_template_that_cannot_be_parsed_is_refused() -> None:
    """One that refuses these messages, or uses what transformers adds to Jinja, is none of those."""
    tokenizer = make_tokenizer()
    for good in (None, "{{ raise_exception('no') }}", "{% generation %}{{ messages }}{% endgeneration %}"):
        check_template(tokenizer, good)
    check_template(None, "{{ broken")
    with pytest.raises(ValueError, match=r"^chat_template is no Jinja template: line 2: "):
        check_template(tokenizer, "{{ messages }}\n{{ broken")


# The file of flags


def write(folder: Path, text: str) -> str:
    """A config file's path."""
    file = folder / "serve.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_gives_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    text = (
        "# a server\nmodel: some/model\nmax-num-seqs: 7\nport: 9000\nenable_prefix_caching: false\ndtype: null\n"
        "gpu_memory_utilization: 0.5\nserved_model_name: [a, b/c]\nchat_template: '{{ x }}'\n"
    )
    file = write(tmp_path, text)
    found = options("--port=9001", f"--config={file}", "--enable-prefix-caching")
    assert found == options(
        *("--model=some/model", "--max_num_seqs=7", "--port=9001", "--enable_prefix_caching"),
        *("--gpu_memory_utilization=0.5", "--served_model_name=a,b/c", "--chat_template={{ x }}"),
    )
    assert options(f"--config={file}").engine.enable_prefix_caching is False


def test_a_file_may_be_json_or_empty(tmp_path: Path) -> None:
    assert options(f"--config={write(tmp_path, json.dumps({'port': 1, 'model': 'm'}))}").port == 1
    assert options(f"--config={write(tmp_path, '')}") == options()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_num_seq: 7\nport: 1", "max_num_seq, which is none"),
        ("config: other.yaml", "config, which is none"),
        ("help: true", "help, which is none"),
        ("port: many", "port"),
        ("port: 70000", "port is 70000"),
        ("port: [1, {a: 2}]", "port in "),
        ("port: 2026-01-01", "port in "),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "each flag once"),
        ("- port", "a file of flags"),
        ("port", "a file of flags"),
        ("port: {", "cannot be read"),
        ("port: !!python/object/apply:os.getcwd []", "cannot be read"),
        ("port: 2026-99-99", "cannot be read"),
        ("\x00", "cannot be read"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_2(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["serve", f"--config={write(tmp_path, text)}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert named in captured.err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["serve", "--config=/nowhere/serve.yaml"]) == 2
    assert "/nowhere/serve.yaml" in capsys.readouterr().err


def test_the_examples_of_deploy_start() -> None:
    """Their flags are accepted; a container engine and systemd are not at hand."""
    example = options(f"--config={ROOT / 'deploy/serve.yaml'}")
    assert (example.host, example.log_format, example.max_num_queued_reqs) == ("127.0.0.1", "json", 512)
    unit = (ROOT / "deploy/paxpage.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+ -m paxpage.serve (.*)$", unit, re.MULTILINE)
    assert options(command.replace("/etc/paxpage", str(ROOT / "deploy"))) == example
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop_s) > example.shutdown_timeout + ABORT_S
    container = (ROOT / "deploy/Containerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", container, re.MULTILINE)
    assert json.loads(entry)[:3] == ["python", "-m", "paxpage.serve"] and options(*json.loads(entry)[3:])
    copied = " ".join(re.findall(r"^COPY (.*) \S+$", container, re.MULTILINE)).split()
    assert len(copied) == 6 and all((ROOT / name).exists() for name in copied)


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
    assert API_KEY_VARIABLE in done.stdout and "exit codes:" in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 120
    assert not any(
        line.split("|")[-1].strip() in ("jax", "transformers", "fastapi", "yaml") for line in done.stderr.splitlines()
    )


def test_a_port_in_use_is_one_line_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run([sys.executable, "-m", "paxpage.serve", f"--port={port}"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"paxpage.serve: port {port} of 127.0.0.1 is in use; choose another with --port\n"


@pytest.mark.parametrize("package", ["fastapi", "httptools"])
def test_a_missing_extra_is_one_line_and_exit_code_1(package: str) -> None:
    start = "from paxpage import serve; sys.exit(serve.main(['', '--port=0']))"
    code = f"import sys; sys.modules[{package!r}] = None; {start}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"paxpage.serve: {package} is not installed: the extra serve has it (paxpage[serve])\n"


def test_a_device_that_is_not_there_is_one_line_and_exit_code_1() -> None:
    command, env = [sys.executable, "-m", "paxpage.serve", "--port=0"], {**os.environ, "JAX_PLATFORMS": "nonsense"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("paxpage.serve: Unable to initialize backend 'nonsense'")
    assert done.stderr.count("\n") == 1


def test_a_server_imports_no_torch_with_its_tokenizer() -> None:
    """It is installed here, for the oracles; transformers would import it, which takes seconds."""
    imports = "from paxpage import serve; serve.prepare_environment(); from transformers import AutoTokenizer"
    code = f"import sys; {imports}; print(*(name for name in sys.modules if name.startswith('torch')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "torch\n" and importlib.util.find_spec("torch") is not None


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
