"""Every command of a first contact with a GPU, in order, and one archive of what they said.

Each command runs in a process of its own, because a fault in a library of the GPU ends the process that met it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from time import perf_counter

from dflash_trt import hardware
from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.engines.registry import DEFAULT, GPU_REFERENCE, engines, find
from dflash_trt.errors import UsageError
from dflash_trt.files.disk import whole_file
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import take_inventory

FORMAT = "dflash-trt first gpu"
PAIRS = ("tiny", "tiny-gpt-oss")
UNTOUCHED = 3  # the exit code where all is well, but no GPU was used
# The longest time of a command in seconds.
LIMIT = 1800
_ADVICE = {
    "doctor": "install what it lists as missing, then start again",
    "kernels": "its report has every operator's problem; docs/plugins.md says what kernels need",
    "build": "its log ends with the builder's own words; doctor.json has the versions and the GPU it was built for",
    "selftest": "the first check that failed is nearest to the cause; docs/guides/gpu.md says what each one means",
    "verify": "see its log; in BF16 rounding may choose another token where two logits are nearly equal",
    "bench": "see its log",
}
# The archive's own notes for who receives it.
_CONTENTS = """\
first_gpu.json      every command, its exit code and seconds, and what was left out
kernels.json        each kernel's problem, if any, and the speed of a copy in the GPU's memory
packages.json       installed Python packages and their versions
*.json, *.txt       what each command printed, and its errors
bundles/            manifests and logs of the builds; no weights, no plans
*/selftest.json     the figures of each check, and the error of every layer

