"""The command line of the server: python -m paxpage.serve."""

import contextlib
import dataclasses
import errno
import os
import socket
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast

from absl import flags

from paxpage import command_line
from paxpage.command_line import Flag
from paxpage.config import EngineConfig, require
from paxpage.server.listen import allow_many_connections, bind
from paxpage.server.logs import set_up_logging
from paxpage.server.options import API_KEY_VARIABLE, MAX_NUM_QUEUED_REQS, SHUTDOWN_TIMEOUT_S, ServeOptions
from paxpage.server.signals import SignalWatcher, end_process

PROGRAM = "paxpage.serve"
# Whoever wants Python's lock waits so long while another thread computes in Python; 5 ms is Python's own choice. A step
# takes the lock several times: beside two threads that trace what is compiled behind the first requests, 8 rows of 1B
# took 33 ms a step on an H200, and 2.4 with this (BUILD_NOTES.md, 2026-11-30; 1.0 beside none).
SWITCH_INTERVAL_S = 0.2e-3

EXIT_FAILED = 1
EXIT_BAD_USAGE = 2
MORE_MEMORY = "Lower --num_blocks, --gpu_memory_utilization, --max_num_seqs or --max_model_len, or take a smaller model"


FLAGS_BY_GROUP = {
    "model": (
        Flag("model", str, None, "a folder, a .gguf file or org/name; the embedded SmolLM2-135M-Instruct if not given"),
        Flag("tokenizer", str, None, "a folder or org/name, when the model brings none"),
        Flag("served_model_name", str, None, "the model's name in the API; or several, comma between"),
        Flag("dtype", str, "auto", "auto, bfloat16, float16 or float32"),
        Flag("load_format", str, "auto", "auto, safetensors, gguf, orbax or dummy (random weights)"),
        Flag("max_model_len", int, None, "tokens of prompt and answer at most; the model's own limit if not given"),
        Flag("generation_config", str, "auto", "auto: sampling defaults of the model; none: the API's own"),
        Flag("chat_template", str, None, "a Jinja file, or the template itself"),
        Flag("tool_call_parser", str, "auto", "hermes, llama3_json, none or auto: what the chat template makes plain"),
        Flag("enable_auto_tool_choice", bool, None, "take requests with tools; on if not given"),
        Flag("seed", int, 0, "of requests that bring none"),
    ),
    "memory": (
        Flag("gpu_memory_utilization", float, 0.9, "share of the GPU's memory to use"),
        Flag("num_blocks", int, None, "blocks of the KV cache; what fits if not given"),
        Flag("block_size", int, 16, "tokens of a block"),
        Flag("kv_cache_dtype", str, "auto", "auto: the model's dtype"),
        Flag("enable_prefix_caching", bool, None, "reuse the blocks of prompts with the same beginning"),
        Flag("enable_cascade_attention", bool, None, "read a prefix that many rows share once a step (Hopper)"),
    ),
    "scheduling": (
        Flag("max_num_seqs", int, None, "samples that run at once"),
        Flag("max_num_batched_tokens", int, None, "tokens of one step"),
        Flag("num_tokens_beside_decodes", int, None, "of a step while most requests decode; 512 on a GPU if not given"),
        Flag("max_num_queued_reqs", int, MAX_NUM_QUEUED_REQS, "prompts that may wait; more are answered 429"),
        Flag("scheduling_policy", str, "fcfs", "fcfs or priority"),
        Flag("async_scheduling", bool, None, "schedule a step while the one before runs; on a GPU if not given"),
        Flag("tensor_parallel_size", int, 1, "GPUs to split the model over"),
    ),
    "server": (
        Flag("config", str, None, "a YAML or JSON file of these flags, as port: 8000; the command line wins"),
        Flag("host", str, "127.0.0.1", "address to listen on; 0.0.0.0: all"),
        Flag("port", int, 8000, "port to listen on; 0: any free one"),
        Flag("api_key", str, None, f"asked of every client; better given in ${API_KEY_VARIABLE}"),
        Flag("log_format", str, "text", "text, or json: an object a line"),
        Flag("max_logprobs", int, 20, "log-probabilities a token that a request may ask for"),
        Flag("shutdown_timeout", int, SHUTDOWN_TIMEOUT_S, "seconds that running requests may take after SIGTERM"),
        Flag("compilation_cache_dir", str, None, "where compiled steps are kept; your cache folder if not given"),
    ),
}

HELP_END = (
    "",
    "environment:",
    f"  {API_KEY_VARIABLE:<32} the API key; as a flag, every user of the machine can read it",
    "  JAX_PLATFORMS                    cuda or cpu; the best there is if not set",
    "  XLA_PYTHON_CLIENT_MEM_FRACTION   share of the GPU's memory that JAX may take, 0.97 if not set",
    "  HF_HOME, HF_HUB_OFFLINE          where models of the hub are kept; 1: fetch none",
    "",
    "exit codes:",
    "  0 ended by a signal, after the requests that ran   1 no such address, device or memory; the engine died",
    "  2 a flag, the config file or the model is refused  130, 143 a signal before it was ready, or a second one",
)


