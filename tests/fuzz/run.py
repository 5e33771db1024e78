"""Run readers on almost valid inputs, each in its own process with limits on time and memory.

    python -m tests.fuzz.run --minutes 60            # all readers in turn, repeatedly, with new inputs
    python -m tests.fuzz.run --reader tokenizer --inputs 500 --seed 7

An input fails if anything but DFlashError is raised, an error is not one short line, or the process ends. It also
fails if it takes more than SECONDS of CPU or MEMORY. Hypothesis minimizes it if the process survives. Failures are
kept in tests/fuzz/seeds/READER/, which every run reads first. Commit them together with their fix.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random

SECONDS, MEMORY = 10, 3 << 30  # for one input
SEEDS = Path(__file__).parent / "seeds"
_LAST = "last.json"  # the current input, for the case that the process ends
_MESSAGE_CHARACTERS = 20_000  # 4000, each escaped


def main(arguments: list[str] | None = None) -> int:
    from tests.fuzz.readers import READERS

    parser = argparse.ArgumentParser(description="Fuzz every reader of files and requests.")
    parser.add_argument("--minutes", type=float, default=0, help="how long; 0 is one turn")
    parser.add_argument("--inputs", type=int, default=300, help="per reader and turn")
    parser.add_argument("--seed", type=int, help="of the first turn (default: the time)")
    parser.add_argument("--reader", action="append", choices=READERS, help="only this one; may be repeated")
    args = parser.parse_args(arguments)
    seed = int(time.time()) if args.seed is None else args.seed
    until, failed = time.monotonic() + 60 * args.minutes, 0
    while True:
        for name, problem in run(args.reader or READERS, args.inputs, seed, keep=True):
            print(f"{name}, seed {seed}: {problem or f'{args.inputs} inputs'}", flush=True)
            failed += problem is not None
        seed += 1
        if time.monotonic() > until:
            return 1 if failed else 0


def run(
    names: Iterable[str], inputs: int, seed: int, *, keep: bool = False
) -> Iterator[tuple[str, str | None]]:
    """The failure of each reader, if any, among the kept inputs and some new ones."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        command = [sys.executable, "-m", "tests.fuzz.run", "--child", scratch, str(inputs), str(seed), *names]
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | threads
        ) as process:
            assert process.stdout is not None
            for name, code in map(str.split, process.stdout):
                yield name, _problem(Path(scratch) / name, int(code), keep)
        assert process.returncode == 0, f"the process of all readers ended with {process.returncode}"


def _problem(scratch: Path, code: int, keep: bool) -> str | None:
    """What a reader's process has left."""
    if code == 0:
        return None
    text, last = (scratch / "output").read_text(errors="replace")[-4000:], scratch / _LAST
    if not last.exists():
        return f"exit code {code} before the first input: {text}"
    if keep:
        kept = SEEDS / scratch.name / f"{sha256(last.read_bytes()).hexdigest()[:12]}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(last.read_bytes())
        return f"exit code {code} over {kept}: {text}"
    return f"exit code {code}: {text}\ninput: {last.read_text()[:4000]}"


def child(scratch: Path, inputs: int, seed: int, names: Sequence[str]) -> None:
    """Run the inputs of each reader in a fork of this process, which has imported all of them."""
    import hypothesis  # noqa: F401

    import tests.fuzz.readers  # noqa: F401

    for name in names:
        (scratch / name).mkdir()
        if process := os.fork():
            print(name, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
            continue
        code = 1
        try:
            with (scratch / name / "output").open("wb") as output:  # panics of Rust may be long
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            read_inputs(name, inputs, seed, scratch / name)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def read_inputs(name: str, inputs: int, seed: int, scratch: Path) -> None:
    """All inputs of one reader, in this process."""
    from hypothesis import HealthCheck, Phase, given, settings, strategies
    from hypothesis import seed as seeded

    from tests.fuzz.readers import READERS

    reader, directory = READERS[name], scratch / "input"
    directory.mkdir()
    reader.prepare(directory)
    files = reader.files(directory)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, resource.RLIM_INFINITY))

    def read(changed: Mapping[str, bytes]) -> None:
        for file, content in changed.items():
            (directory / file).write_bytes(content)
        last = {file: text.decode("latin-1") for file, text in changed.items()}
        (scratch / _LAST).write_text(json.dumps(last))
        _check(reader.read, directory)

    read({file: content for file, (content, _) in files.items()})
    for kept in sorted((SEEDS / name).glob("*.json")):
        read({file: text.encode("latin-1") for file, text in json.loads(kept.read_text()).items()})

    @seeded(seed)
    @settings(
        max_examples=inputs, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(strategies.randoms(use_true_random=False))
    def mutated(random: Random) -> None:
        chosen = random.randrange(len(files))
        read(
            {
                file: mutate(random, content) if index == chosen or random.random() < 0.2 else content
                for index, (file, (content, mutate)) in enumerate(files.items())
            }
        )

    mutated()


def _check(read: object, directory: Path) -> None:
    from dflash_trt.errors import DFlashError

    before = time.process_time()
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    # Ends readers that never return, a little later than the limit for slow ones.
    resource.setrlimit(resource.RLIMIT_CPU, (int(before) + 2 * SECONDS, most))
    message = "nothing is wrong"
    try:
        read(directory)
    except DFlashError as error:
        message = str(error)
    assert message.isprintable(), f"not one line of printable characters: {message}"
    assert 10 < len(message) < _MESSAGE_CHARACTERS, f"{len(message)} characters: {message}"
    spent = time.process_time() - before
    assert spent < SECONDS, f"took {spent:.1f} s of CPU"


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    from tests.fuzz import run as fuzz  # this module by its name, because a test may have changed it

    if sys.argv[1:2] == ["--child"]:
        fuzz.child(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
    else:
        raise SystemExit(fuzz.main())
