"""`dflash-trt serve`: a bundle behind Triton Inference Server."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from dflash_trt.cli.deploy import add_engine_arguments, engine_settings
from dflash_trt.engines import registry

SUMMARY = "serve a bundle with Triton Inference Server"
DESCRIPTION = """\
Serve a bundle with Triton Inference Server, over HTTP and gRPC, until Ctrl-C or SIGTERM. The server is the tritonserver
on the PATH, or the one of nvidia-pytriton's wheel: pip install '.[triton-local]' in a checkout. Without either, this
prints the command that serves the bundle in a container.

Clients talk to a proxy in front of the server. It limits requests and passes on only those to the model. APIs that load
code, map memory, trace or log are closed. A server, proxy or engine that dies is restarted.
"""
EXAMPLES = """\
examples:
  dflash-trt serve bundles/tiny
  dflash-trt serve bundles/tiny --http-port 9000 --max-batch-size 16 --log-level info

  curl -s localhost:8000/v2/models/dflash/generate -d '{"text_input": "def add(a, b):", "max_tokens": 32}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a directory made by `dflash-trt build`")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to serve on (default: 127.0.0.1)"
    )
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(f"--{name}-port", type=int, default=port, metavar="PORT", help=f"default: {port}")
    parser.add_argument(
        "--server", default="triton", choices=("triton", *(e.server for e in registry.engines() if e.server)),
        help="trtllm-serve: TensorRT-LLM's own, with OpenAI's API on the HTTP port; takes none of the options below",
    )  # fmt: skip
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS",
        help="time for requests to finish after a signal to stop (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--log-level", default="warning", choices=("error", "warning", "info", "verbose"),
        help="log level of the server on standard error (default: warning)",
    )  # fmt: skip
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from dflash_trt.bundle.manifest import Bundle
    from dflash_trt.extras import install

    if args.server != "triton":
        bundle = Bundle.open(args.bundle)
        registry.engine_of(bundle).serve(bundle, args.server, host=args.host, port=args.http_port)
    from dflash_trt.serving.deploy import container_command, deploy, request_fields
    from dflash_trt.serving.launch import find_server, server_arguments
    from dflash_trt.serving.proxy import Settings, Sockets, check_installed, max_request_bytes
    from dflash_trt.serving.supervisor import Supervisor

    def say(text: str) -> None:
        print(f"dflash-trt serve: {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as temporary:  # only this user may enter it
        directory = Path(temporary)
        server = find_server(directory)
        if server is None:
            say(
                f"there is no tritonserver on the PATH; get one with {install('triton-local')}, or "
                "serve in a container:"
            )
            print(container_command(args.bundle))
            return 1
        check_installed()
        repository = deploy(
            args.bundle, directory / "repository", python=sys.executable, **engine_settings(args)
        )
        sockets = Sockets(directory)
        settings = Settings(
            host=args.host,
            http_port=args.http_port,
            grpc_port=args.grpc_port,
            metrics_port=args.metrics_port,
            upstream=temporary,
            max_bytes=max_request_bytes(Bundle.open(args.bundle).manifest["max_seq_len"]),
            fields=request_fields(),
        )

        def ready() -> None:
            print(f"serving {args.bundle}, model dflash; Ctrl-C stops")
            print(f"HTTP     http://{args.host}:{args.http_port}/v2/models/dflash/generate")
            print(f"gRPC     {args.host}:{args.grpc_port}")
            print(f"metrics  http://{args.host}:{args.metrics_port}/metrics", flush=True)

        if args.host not in ("127.0.0.1", "::1", "localhost"):
            say(f"anyone who reaches {args.host} may use the model: there is no authentication")
        arguments = server_arguments(repository, sockets, args.log_level)
        return Supervisor(server, arguments, repository, sockets, settings, args.grace).run(ready, say)
