"""The files that start a bundle: llm_args.yaml, one script per way to launch, and separate prefill and decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dflash_trt.trtllm import attention
from dflash_trt.trtllm.choices import TARGET
from dflash_trt.trtllm.configuration import Configuration

_TEMPLATES = Path(__file__).with_name("scripts")
_HEADER = "# TensorRT-LLM {version} on {world} x {gpu}; written by dflash-trt build, explained by dflash-trt inspect.\n"


def launch_files(configuration: Configuration) -> dict[str, str]:
    """Name inside the bundle -> text. Every YAML has been checked against the release's fields.

    Raises BuildError if the release does not know a field.
    """
    c = configuration
    documents = {
        "llm_args.yaml": c.llm_args,
        "disaggregated/context.yaml": _context(c.llm_args),
        "disaggregated/generation.yaml": c.llm_args | {"cache_transceiver_config": _transceiver(c.llm_args)},
    }
    for document in documents.values():
        c.release.check(document)
    documents["triton/model.yaml"] = {"model": f"./{TARGET}", **c.llm_args, "triton_config": _TRITON}
    documents["disaggregated/router.yaml"] = _ROUTER
    c.release.check(_ROUTER, "disaggregated")
    world = c.llm_args["tensor_parallel_size"]
    header = _HEADER.format(version=c.release.version, world=world, gpu=c.gpu.product)
    files = {name: header + yaml.safe_dump(document, sort_keys=False) for name, document in documents.items()}
    values = {
        "WORLD": world,
        "NODES": c.nodes,
        "GPUS_PER_NODE": c.gpus_per_node,
        "CONTAINER": c.release.container,
        "VERSION": c.release.version,
    }
    files["launch/attention.py"] = Path(attention.__file__).read_text()
    for template in sorted(_TEMPLATES.iterdir()):
        text = template.read_text()
        for key, value in values.items():
            text = text.replace(f"@{key}@", str(value))
        files[f"launch/{template.name}"] = text
    return files


# Further settings that the model of triton_backend/all_models/llmapi reads. Streams need decoupled.
_TRITON = {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 100}
_ROUTER: dict[str, Any] = {
    "hostname": "localhost",
    "port": 8000,
    "backend": "pytorch",
    "context_servers": {"num_instances": 1, "urls": ["localhost:8001"]},
    "generation_servers": {"num_instances": 1, "urls": ["localhost:8002"]},
}


def _context(llm_args: dict[str, Any]) -> dict[str, Any]:
    """The prefill side: no drafting (context requests are not drafted) and no overlap scheduler, as documented."""
    args = {key: value for key, value in llm_args.items() if key != "speculative_config"}
    return args | {"disable_overlap_scheduler": True, "cache_transceiver_config": _transceiver(llm_args)}


def _transceiver(llm_args: dict[str, Any]) -> dict[str, Any]:
    return {"backend": "DEFAULT", "max_tokens_in_buffer": llm_args["max_seq_len"]}
