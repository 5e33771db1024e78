"""Send several prompts at once to Triton (`dflash-trt serve smollm2-135m --api triton`) with one asyncio gRPC client.

Each completion is printed when it is finished.

pip install 'tritonclient[grpc]'
python examples/async_client.py "The capital of Japan is" "def fibonacci(n):" "The sea is"
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

try:
    import numpy as np
    from grpc import RpcError
    from tritonclient.grpc import InferInput
    from tritonclient.grpc.aio import InferenceServerClient
    from tritonclient.utils import InferenceServerException
except ImportError as error:
    raise SystemExit(f"{error.name} is not installed: pip install 'tritonclient[grpc]'") from None


async def complete(client: InferenceServerClient, prompt: str, max_tokens: int) -> str:
    """The completion of one prompt, collected from a stream. Leaving the loop early would cancel the request."""
    inputs = [
        InferInput(n, [1, 1], t)
        for n, t in (("text_input", "BYTES"), ("max_tokens", "INT32"), ("stream", "BOOL"))
    ]
    for tensor, value in zip(inputs, (prompt.encode(), max_tokens, True), strict=True):
        dtype = {"BYTES": object, "INT32": np.int32, "BOOL": bool}[tensor.datatype()]
        tensor.set_data_from_numpy(np.array([[value]], dtype=dtype))

    async def request() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "dflash", "inputs": inputs}

    text = ""
    async for result, error in client.stream_infer(request()):
        if error is not None:
            raise error
        text += result.as_numpy("text_output")[0, 0].decode()
    return text


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--url", default="localhost:8001")
    args = parser.parse_args()
    if not 0 < args.max_tokens < 2**31:  # of the tensor's type; Triton reads 2**32 + 5 in JSON as 5
        parser.error(f"--max-tokens is {args.max_tokens}, expected 1..{2**31 - 1}")

    async def one(prompt: str) -> None:
        print(f"--- {prompt}\n{await complete(client, prompt, args.max_tokens)}", flush=True)

    async with InferenceServerClient(args.url) as client:
        await asyncio.gather(*map(one, args.prompts))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except InferenceServerException as error:
        raise SystemExit(f"the server says: {error}") from None
    except RpcError as error:
        raise SystemExit(f"no server answers: {error.details()}") from None
