"""Serve a search agent as an OpenAI-compatible chat endpoint.

    .venv/bin/python -m search_r1.serve --run RUN_DIR
    .venv/bin/python -m search_r1.serve --model DIR --retriever_url http://127.0.0.1:8000/retrieve

It uses the same code for prompt, stop rules, limits and the format of retrieved passages as training, and the same
flags as infer.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shlex
import signal
import socket
from collections.abc import Sequence

from program_end import exit_status
from search_r1.errors import ServerError
from search_r1.http.arguments import add_serving_arguments, check_serving_arguments, read_token
from search_r1.http.client import host_and_port
from search_r1.http.process import (
    announce,
    bind,
    draining_server,
    settle_process,
)
from search_r1.llm_agent.command_line import add_agent_flags, agent_config, agent_sampling
from search_r1.llm_agent.run_retriever import retriever_of_run
from search_r1.llm_agent.templates import template_of
from search_r1.script_help import parser_of
from verl.config import Config
from verl.errors import ConfigError
from verl.process.startup import leave, log_to_stderr
from verl.process.storage import work_without_home

log = logging.getLogger(__name__)
ROUTE = "/v1/chat/completions"
TOKEN_VARIABLE = "SEARCH_R1_AUTH_TOKEN"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, "python -m search_r1.serve")
    add_agent_flags(parser)
    add_serving_arguments(parser, port=8001, token_variable=TOKEN_VARIABLE)
    parser.add_argument(
        "--max_concurrent", type=int, default=64, help="requests in progress; above it, HTTP 503 (default: %(default)s)"
    )
    parser.add_argument(
        "--history",
        choices=("use", "ignore", "refuse"),
        help="messages before the last one (the question): use them (with agent.format=chat only), ignore them, or "
        "refuse the request (default: use with agent.format=chat, else ignore)",
    )
    parser.add_argument("--no_access_log", action="store_true", help="turn off the log line of each request")
    parser.add_argument("--served_model_name", help="the model's name in requests (default: its folder or hub name)")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Load, then serve until SIGTERM or Ctrl-C. Returns the exit status, as `exit_status` says."""
    args = parse_arguments(argv)
    log_to_stderr()
    work_without_home()

    def load_and_serve() -> None:
        config, token = checked_config(args), read_token(args, TOKEN_VARIABLE)
        # The address is reserved before the model is loaded, which takes long: a port in use is told at once.
        listener = bind(args.host, args.port)
        with retriever_of_run(args, config):
            asyncio.run(serve(args, config, token, listener))

    return exit_status(load_and_serve, when_interrupted="")


def checked_config(args: argparse.Namespace) -> Config:
    """The config that the flags describe. Raises `ConfigError` and `ServerError`."""
    check_serving_arguments(args)
    if args.max_concurrent < 1:
        raise ServerError(f"--max_concurrent is {args.max_concurrent}; it must be at least 1")
    config = agent_config(args)
    # A run may have been trained in a way that a chat server cannot answer in: by a program, or on given passages.
    if config.agent.program is not None:
        raise ConfigError(
            "agent.program plays the episodes of this run, but here the built-in agent answers: leave it out by "
            "agent.program=null, or serve the model alone (`vllm serve`) and start the program"
        )
    if template_of(config.agent).needs_context:
        raise ConfigError(f"template {config.agent.template} needs passages beforehand; choose one that searches")
    # Only the prompt of a chat model has a place for earlier messages.
    is_chat = config.agent.format == "chat"
    if args.history == "use" and not is_chat:
        raise ServerError("--history use needs agent.format=chat: a policy with tags takes one question")
    args.history = args.history or ("use" if is_chat else "ignore")
    return config


async def serve(args: argparse.Namespace, config: Config, token: str | None, listener: socket.socket) -> None:
    """Load the agent and serve it until a signal; returns after a clean stop."""
    from search_r1.llm_agent.agent import open_agent
    from search_r1.serve.app import create_app
    from search_r1.serve.chat import ServeOptions
    from verl.agent.environment import StreamingSampler

    # The settings of the endpoint.
    name = args.served_model_name or config.actor_rollout_ref.model.path
    options = ServeOptions(
        name,
        timeout_s=args.timeout_s,
        max_concurrent=args.max_concurrent,
        seed=args.seed,
        auth_token=token,
        history=args.history,
        access_log=not args.no_access_log,
    )
    # The model is loaded before the address is announced; it is closed after the last request.
    async with open_agent(config, agent_sampling(args, config)) as agent:
        assert isinstance(agent.sampler, StreamingSampler)
        app = create_app(agent, agent.sampler, options)
        settle_process()
        announce(f"model {name}", listener, token, ROUTE)
        host, port = listener.getsockname()[:2]
        log.info("to try it:\n\n%s\n", curl_line(host, port, name, token is not None))
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again after a clean stop
            signal.signal(number, lambda *_: None)
        await draining_server(app, listener).serve(sockets=[listener])


def curl_line(host: str, port: int, model: str, with_token: bool) -> str:
    """A command for a shell on this machine that asks the server at `host` and `port` a question.

    The token is not shown: the command reads it from the variable that the server reads it from.
    """
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    question = {"model": model, "messages": [{"role": "user", "content": "Who is ...?"}]}
    words = ["curl", f"http://{host_and_port(here, port)}{ROUTE}", "-H", "Content-Type: application/json"]
    token = f' -H "Authorization: Bearer ${TOKEN_VARIABLE}"' if with_token else ""
    return f"{shlex.join(words)}{token} -d {shlex.quote(json.dumps(question))}"


if __name__ == "__main__":
    leave(main())