def main(argv: Sequence[str]) -> int:
    """Runs the server until it is stopped; returns the process's exit code."""
    try:
        values = parse_flags(argv)
        if values["help"].value:
            print(help_text())
            return 0
        options = make_options(values)
    except (ValueError, flags.Error) as error:
        return complain(error, EXIT_BAD_USAGE)
    return run(options)


def complain(error: Exception | str, exit_code: int) -> int:
    """Says in one line why the server does not start."""
    return command_line.complain(PROGRAM, error, exit_code)


def parse_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Parses a command line, and the file that its config names; see command_line.parse_flags and read_config."""
    values = command_line.parse_flags(FLAGS_BY_GROUP, argv)
    if values["config"].value is None:
        return values
    from paxpage.server.config_file import read_config  # YAML is seldom wanted

    names = {flag.name for group in FLAGS_BY_GROUP.values() for flag in group} - {"config"}
    return command_line.parse_flags(FLAGS_BY_GROUP, [argv[0], *read_config(values["config"].value, names), *argv[1:]])


def help_text() -> str:
    """Every flag with its default, by group; what the environment says; exit codes."""
    title = ("Serves a language model over HTTP, with OpenAI's API.", "", f"python -m {PROGRAM} [--flag=value ...]")
    return "\n".join((command_line.help_text(title, FLAGS_BY_GROUP), *HELP_END))


def make_options(values: flags.FlagValues) -> ServeOptions:
    """Checks the flags' values.

    Raises:
        ValueError: a value is out of its range.
    """
    given: dict[str, Any] = {name: values[name].value for name in values if values[name].value is not None}
    engine_fields = {field.name for field in dataclasses.fields(EngineConfig)}
    own_fields = {field.name for field in dataclasses.fields(ServeOptions)} - {"engine"}
    engine = EngineConfig(**{name: value for name, value in given.items() if name in engine_fields})
    own: dict[str, Any] = {name: given.get(name) for name in own_fields}
    own["api_key"] = given.get("api_key", os.environ.get(API_KEY_VARIABLE))
    own["chat_template"] = None if own["chat_template"] is None else read_chat_template(own["chat_template"])
    return ServeOptions(engine=engine, **own)


def read_chat_template(value: str) -> str:
    """The template itself, from a file's name or given directly.

    Raises:
        ValueError: neither a file nor a template.
    """
    if os.path.isfile(value):
        with open(value, encoding="utf-8") as file:
            return file.read()
    require("{" in value, "chat_template", value, "a file, or a Jinja template")
    return value


def prepare_environment() -> None:
    """Sets what JAX and the tokenizers look at once, at their import. What is set already stays."""
    # The engine sizes its cache from the device's bytes_limit, which should be the whole device's.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Where PyTorch is installed, transformers imports it before it reads a tokenizer: seconds of a start, mostly under
    # Python's lock (BUILD_NOTES.md, 2026-11-30), for nothing that this process uses. So it is not to be found in it.
    sys.modules.setdefault("torch", cast(ModuleType, None))


def run(options: ServeOptions) -> int:
    """Binds, loads the model, serves; returns the exit code."""
    signals = SignalWatcher()
    signals.start()
    set_up_logging(options.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    prepare_environment()
    allow_many_connections()
    try:
        bound = bind(options.host, options.port)
    except OSError as error:
        return complain(address_problem(options, error), EXIT_FAILED)
    with bound:
        return load_and_serve(options, bound, signals)


def load_and_serve(options: ServeOptions, bound: socket.socket, signals: SignalWatcher) -> int:
    """Everything that needs JAX, which is imported here because it reads the environment."""
    import jax

    threading.Thread(target=begin_device, args=(jax,), name="device", daemon=True).start()
    from paxpage.engine.engine import is_out_of_memory

    try:
        from paxpage.server import launch
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("paxpage"):
            raise
        return complain(f"{error.name} is not installed: the extra serve has it (paxpage[serve])", EXIT_FAILED)
    try:
        jax.devices()
    except RuntimeError as error:
        return complain(error, EXIT_FAILED)
    try:
        return launch.load_and_serve(options, bound, signals)
    except ValueError as error:
        return complain(error, EXIT_BAD_USAGE)
    except OSError as error:  # two servers may bind one port; the second to listen learns it only then
        if error.errno != errno.EADDRINUSE:
            raise
        return complain(address_problem(options, error), EXIT_FAILED)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return complain(f"{error} {MORE_MEMORY}", EXIT_FAILED)


def begin_device(jax: ModuleType) -> None:
    """Has JAX look for its devices, half a second of a GPU's driver, while the rest is imported."""
    with contextlib.suppress(Exception):  # who asks next is told
        jax.devices()


def address_problem(options: ServeOptions, error: OSError) -> str:
    """Why the server cannot listen, and what to do about it."""
    if error.errno == errno.EADDRINUSE:
        return f"port {options.port} of {options.host} is in use; choose another with --port"
    return f"cannot listen on port {options.port} of {options.host}: {error.strerror}"


if __name__ == "__main__":
    end_process(main(sys.argv))  # unloading JAX takes seconds and changes nothing
