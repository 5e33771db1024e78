"""Request a completion from a server (`dflash-trt serve smollm2-135m --api triton`) over gRPC.

pip install 'tritonclient[grpc]'
python examples/client.py "The capital of Japan is"            # one answer
python examples/client.py "The capital of Japan is" --stream   # as it is generated
"""

from __future__ import annotations

import argparse
from queue import Queue
from typing import Any

try:
    import numpy as np
    import tritonclient.grpc as grpcclient
except ImportError as error:
    raise SystemExit(f"{error.name} is not installed: pip install 'tritonclient[grpc]'") from None


def tensor(name: str, kind: str, value: Any) -> grpcclient.InferInput:
    """One input, with the batch dimension."""
    types = {"BYTES": object, "INT32": np.int32, "FP32": np.float32, "BOOL": bool}
    array = np.array([[value.encode() if isinstance(value, str) else value]], dtype=types[kind])
    made = grpcclient.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--url", default="localhost:8001")
    args = parser.parse_args()
    if not 0 < args.max_tokens < 2**31:  # of the tensor's type; Triton reads 2**32 + 5 in JSON as 5
        parser.error(f"--max-tokens is {args.max_tokens}, expected 1..{2**31 - 1}")
    inputs = [
        tensor("text_input", "BYTES", args.prompt),
        tensor("max_tokens", "INT32", args.max_tokens),
        tensor("stream", "BOOL", args.stream),
        tensor("return_perf_metrics", "BOOL", True),
    ]
    # The model is decoupled: even a single answer arrives over a stream.
    answers: Queue[tuple[Any, Any]] = Queue()
    with grpcclient.InferenceServerClient(args.url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("dflash", inputs, timeout=60_000_000)  # microseconds
        reason = None
        while reason is None:
            result, error = answers.get()
            if error is not None:
                raise SystemExit(f"the server says: {error}")
            print(result.as_numpy("text_output")[0, 0].decode(), end="", flush=True)
            reason = result.as_numpy("finish_reason")  # only the last answer has it
        rate, drafted = (result.as_numpy(name)[0, 0] for name in ("acceptance_rate", "total_draft_tokens"))
        print(f"\n[{reason[0, 0].decode()}; {rate:.0%} of {drafted} drafted tokens accepted]")


if __name__ == "__main__":
    main()
