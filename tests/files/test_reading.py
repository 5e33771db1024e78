"""Files of strangers cost little time and memory, and an error names file and field."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.checkpoint.rope import inverse_frequencies
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import BundleError, CheckpointError, DFlashError, RequestError, quoted, show
from dflash_trt.files.reading import parse_object, read_object, read_text
from dflash_trt.models.configs import read_target_config
from dflash_trt.prompts import read_prompts
from dflash_trt.serving.openai.model import sampling_defaults
from tests.doubles.bounded import bounded
from tests.doubles.quantized_checkpoints import write_quant_config

READ = """
from pathlib import Path
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.checkpoint.rope import inverse_frequencies
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import DFlashError
for directory in map(Path, sys.argv[1:]):
    try:
        {}
        print("read")
    except DFlashError as error:
        print(error)
"""
TARGET = (
    "c = read_target_config(directory); inverse_frequencies(c.rope, c.head_dim, c.max_position_embeddings)"
)


def read(code: str, *directories: Path) -> str:
    """A reader's result for these directories, from a process with limits."""
    return bounded(READ.format(code), *directories)


def config(directory: Path, known: str = "qwen3-8b", **changes: Any) -> Path:
    """A directory with a changed configuration of a known target."""
    values = json.loads((known_configs(known)[0] / "config.json").read_text())
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values | changes))
    return directory


def test_a_key_that_appears_twice_is_found_in_linear_time(tmp_path: Path) -> None:
    keys = ",".join(f'"k{i}": 0' for i in range(60_000))
    (tmp_path / "config.json").write_text("{" + keys + ', "k59999": 1}')
    assert f"{tmp_path / 'config.json'}: the key 'k59999' appears more than once" in read(TARGET, tmp_path)


LAYERS = {"known": "qwen3-coder-30b-a3b", "num_hidden_layers": 10_000}
SIZES: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 2**29}, "head_dim is 536870912, expected an integer from 1 to 16384"),
    ({"num_hidden_layers": 2**30}, "num_hidden_layers is 1073741824, expected"),
    ({"vocab_size": 2**31 - 1}, "vocab_size is 2147483647, expected an integer from 1 to 16777216"),
    ({"intermediate_size": 2**30}, "intermediate_size is 1073741824, expected"),
    ({"layer_types": ["full_attention"] * 500_000}, "layer_types has 500000 entries, expected at most 10000"),
    ({"architectures": ["Qwen3ForCausalLM"] * 500_000}, "architectures has 500000 entries"),
    ({"eos_token_id": list(range(100_000))}, "eos_token_id has 100000 entries, expected at most 1024"),
    # Before the layers of experts are named.
    (LAYERS | {"num_experts": 2**30}, "num_experts is 1073741824, expected an integer from 1 to 16384"),
    (
        LAYERS | {"mlp_only_layers": [7] * 2_000_000},
        "mlp_only_layers has 2000000 entries, expected at most 10000",
    ),
]
EXCLUDED: list[tuple[list[str], str]] = [
    (["[" * 200_000], f'has "{"[" * 56}..., expected patterns of at most 512 characters'),
    (["*a" * 100_000], "expected patterns of at most 512 characters"),
    ([f"*{i}" for i in range(1025)], "has 1025 patterns, expected at most 1024"),
    (["a"] * (2**18 + 1), "exclude_modules has 262145 entries, expected at most 262144"),
    (["*a*a*a*a*a*a*a*a*a*b", *(f"layers.{i}" for i in range(100_000))], "read"),
]


def test_sizes_are_bounded_before_anything_is_made_of_them(tmp_path: Path) -> None:
    places = [config(tmp_path / str(i), **changes) for i, (changes, _) in enumerate(SIZES)]
    said = read(TARGET, *places).splitlines()
    for place, (_, message), line in zip(places, SIZES, said, strict=True):
        assert line.startswith(f"{place / 'config.json'}: {message}")


