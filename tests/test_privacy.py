"""No command sends anything to another machine, or writes a file that SECURITY.md does not list.

Each runs with an empty home. The variables of the surroundings are not passed on: some libraries report nothing where
they see continuous integration.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.doubles.watched import Watch, available, watched

ROOT = Path(__file__).parent.parent
PROMPTS = "".join(json.dumps({"prompt": f"x = {i}"}) + "\n" for i in range(2))
# The commands by the name of their process, which runs them one after the other; BUNDLE, PROMPTS and HELD_OUT are
# places. What they read from standard input is a "hi".
COMMANDS = {
    "build": ["build --target tiny --out bundle"],
    "answers": [
        "chat BUNDLE --max-tokens 4",
        "generate BUNDLE --prompt x --max-tokens 4",
        "verify BUNDLE --limit 1 --temperatures 0 --max-tokens 4",
        "selftest BUNDLE",
    ],
    "files": [
        "deploy BUNDLE --out triton",
        "inspect BUNDLE",
        "plan --target tiny --gpu b200",
        "quantize tiny --scheme int4 --out quantized",
        "pairs",
        "doctor",
    ],
    "serve": ["serve BUNDLE --port 0"],
    "bench": ["bench BUNDLE --requests 2 --concurrency 1 --max-tokens 4 --plot bench.svg"],
    "train": [
        "train regenerate --bundle BUNDLE --prompts PROMPTS --out answers.jsonl --max-tokens 4",
        "train drafter --target tiny --data answers.jsonl --out run --steps 1 --batch-size 1"
        " --held-out HELD_OUT --eval-tokens 2",
        "fit tiny --hours 0.001 --from tiny --out fitted",
    ],
}
RUN = "import sys; from dflash_trt.cli import main; sys.exit(max(main(words.split()) for words in sys.argv[1:]))"
# Places that commands that generate or draw write to; SECURITY.md lists them, too.
DRAW = ("bench", "train")
GENERATE = ("answers", "bench", "serve", "train")
TIMES = "~/.cache/dflash-trt/pass-times"
CHARTS = ("~/.cache/matplotlib", "~/.config/matplotlib", "~/.cache/fontconfig", "/var/cache/fontconfig")

pytestmark = pytest.mark.skipif(not available(), reason="needs Linux with seccomp's user notifications")


@dataclass
class Place:
    """A working directory, and a home and a temporary directory that are empty at first."""

    root: Path

    def __post_init__(self) -> None:
        for each in (self.root, self.home, self.temporary, self.work):
            each.mkdir()

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def work(self) -> Path:
        return self.root / "work"

    def run(self, *command: str, use: Callable[[Watch], str] | None = None, **environment: str) -> Watch:
        """Run a command under watch until it has ended well."""
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        kept |= {"HOME": str(self.home), "TMPDIR": str(self.temporary)}
        kept["PYTHONDONTWRITEBYTECODE"] = "1"
        kept["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "plugins")))
        with watched([sys.executable, *command], kept | environment, self.work) as watch:
            said = use(watch) if use else watch.process.communicate("hi\n", timeout=900)[0]
        assert watch.process.returncode == 0, said
        return watch

    def strays(self, watch: Watch) -> set[str]:
        """What was written outside of the working directory and is no device, with the home as ~."""
        ours = (self.work, self.temporary, Path("/dev"), Path("/proc"))
        found = {path for path in watch.made if not any(path.is_relative_to(each) for each in ours)}
        return {str(path).replace(str(self.home), "~") for path in found}


def served(watch: Watch) -> str:
    """Have a chat with the server that starts, and end it."""
    assert watch.process.stdout is not None
    said = ""
    while not (found := re.search(r"API +(http://127\.0\.0\.1:\d+/v1)", said)):
        line = watch.process.stdout.readline()
        assert line, said
        said += line
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
    post = urllib.request.Request(f"{found[1]}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(post, timeout=60) as answer:
        assert answer.status == 200
    watch.process.send_signal(signal.SIGTERM)
    return said + watch.process.communicate(timeout=60)[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[tuple[Place, Watch]]]]:
    """The run of every process. Two run at a time."""
    root = tmp_path_factory.mktemp("privacy")
    (prompts := root / "prompts.jsonl").write_text(PROMPTS)
    (held_out := root / "held_out.jsonl").write_text('{"prompt": "y = 1"}\n')
    names = {"BUNDLE": str(root / "build/work/bundle"), "PROMPTS": str(prompts), "HELD_OUT": str(held_out)}

    def run(name: str, lines: list[str]) -> tuple[Place, Watch]:
        place = Place(root / name)
        words = [" ".join(names.get(word, word) for word in line.split()) for line in lines]
        return place, place.run("-c", RUN, *words, use=served if name == "serve" else None)

    with ThreadPoolExecutor(2) as pool:
        made = {"build": pool.submit(run, "build", COMMANDS["build"])}
        made["build"].result()
        made |= {name: pool.submit(run, name, lines) for name, lines in COMMANDS.items() if name not in made}
        yield made


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_send_nothing_and_write_only_what_is_listed(runs, name) -> None:
    place, watch = runs[name].result()
    assert watch.sent == []
    listed = (*(CHARTS if name in DRAW else ()), *((TIMES,) if name in GENERATE else ()))
    places = [Path(each) for each in listed]
    allowed = {str(parent) for each in places for parent in each.parents}  # made on the way
    strays = {
        stray for stray in place.strays(watch) - allowed
        if not any(Path(stray).is_relative_to(each) for each in places)
    }  # fmt: skip
    assert strays == set()
    left = {path.name for path in place.temporary.iterdir()}
    assert {each for each in left if name != "train" or not each.startswith("torchinductor_")} == set()


def test_every_place_is_listed() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert [
        each
        for each in (*CHARTS, "~/.cache/dflash-trt", "pass-times", "torchinductor_USER")
        if f"`{each}`" not in text
    ] == []


def test_the_images_and_security_md_name_the_variables_that_the_package_sets() -> None:
    show = "import os; before = set(os.environ); import dflash_trt; print(*set(os.environ) - before)"
    path = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    names = subprocess.run(
        [sys.executable, "-c", show], env=path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert "ORT_DISABLE_TELEMETRY" in names
    for file in ("Dockerfile",):
        (line,) = re.findall("^ENV (ORT_.*)$", (ROOT / file).read_text(), re.M)
        assert set(line.split()) == {f"{name}=1" for name in names}
    assert [name for name in names if f"| `{name}` |" not in (ROOT / "SECURITY.md").read_text()] == []


def test_all_commands_run() -> None:
    from dflash_trt.cli import make_parser

    (commands,) = (a.choices for a in make_parser()._actions if a.dest == "command")
    assert {line.split()[0] for lines in COMMANDS.values() for line in lines} == set(commands)


def test_reports_that_the_user_turns_on_are_seen(tmp_path: Path) -> None:
    """So the watch would see them if they were on by default, and a value in the environment is respected."""
    import onnxruntime.capi

    (folder,) = onnxruntime.capi.__path__
    libraries = Path(folder).glob("onnxruntime_pybind11_state*")
    if not any(b"ORT_DISABLE_TELEMETRY" in library.read_bytes() for library in libraries):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} makes no reports")
    place = Place(tmp_path / "place")
    found = place.strays(place.run("-m", "dflash_trt", "doctor", ORT_DISABLE_TELEMETRY="0"))
    assert any(path.startswith("~/.cache/Microsoft/") and path.endswith(".db") for path in found), found


def test_the_watch_sees_the_names_and_addresses_that_a_child_asks_for(tmp_path: Path) -> None:
    ask = (
        "import socket\n"
        "for ask in (lambda: socket.getaddrinfo('example.com', 443),\n"
        "            lambda: socket.create_connection(('192.0.2.1', 80)),\n"
        "            lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.2', 9))):\n"
        "    try: ask()\n"
        "    except OSError: continue\n"
    )
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}], check=True)"
    sent = Place(tmp_path / "place").run("-c", child).sent
    assert {"192.0.2.1 port 80", "192.0.2.2 port 9"} <= set(sent)
    assert any(each.endswith(" port 53") for each in sent)


def test_the_watch_sees_the_files_that_a_child_writes(tmp_path: Path) -> None:
    place = Place(tmp_path / "place")
    write = "import os; os.makedirs('../home/a/b'); os.chdir('../home/a'); open('b/c', 'w')"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {write!r}], check=True)"
    assert place.strays(place.run("-c", child)) == {"~/a", "~/a/b", "~/a/b/c"}
