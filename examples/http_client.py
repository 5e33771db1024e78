"""Request a completion from Triton (`dflash-trt serve smollm2-135m --api triton`) with only the standard library.

It posts to `generate`, or reads the server-sent events of `generate_stream`.

python examples/http_client.py "The capital of Japan is"
python examples/http_client.py "The capital of Japan is" --stream
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--url", default="http://localhost:8000")
    args = parser.parse_args()
    if not 0 < args.max_tokens < 2**31:  # of the tensor's type; Triton reads 2**32 + 5 in JSON as 5
        parser.error(f"--max-tokens is {args.max_tokens}, expected 1..{2**31 - 1}")
    fields = {"text_input": args.prompt, "max_tokens": args.max_tokens, "stream": args.stream}
    path = "generate_stream" if args.stream else "generate"
    request = urllib.request.Request(f"{args.url}/v2/models/dflash/{path}", json.dumps(fields).encode())
    try:
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                event = json.loads(line.removeprefix(b"data: ") or b"{}") if line.strip() else {}
                if "error" in event:
                    raise SystemExit(f"the server says: {event['error']}")
                print(event.get("text_output", ""), end="", flush=True)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"the server says: {json.loads(error.read())['error']}") from error
    except urllib.error.URLError as error:
        raise SystemExit(f"{args.url}: no server answers ({error.reason})") from None
    print()


if __name__ == "__main__":
    main()