There are no prompts but the package's own, no weights and no environment variables. Home directories are written as ~.
"""


@dataclass
class Step:
    """A command and how it ended: passed, differs (tokens are not all equal), failed, timed out or left out."""

    name: str
    command: Sequence[str]
    state: str = "left out"
    detail: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


def in_process_of_its_own(words: Sequence[str], output: Path, errors: Path) -> int:
    """Run a command, whose output and errors go to the two files. Returns the exit code.

    Raises TimeoutExpired after LIMIT seconds.
    """
    command = [sys.executable, "-m", "dflash_trt", *words]
    with output.open("wb") as out, errors.open("wb") as err:
        return subprocess.run(command, stdout=out, stderr=err, timeout=LIMIT, check=False).returncode


class FirstGPU:
    """The commands, in a temporary directory. `run` yields each step when it has ended.

    The kernels come first, then rounds on torch, then every other engine that builds and runs here, on both pairs. A
    failure leaves out only what needs its result. Without a GPU the rounds run on ONNX Runtime. `left_out` says why.
    Engines are compared with torch in float32 on the GPU if it runs, and else with ONNX Runtime. `touched` is the GPU
    that kernels ran on.
    """

    def __init__(self, archive: Path) -> None:
        """Raises UsageError if there is no directory for the archive."""
        if not archive.absolute().parent.is_dir():
            raise UsageError(
                f"--first-gpu is {archive}, and there is no directory {archive.parent}; make it first"
            )
        self.archive = archive
        self.steps: list[Step] = []
        self.left_out: dict[str, str] = {}
        self.touched, self.copied = "", 0

    def run(self) -> Iterator[Step]:
        """Run the commands and write the archive, also after an interruption."""
        with tempfile.TemporaryDirectory(prefix="dflash-first-gpu-") as made:
            self.work = Path(made)
            try:
                for step in self._planned():
                    self._run(step)
                    yield step
            finally:
                self._write()

    @property
    def exit_code(self) -> int:
        """1 if a step failed, else UNTOUCHED if no GPU was used, else 0."""
        failed = any(step.state != "passed" for step in self.steps)
        return 1 if failed else 0 if self.touched else UNTOUCHED

    def not_tested(self) -> list[str]:
        """The GPUs here that no step has used."""
        names = [gpu["name"] for gpu in hardware.gpus()]
        if self.touched in names:
            names.remove(self.touched)
        return names or ([] if self.touched else ["no GPU is here"])

    def _planned(self) -> Iterator[Step]:
        """The steps. Those after doctor depend on what it said."""
        doctor = Step("doctor", ["doctor", "--json"])
        yield doctor
        if doctor.state != "passed":
            return
        rows = {row["engine"]: row for row in json.loads(self._read("doctor.json"))["engines"]}
        here, on_gpu = [], bool(hardware.compute_capabilities())
        for engine in engines():
            row = rows[engine.name]
            if engine.memory.several_gpus:
                self.left_out[engine.name] = "its server schedules for itself, and has checks of its own"
            elif engine.name != DEFAULT and not (row["build"] and row["run"]):
                self.left_out[engine.name] = f"cannot build and run here: {row['note']}"
            elif engine.name != DEFAULT and not on_gpu:
                self.left_out[engine.name] = "no GPU is here"
            elif engine.name != DEFAULT:
                here.append(engine.name)
        lacking = "torch is not installed" if find(GPU_REFERENCE).lacking() else ""
        problem = (lacking or hardware.torch_problem()) if on_gpu else "no GPU is here"
        if problem:
            self.left_out["kernels"] = problem
        else:
            yield from self._kernels()
        references: dict[str, str] = {}
        for name in here or [DEFAULT]:
            for pair in PAIRS:
                if refused := self._refused(name, pair):
                    self.left_out[f"{pair} {name}"] = refused
                else:
                    yield from self._of_engine(name, pair, references, by_torch=GPU_REFERENCE in here)

    def _kernels(self) -> Iterator[Step]:
        report = self.work / "kernels.json"
        yield Step("kernels", ["selftest", "--kernels", "--report", str(report)])
        with suppress(OSError, ValueError):
            found = json.loads(report.read_text(encoding="utf-8"))
            self.touched, self.copied = found["gpu"] or "", found["copy_gb_per_s"] or 0

    def _refused(self, name: str, pair: str) -> str | None:
        """Why an engine takes no build of this pair for the GPU here."""
        folders = known_configs(pair)
        target = read_target_config(folders[0])
        inventory = take_inventory(target, read_drafter_config(folders[1], target))
        moe = inventory.target.moe
        formats = [moe.quantization] if moe is not None and moe.quantization else []
        capabilities = hardware.compute_capabilities()
        return find(name).refusal(capabilities[0], inventory, formats) if capabilities else None

    def _of_engine(
        self, name: str, pair: str, references: dict[str, str], *, by_torch: bool
    ) -> Iterator[Step]:
        """Build a pair and check it. references: the bundles that it is compared with, by pair."""
        if pair not in references:
            form = ["--engine", GPU_REFERENCE, "--precision", "target=fp32,drafter=fp32"]
            made = str(self.work / "bundles" / f"{pair}-reference")
            form = form if by_torch else ["--engine", DEFAULT]
            yield (step := Step(f"build {pair} reference", ["build", "--target", pair, *form, "--out", made]))
            references[pair] = made if step.state == "passed" else ""
        place = f"{pair}-{name}"
        bundle, folder = str(self.work / "bundles" / place), self.work / place
        folder.mkdir()
        report = ["--report", str(folder / "selftest.json")]
        if name == DEFAULT:
            bundle = references[pair]
            if not bundle:
                return
        else:
            yield (
                step := Step(
                    f"build {pair} {name}", ["build", "--target", pair, "--engine", name, "--out", bundle]
                )
            )
            if step.state != "passed":
                return
            if references[pair]:
                report += ["--reference", references[pair]]
        yield Step(f"selftest {pair} {name}", ["selftest", bundle, *report])
        yield Step(f"verify {pair} {name}", ["verify", bundle, "--json"])
        yield Step(f"verify {pair} {name} widths", ["verify", bundle, "--widths", "--limit", "2", "--json"])
        loads = ["--concurrency", "1,4", "--requests", "16", "--max-tokens", "32"]
        yield Step(f"bench {pair} {name}", ["bench", bundle, *loads, "--json"])

    def _run(self, step: Step) -> None:
        self.steps.append(step)
        kind, file = step.name.partition(" ")[0], step.name.replace(" ", "-")
        output = self.work / (f"{file}.json" if "--json" in step.command else f"{file}.txt")
        errors, begin = self.work / f"{file}.errors.txt", perf_counter()
        try:
            step.exit_code = in_process_of_its_own(step.command, output, errors)
        except subprocess.TimeoutExpired:
            step.state, step.detail = "timed out", f"did not end within {LIMIT} s"
        else:
            step.state = "passed" if step.exit_code == 0 else "failed"
            if kind == "verify" and step.exit_code == 1 and self._read(output.name).strip():
                step.state = "differs"
        step.seconds = round(perf_counter() - begin, 1)
        if step.state != "passed":
            # The first failed check, without the wrapping of a table.
            checks = (line for line in self._read(output.name).splitlines() if line.startswith("failed"))
            said = next(checks, "") or self._read(errors.name).strip()
            if step.exit_code is not None and step.exit_code < 0:
                step.detail = f"ended by signal {-step.exit_code}"
            lines = [step.detail, said.splitlines()[-1] if said else "", _ADVICE[kind]]
            step.detail = self._private("; ".join(filter(None, lines)))

    def _read(self, name: str) -> str:
        file = self.work / name
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    def _write(self) -> None:
        steps = [asdict(step) for step in self.steps]
        summary = {
            "format": FORMAT,
            "steps": steps,
            "left_out": self.left_out,
            "not_tested": self.not_tested(),
        }
        packages = ((d.metadata["Name"], d.version) for d in metadata.distributions())
        documents = {"first_gpu.json": summary, "packages.json": dict(sorted(packages, key=str))}
        with whole_file(self.archive) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("README.txt", _CONTENTS)
            for name, document in documents.items():
                packed.writestr(name, self._private(json.dumps(document, indent=1) + "\n"))
            for path in sorted(self.work.rglob("*")):
                name = path.relative_to(self.work).as_posix()
                if _sent(name) and path.is_file():
                    packed.writestr(name, self._private(self._read(name)))

    def _private(self, text: str) -> str:
        """The text without this machine's directories and without the values of secrets in the environment."""
        for name, value in os.environ.items():
            if re.search("TOKEN|KEY|SECRET|PASSWORD", name.upper()) and len(value) >= 8:
                text = text.replace(value, "***")
        places = {str(self.work): "WORK", str(Path.cwd()): "CWD", sys.prefix: "PYTHON", str(Path.home()): "~"}
        for place in sorted(places, key=len, reverse=True):
            if len(place) > 1:
                text = text.replace(place, places[place])
        return text


def _sent(name: str) -> bool:
    """Of the bundles, manifests and logs only."""
    if name.startswith("bundles/"):
        return name.endswith(("/manifest.json", ".log"))
    return name.endswith((".json", ".txt"))
