"""`dflash-trt serve`: a bundle behind OpenAI's API, or behind Triton Inference Server."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from dflash_trt.cli.deploy import add_engine_arguments, engine_settings
from dflash_trt.cli.options import add_bundle, add_fields, bundle_of, fields_of, option, port, switch
from dflash_trt.engines import registry
from dflash_trt.errors import DFlashError
from dflash_trt.logs import LEVELS
from dflash_trt.serving.openai.settings import Address, ServerSettings

SUMMARY = "serve a bundle with OpenAI's API, or with Triton Inference Server"
DESCRIPTION = """\
Serve a bundle until Ctrl-C or SIGTERM. By default clients speak OpenAI's API: chats, completions, responses, and a page
with a chat at /. It needs the extra `serve`, and serves every engine.

`--api triton` starts Triton Inference Server instead, with its HTTP and gRPC protocols. The server is the tritonserver
on the PATH, or the one of nvidia-pytriton's wheel: pip install '.[serve]' nvidia-pytriton in a checkout. Without
either, this prints the command that serves the bundle in a container. Words after `--` are tritonserver's own options.

An engine that dies is started again. If tritonserver dies, this ends with its exit code, for a container to restart it.
"""
EXAMPLES = """\
examples:
  dflash-trt serve smollm2-135m
  dflash-trt serve bundles/tiny --port 9000 --max-batch-size 16 --api-key-file keys.txt
  dflash-trt serve bundles/tiny --api triton --log-level info
  dflash-trt serve bundles/tiny --api triton -- --log-format=ISO8601 --http-thread-count=16

  curl -s localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "The capital of Japan?"}], "temperature": 0, "max_tokens": 64}'
"""
_KEY_VARIABLE = "DFLASH_TRT_API_KEY"
_OPENAI = "with --api openai"
_PORTS = {"grpc_port": 8001, "metrics_port": 8002}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    option(parser, "--api", None, str, "what clients speak", "openai", choices=("openai", "triton"))
    add_fields(parser, Address)
    option(parser, "--log-level", None, str,
           "what server and engine log on standard error (default: warnings, and with --api openai requests)",
           choices=tuple(LEVELS))  # fmt: skip
    switch(parser, "--quiet", "print no addresses, and log no requests")
    openai = parser.add_argument_group(_OPENAI)
    option(openai, "--api-key-file", "FILE", Path,
           f"API keys, one per line; ${_KEY_VARIABLE} may hold one, too (default: anyone may come)")  # fmt: skip
    add_fields(openai, ServerSettings)
    triton = parser.add_argument_group("with --api triton")
    for name, number in _PORTS.items():
        option(triton, f"--{name.replace('_', '-')}", "PORT", port, default=number)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if not hasattr(os, "geteuid"):
        raise DFlashError("the server's processes need Linux or macOS; on Windows, serve in WSL 2")

    _check_options(args)
    return _triton(args) if args.api == "triton" else _openai(args)


def _check_options(args: argparse.Namespace) -> None:
    """End the program, as for wrong usage, for values and combinations that cannot be served."""
    if args.passed and args.api != "triton":
        args.usage_error("words after -- are options of tritonserver: add --api triton")
    if args.api == "triton":
        _check_unused(args)
    if (args.certificate is None) != (args.certificate_key is None):
        args.usage_error("--tls-cert and --tls-key: only one is given, expected both")
    if args.max_seconds == 0:
        args.usage_error("--max-deadline is 0, expected more: no request could be answered")
    for name in ("port", *_PORTS) if args.api == "triton" else ():
        if getattr(args, name) == 0:
            args.usage_error(f"--{name.replace('_', '-')} is 0, expected a port: Triton does not choose one")


def _check_unused(args: argparse.Namespace) -> None:
    """Refuse what only our server of OpenAI's API reads, so that nobody relies on keys or TLS that another ignores."""
    groups = {group.title: group._group_actions for group in args.parser._action_groups}
    unused = [o.option_strings[0] for o in groups[_OPENAI] if getattr(args, o.dest) != o.default]
    if os.environ.get(_KEY_VARIABLE):
        unused.append(f"${_KEY_VARIABLE}")
    if unused:
        args.usage_error(
            f"{unused[0]} is for --api openai, and --api triton ignores it; for keys or TLS, put a gateway in front"
        )


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it, or the disk is full
        print(f"dflash-trt serve: {text}", file=sys.stderr, flush=True)


