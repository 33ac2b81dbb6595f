"""Loads a model and serves it. Imports JAX: what JAX reads from the environment must be set before."""

import functools
import gc
import ipaddress
import json
import logging
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

from paxpage.engine.build import build_engine, serving_config
from paxpage.engine.compilation import CompilationCounter
from paxpage.engine.engine import Engine
from paxpage.models.embedded import default_model_path
from paxpage.prompts import render_chat
from paxpage.server.app import create_app
from paxpage.server.async_engine import AsyncEngine
from paxpage.server.generation import ServerContext, sampling_defaults
from paxpage.server.lifecycle import Lifecycle, serve
from paxpage.server.logprobs import LogprobFormatter
from paxpage.server.metrics import Metrics
from paxpage.server.options import API_KEY_VARIABLE, ServeOptions
from paxpage.server.signals import SignalWatcher
from paxpage.server.token_bytes import TokenBytes
from paxpage.server.tool_calls import ToolPolicy, choose_policy

LOGGER = logging.getLogger(__name__)
LOCAL_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a client on this machine finds "all addresses"


def load_and_serve(options: ServeOptions, bound: socket.socket, signals: SignalWatcher) -> int:
    """Everything that needs JAX; returns the exit code."""
    gc.disable()  # what is made while starting stays: looking through it for garbage is time lost, now and later
    engine = build_engine(
        default_model_path() if options.model is None else options.model,
        serving_config(options.engine),
        tokenizer=options.tokenizer,
        served_model_name=next(iter(options.served_names), None),
        show_progress=options.log_format == "text",
    )
    lifecycle = Lifecycle(options.shutdown_timeout)
    context = make_context(options, engine, lifecycle)
    app = create_app(context, api_key=options.api_key)
    gc.freeze()
    gc.enable()
    text = ready_text(options, context, bound.getsockname()[1])
    announcing = functools.partial(announce, options, text, engine)
    serve(app, context.async_engine, lifecycle, signals, bound, announcing)
    return lifecycle.exit_code


def make_context(options: ServeOptions, engine: Engine, lifecycle: Lifecycle) -> ServerContext:
    """What the routes need, from the engine and the flags. ValueError for a chat template that is no Jinja."""
    check_template(engine.tokenizer, options.chat_template)
    compilations = CompilationCounter(after=engine.runner.warmed_up)
    metrics = Metrics(
        engine.model_name,
        engine.max_model_len,
        has_prefix_cache=options.engine.enable_prefix_caching,
        count_compilations=lambda: compilations.num_compilations,
    )
    async_engine = AsyncEngine(
        engine,
        metrics,
        max_num_seqs=engine.scheduler.config.max_num_seqs,
        max_num_queued_reqs=options.max_num_queued_reqs,
        on_dead=lifecycle.end_dead,
    )
    engine.runner.warmed_up.add_done_callback(functools.partial(end_if_failed, async_engine))
    return ServerContext(
        engine=engine,
        async_engine=async_engine,
        tokenizer=engine.tokenizer,
        logprobs=LogprobFormatter(TokenBytes(engine.tokenizer)),
        model_name=engine.model_name,
        max_model_len=engine.max_model_len,
        max_logprobs=options.engine.max_logprobs,
        defaults=sampling_defaults(engine.generation if options.generation_config == "auto" else None),
        has_priorities=options.engine.scheduling_policy == "priority",
        chat_template=options.chat_template,
        created_s=int(time.time()),
        other_names=options.served_names[1:],
        tool_policy=tool_policy(options, engine.tokenizer),
    )


def check_template(tokenizer: Any, chat_template: str | None) -> None:
    """Raises ValueError for a template that cannot be parsed. What it makes of messages is seen when they come."""
    if tokenizer is None or chat_template is None:
        return
    import jinja2  # most servers start without

    try:
        render_chat(tokenizer, [{"role": "user", "content": "Hi"}], chat_template=chat_template)
    except ValueError as error:
        if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
            where = f"line {error.__cause__.lineno}: {error.__cause__.message}"
            raise ValueError(f"chat_template is no Jinja template: {where}") from None


def end_if_failed(async_engine: AsyncEngine, warmed_up: Future[None]) -> None:
    """Ends an engine for which not everything could be compiled, also when no request comes to notice it."""
    error = warmed_up.exception()
    if error is not None:
        async_engine.fail(error)


def tool_policy(options: ServeOptions, tokenizer: Any) -> ToolPolicy:
    """What becomes of calls of tools, from the flags and what the model's tokenizer shows."""
    template = options.chat_template or getattr(tokenizer, "chat_template", None)
    tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    added_tokens = {token.content: token.special for token in tokens}
    is_enabled = options.enable_auto_tool_choice is not False
    return choose_policy(options.tool_call_parser, is_enabled, template, added_tokens)


def exposure_warning(host: str, api_key: str | None) -> str | None:
    """What to say of a server that others reach and that asks for no key; None where there is nothing to say."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        is_local = False
    if is_local or api_key is not None:
        return None
    return f"{host} is open to other machines and no key is asked of them; set ${API_KEY_VARIABLE}"


def announce(options: ServeOptions, text: str, engine: Engine) -> None:
    """Says that requests are answered: to a person on stdout, to a machine as a line of the log.

    What few requests need is read from now on: nobody is kept waiting for it.
    """
    warning = exposure_warning(options.host, options.api_key)
    if warning is not None:
        LOGGER.warning(warning)
    if options.log_format == "text":
        print(text, flush=True)
    else:
        LOGGER.info(text.partition("\n")[0])
    threading.Thread(target=engine.grammars.load, name="grammar-tokenizer", daemon=True).start()


def ready_text(options: ServeOptions, context: ServerContext, port: int) -> str:
    """What is printed once requests are answered: the address, a command to paste, how to stop, what next."""
    host = LOCAL_HOSTS.get(options.host, options.host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    path, body = example_request(context)
    key = "" if options.api_key is None else f"-H 'Authorization: Bearer '${API_KEY_VARIABLE} "
    return "\n".join(
        (
            f"ready at {url}",
            f"  try it:   curl {url}{path} {key}-H 'Content-Type: application/json' -d '{json.dumps(body)}'",
            "  stop it:  Ctrl-C, or SIGTERM to this process",
            "  your own: python -m paxpage.serve --model=FOLDER_OR_GGUF_OR_ORG/NAME",
        )
    )


def example_request(context: ServerContext) -> tuple[str, dict[str, Any]]:
    """A route and a body that the model can answer."""
    if context.tokenizer is None:
        return "/v1/completions", {"model": context.model_name, "prompt": [1, 2, 3]}
    if context.chat_template is None and not getattr(context.tokenizer, "chat_template", None):
        return "/v1/completions", {"model": context.model_name, "prompt": "Once upon a time"}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return "/v1/chat/completions", {"model": context.model_name, "messages": messages}
