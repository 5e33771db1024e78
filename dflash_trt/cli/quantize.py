"""`dflash-trt quantize`: a checkpoint with quantized linear layers."""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash_trt.building.progress import progress_display
from dflash_trt.cli.options import add_common, named, option
from dflash_trt.cli.output import byte_count, print_json
from dflash_trt.errors import UsageError

SUMMARY = "write a checkpoint with its linear layers in FP8, NVFP4, MXFP4, INT8 or INT4"
DESCRIPTION = """\
Quantize the linear layers of a target or a drafter. Embedding, norms, routers and LM head stay as they are. The result
is a checkpoint in the format of NVIDIA's Model Optimizer, for `dflash-trt build` and other engines.
Scales come from the weights alone, and every pass computes the scales of its activations. With --calibration, NVIDIA's
Model Optimizer (the extra quantize) gives a target's fp8 and nvfp4 static scales, and its int4 AWQ's, from prompts.
`dflash-trt build --precision` does the same, without calibration, on the way to a bundle.
"""
EXAMPLES = """\
examples:
  dflash-trt quantize tiny --scheme nvfp4 --out checkpoints/tiny-nvfp4
  dflash-trt quantize checkpoints/target --scheme fp8 --head fp8 --out checkpoints/target-fp8
  dflash-trt quantize tiny --role drafter --scheme fp8 --out checkpoints/drafter-fp8
  dflash-trt quantize checkpoints/target --scheme fp8 --calibration shipped --out checkpoints/target-fp8-static
  dflash-trt quantize checkpoints/target --scheme int4 --exclude 'model.layers.0.*' --out checkpoints/target-int4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="NAME_OR_PATH",
        type=named,
        help="a known pair or model, or a directory with config.json",
    )
    option(parser, "--scheme", "SCHEME", _scheme,
           "how the weights are stored: fp8, nvfp4, mxfp4, int8 or int4", required=True)  # fmt: skip
    option(parser, "--out", "DIR", Path, "directory of the new checkpoint", required=True)
    parser.add_argument("--role", choices=["target", "drafter"], default="target",
                        help="which checkpoint of a known pair (default: target; not needed for a directory)"
    )  # fmt: skip
    option(parser, "--head", "SCHEME", _scheme, "also quantize the target's LM head, to this format")
    option(parser, "--exclude", "PATTERN", str,
           "leave these layers as they are, such as 'model.layers.0.*'; may be repeated", [], action="append"
    )  # fmt: skip
    option(parser, "--calibration", "FILE", str,
           "JSONL prompts for Model Optimizer; 'shipped' uses the package's own prompts")  # fmt: skip
    add_common(parser, "--json")


def _scheme(text: str) -> str:
    from dflash_trt.formats import SCHEMES  # imports NumPy, which --help does not need

    if text not in SCHEMES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(SCHEMES)}")
    return text


def run(args: argparse.Namespace) -> int:
    from dflash_trt.building.sources import resolve
    from dflash_trt.models.configs import is_drafter
    from dflash_trt.quantization.convert import quantize
    from dflash_trt.reports.inspection import inspect

    source = resolve(args.checkpoint, args.role).directory
    if args.calibration:
        from dflash_trt.quantization.modelopt import calibration_set, quantize_with_modelopt

        if args.head or is_drafter(source):
            raise UsageError("--calibration is for targets, without their LM head")
        file = None if args.calibration == "shipped" else Path(args.calibration)
        prompts = calibration_set(source, file)
        quantize_with_modelopt(source, args.out, args.scheme, prompts, exclude=args.exclude)
    else:
        with progress_display() as progress:
            quantize(source, args.out, args.scheme, exclude=args.exclude, head=args.head, progress=progress)
    description = inspect(args.out)
    if args.json:
        print_json(description)
    else:
        size = byte_count(description["weight_bytes"])
        print(f"{args.out}: {description['kind']}, {description['quantization']}, {size} of weights")
    return 0