def say_who_may_come(host: str, why: str) -> None:
    """A line on standard error where other machines reach the address, with the reason why they get answers."""
    from dflash_trt.serving.openai.server import is_loopback

    if not is_loopback(host):
        _say(f"anyone who reaches {host} may use the model: {why}")


def _shown(host: str) -> str:
    """An address as URLs write it."""
    return f"[{host}]" if ":" in host else host


def _openai(args: argparse.Namespace) -> int:
    from dflash_trt.runtime import BATCH
    from dflash_trt.serving.deploy import check_drafting
    from dflash_trt.serving.openai.server import check_certificate, check_installed, serve

    check_installed()
    keys = read_keys(args.api_key_file)
    check_certificate(args.certificate, args.certificate_key)
    bundle = bundle_of(args)
    registry.require_packages(bundle)
    asked = engine_settings(args) | {"log_level": args.log_level}
    engine = {name: value for name, value in asked.items() if value is not None}
    check_drafting(bundle, engine)
    more = {
        "keys": keys,
        "engine": engine,
        "log_level": args.log_level or ("warning" if args.quiet else "info"),
        "limit": (args.max_batch_size or BATCH) + args.max_queue,
    }
    settings = ServerSettings(**fields_of(args, ServerSettings) | more)
    host = _shown(args.host)

    def ready(port: int) -> None:
        if args.quiet:
            return
        url = f"http{'s' if args.certificate else ''}://{host}:{port}"
        print(f"serving {args.bundle}; Ctrl-C stops")
        print(f"page     {url}/")
        print(f"API      {url}/v1")
        print(f"metrics  {url}/metrics", flush=True)

    if not keys:
        say_who_may_come(args.host, "there is no --api-key-file")
    return serve(bundle, settings, ready, _say)


def read_keys(file: Path | None) -> list[str]:
    """The keys of a file and of the environment."""
    try:
        text = "" if file is None else file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DFlashError(f"{file}: is not text in UTF-8 (byte {error.start})") from None
    keys = [line.strip() for line in text.splitlines()]
    keys = [key for key in [*keys, os.environ.get(_KEY_VARIABLE, "").strip()] if key]
    if file is not None and not keys:
        raise DFlashError(f"{file}: has no API key, expected one per line")
    return keys


def _triton(args: argparse.Namespace) -> int:
    from dflash_trt.extras import install
    from dflash_trt.serving.deploy import container_command, deploy
    from dflash_trt.serving.launch import Addresses, find_server, run, server_arguments

    host, bundle = _shown(args.host), bundle_of(args)
    ports = {"http": args.port, "grpc": args.grpc_port, "metrics": args.metrics_port}
    addresses = Addresses(args.host, ports)
    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as temporary:  # only this user may enter it
        directory = Path(temporary)
        server = find_server(directory)
        if server is None:
            _say(
                f"there is no tritonserver on the PATH; get one with {install('serve', 'tritonserver')}, or "
                "serve in a container:"
            )
            print(container_command(bundle))
            return 1
        registry.require_packages(bundle)
        server.check()
        addresses.check()
        repository = deploy(bundle, directory / "repository", python=sys.executable, **engine_settings(args))

        def ready() -> None:
            if args.quiet:
                return
            print(f"serving {args.bundle}, model dflash; Ctrl-C stops")
            print(f"HTTP     http://{host}:{args.port}/v2/models/dflash/generate")
            print(f"gRPC     {host}:{args.grpc_port}")
            print(f"metrics  http://{host}:{args.metrics_port}/metrics", flush=True)

        say_who_may_come(args.host, "put a gateway with authentication in front")
        arguments = server_arguments(
            repository, addresses, args.log_level or "warning", args.grace, args.passed
        )
        return run(server, arguments, addresses, args.grace, ready, _say)