def test_excluded_modules_cost_little(tmp_path: Path) -> None:
    places = [tmp_path / str(i) for i in range(len(EXCLUDED))]
    for place, (excluded, _) in zip(places, EXCLUDED, strict=True):
        place.mkdir()
        quantization = {"quant_algo": "FP8", "exclude_modules": excluded}
        (place / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    code = (
        "q = read_quantization(directory); [q.algorithm(f'layers.{i}.' + 'a' * 100) for i in range(10_000)]"
    )
    said = read(code, *places).splitlines()
    for place, (_, message), line in zip(places, EXCLUDED, said, strict=True):
        assert message in line
        assert line == "read" or f"{place / 'hf_quant_config.json'}: quantization.exclude_modules" in line


def test_names_and_patterns_are_excluded(tmp_path: Path) -> None:
    write_quant_config(tmp_path, "FP8", exclude_modules=["lm_head", "model.layers.0*", "model.layers.?.mlp"])
    found = read_quantization(tmp_path)
    for layer in ("lm_head", "model.layers.0.mlp", "model.layers.05", "model.layers.3.mlp"):
        assert found.algorithm(layer) is None
    for layer in ("lm_head2", "model.layers.1", "model.layers.12.mlp"):
        assert found.algorithm(layer) is not None


def pipe(file: Path) -> str:
    os.mkfifo(file)
    return "is a pipe or a device, expected a regular file"


def zeros(file: Path) -> str:
    file.symlink_to("/dev/zero")
    return "is a pipe or a device, expected a regular file"


def folder(file: Path) -> str:
    file.mkdir()
    return "cannot be read (Is a directory)"


def absent(file: Path) -> str:
    return "no such file"


def endless(file: Path) -> str:
    with file.open("wb") as stream:
        stream.truncate(17 << 20)
    return "17825792 bytes, but this file may have at most 16777216"


# Contents of a file, and what is said of them.
CONTENTS = {
    b"": "not valid JSON", b"[]": "holds a JSON list, expected an object",
    b'{"a": "\xff"}': "not valid JSON ('utf-8' codec can't decode byte 0xff",
    "\ufeff{}".encode(): "not valid JSON (Unexpected UTF-8 BOM",
    b'{"a": ' + b"[" * 100_000: "nested deeper than the 64 levels allowed",
    b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}": "nested deeper than the 64 levels allowed",
    b'{"a": 1e999}': "1e999 is not JSON; JSON numbers are finite",
    b'{"a": 1' + b"0" * 5000 + b"}": "not valid JSON (Exceeds the limit",
}  # fmt: skip


def holding(content: bytes) -> Callable[[Path], str]:
    def make(file: Path) -> str:
        file.write_bytes(content)
        return CONTENTS[content]

    return make


WRONG: list[Callable[[Path], str]] = [pipe, zeros, folder, absent, endless, *map(holding, CONTENTS)]


def test_only_files_of_bounded_size_and_strict_json_are_read(tmp_path: Path) -> None:
    directories = [tmp_path / str(number) for number in range(len(WRONG))]
    for directory in directories:
        directory.mkdir()
    expected = [make(directory / "config.json") for make, directory in zip(WRONG, directories, strict=True)]
    said = read(TARGET, *directories).splitlines()
    for directory, message, line in zip(directories, expected, said, strict=True):
        assert line.startswith(f"{directory / 'config.json'}: {message}")


def test_a_configuration_may_have_nan_and_infinities(tmp_path: Path) -> None:
    """Python's json writes NaN and infinities, as the time steps of Nemotron's layers have."""
    config(tmp_path, architectures=["NemotronHForCausalLM"], time_step_limit=[0.0, math.inf])
    with pytest.raises(CheckpointError, match=r"architectures is .*NemotronH"):
        read_target_config(tmp_path)
    for value in (math.nan, math.inf, -math.inf):
        config(tmp_path, time_step_limit=[value])
        read_target_config(tmp_path)
        config(tmp_path, rms_norm_eps=value)
        with pytest.raises(CheckpointError, match=f"rms_norm_eps is {json.dumps(value)}, expected a number"):
            read_target_config(tmp_path)
        with pytest.raises(CheckpointError, match=r"config.json: .*finite"):
            read_object(tmp_path / "config.json")
        (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value, "top_p": 0.5}))
        assert sampling_defaults(tmp_path / "generation_config.json") == {"temperature": 1.0, "top_p": 0.5}


