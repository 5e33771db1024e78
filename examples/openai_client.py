"""Ask a server of OpenAI's API with OpenAI's own client, and print the answer as it is generated.

pip install openai
dflash-trt serve smollm2-135m                               # in another terminal
python examples/openai_client.py "What is the capital of Japan?"
"""

from __future__ import annotations

import argparse
import os

try:
    from openai import OpenAI, OpenAIError
except ImportError as error:
    raise SystemExit(f"{error.name} is not installed: pip install openai") from None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    args = parser.parse_args()
    # The client wants a key, which the server reads only if it was started with one.
    client = OpenAI(base_url=args.url, api_key=os.environ.get("DFLASH_TRT_API_KEY", "none"))
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": args.question}],
        max_tokens=args.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:  # in the last chunk
            drafts = chunk.usage.model_extra["speculation"]  # a field of this server
            accepted = f"{drafts['accepted_tokens']} of {drafts['draft_tokens']} drafts accepted"
            print(f"\n[{chunk.usage.completion_tokens} tokens; {accepted}]")


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:  # no server, or one that refuses
        raise SystemExit(f"error: {error}") from None