def test_errors_are_of_the_kind_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(RequestError, match="not UTF-8"):
        read_text(tmp_path / "a", 10, RequestError)
    with pytest.raises(BundleError, match="not valid JSON"):
        read_object(tmp_path / "a", kind=BundleError)
    with pytest.raises(BundleError, match="1 bytes, but this file may have at most 0"):
        read_object(tmp_path / "a", 0, kind=BundleError)
    with pytest.raises(BundleError, match="holds a JSON list"):
        parse_object("[]", "line 1", BundleError)


def test_a_missing_tensor_among_many_is_named_soon(tmp_path: Path) -> None:
    header: dict[str, Any] = {
        f"{'x' * 3000}.{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(3000)
    }
    write_header(tmp_path, header)
    said = read(f"Checkpoint(directory)['{'x' * 2999}.weight']", tmp_path)
    assert "has no tensor 'xxx" in said
    assert len(said) < 1000


def write_header(directory: Path, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def test_errors_are_one_short_line_of_printable_characters(tmp_path: Path) -> None:
    name = "weight\x1b[2J\n\u202e" + "w" * 100_000
    write_header(tmp_path, {name: {"dtype": "\x1b]0;owned\x07", "shape": [], "data_offsets": [0, 0]}})
    with pytest.raises(CheckpointError) as error:
        Checkpoint(tmp_path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000
    assert "weight\\x1b[2J\\n\\u202e" in str(error.value)
    assert str(DFlashError("a\nb" + "c" * 100_000)).startswith("a\\nbccc")
    assert len(str(DFlashError("\x00" * 100_000))) < 20_000


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("text\x1b", '"text\\u001b"'), ("é" * 10**7, '"' + "\\u00e9" * 9 + "\\u..."),
        ([[[]]] * 10**6, "[[[]], [[]]," + " [[]]," * 7 + " [[..."),
        ({"a": b"x", "b": {1, 2}}, '{"a": "<bytes>", "b": "<set>"}'), (10**5000, "<int>"), (float("nan"), "NaN"),
        ({(): 1}, "<dict>"),
    ],
    ids=["control", "long", "list", "types", "digits", "nan", "key"],
)  # fmt: skip
def test_values_are_shown_bounded(value: object, shown: str) -> None:
    assert show(value) == shown


def test_names_are_quoted_bounded() -> None:
    assert quoted("a\n") == "'a\\n'"
    assert quoted(["a", "b"]) == "['a', 'b']"
    assert len(quoted(["a" * 10**6] * 10**6)) < 5000


def test_prompt_files_are_read_as_strictly(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    for line, message in (
        ('{"prompt": "a", "prompt": "b"}', "prompts.jsonl:2: the key 'prompt' appears more than once"),
        ("[" * 100_000, "prompts.jsonl:2: nested deeper than the 64 levels"),
        ("{}", r'prompts.jsonl:2: expected {"prompt": "..."} or {"messages": \[...\]}, found {}'),
        ("[]", "prompts.jsonl:2: holds a JSON list, expected an object"),
        (
            '{"prompt": "a", "chat_template_kwargs": []}',
            r"prompts.jsonl:2: chat_template_kwargs is \[\], expected",
        ),
    ):
        file.write_text('{"prompt": "first, with \u2028 inside"}\n' + line)
        with pytest.raises(RequestError, match=message):
            read_prompts(file, 0)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(RequestError, match="pipe"):
        read_prompts(file, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"beta_fast": 1e-320, "beta_slow": 1e-322},
        {"beta_fast": 1e308},
        {"factor": 1e308},
        {"attention_factor": 1e-40},
    ],
    ids=["denormal", "rotations", "factor", "attention"],
)
def test_numbers_of_rope_are_those_that_float32_computes_with(tmp_path, changes) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    with pytest.raises(CheckpointError, match=r"rope_scaling\.\w+ is .* 1e-30 to 1e\+12"):
        read_target_config(config(tmp_path, rope_scaling=yarn | changes))
    scaled = read_target_config(config(tmp_path, rope_scaling=yarn | {"beta_fast": 1e12, "beta_slow": 1e-30}))
    frequencies, factor = inverse_frequencies(scaled.rope, 128, 40960)
    assert np.isfinite(frequencies).all()
    assert np.isfinite(factor)
