"""The docs: links, files, symbols, modules and options that they name exist."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest

from build_scripts import docs_commands, site_pages
from dflash_trt import cli
from dflash_trt.formats import ALGORITHMS, FORMATS
from dflash_trt.serving.openai.app import BODIES
from dflash_trt.serving.openai.errors import REASONS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = (
    "dflash_trt|plugins|build_scripts|tests|server_tests|client_tests|docs|examples|triton_repo|requirements"
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_named_files_exist(page: Path) -> None:
    for name in re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./*-]+)", page.read_text()):
        name = name.rstrip(".-/")
        if not re.search("smNNN|NAME|READER|toy", name):
            assert list(ROOT.glob(name)), name


@each_page
def test_named_modules_and_symbols_exist(page: Path) -> None:
    """`dflash_trt.x.y`, `python -m build_scripts.x` and `FILE.py`: `symbol` in tables of docs/architecture.md."""
    text = page.read_text()
    for name in set(re.findall(r"(?<![\w/.])((?:dflash_trt|dflash_plugins|build_scripts)(?:\.\w+)+)", text)):
        if not name.endswith((".py", ".md", ".toy")):
            resolve(name)
    for file, symbol in re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", text):
        source = (ROOT / file).read_text()
        assert re.search(rf"^\s*(?:class |def |async def )?{symbol}\b", source, re.MULTILINE), (file, symbol)


def resolve(name: str) -> object:
    """A module, by its file alone, or a symbol in one."""
    parts = name.split(".")
    path = ROOT.joinpath(*parts)
    if path.with_suffix(".py").is_file() or path.is_dir():
        return path
    owner, _, symbol = name.rpartition(".")
    source = ROOT.joinpath(*owner.split(".")).with_suffix(".py")
    if source.is_file():
        assert re.search(rf"^(?:class |def |async def )?{symbol}\b", source.read_text(), re.MULTILINE), name
        return source
    return getattr(importlib.import_module(owner), symbol)


@each_page
def test_commands_have_the_options_that_documents_give_them(page: Path) -> None:
    known = {name: docs_commands.options(name) for name in cli.COMMANDS}
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"(?:^ {4}|^\$ |`)dflash-trt ([^`\n|]*)", text, re.MULTILINE):
        words = shlex.split(line.partition(" # ")[0].partition("...")[0], comments=True)
        command = words[0] if words else ""
        if command in known:
            for word in takewhile(lambda word: word != "--", words[1:]):  # others follow for another program
                if word.startswith("--"):
                    assert word.partition("=")[0] in known[command], (command, word)
        else:
            assert command in ("", "COMMAND", "bundle", "--version", "--help"), line


@each_page
def test_options_that_the_text_names_are_taken_by_some_command(page: Path) -> None:
    assert docs_commands.unknown_options(page) == []


def test_an_option_that_no_command_takes_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`--precision` and `build --engin torch` and `pip install --no-deps`\n\n"
        "    dflash-trt build --tagret tiny\n\n```\n`--fenced`\n```\n`--presicion=fp8`\n"
    )
    assert docs_commands.unknown_options(page) == ["--engin", "--presicion"]


def test_every_page_is_in_the_readme_and_in_the_site() -> None:
    readme, site = (ROOT / "README.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert f": {name}\n" in site
        assert page.stem == "api" or f"](docs/{name})" in readme


@pytest.mark.parametrize(
    ("link", "on_the_site"),
    [
        ("[a](docs/cli.md#build)", "[a](cli.md#build)"),
        ("[a](../SECURITY.md)", "[a](SECURITY.md)"),
        ("[a](../examples/client.py)", "[a](examples.md#clientpy)"),
        ("[a](examples/)", "[a](examples.md)"),
        ("![a](docs/speed.svg)", "![a](speed.svg)"),
        ('<img src="docs/page_light.webp" alt="a">', '<img src="page_light.webp" alt="a">'),
        ("[a](graphs.md)", "[a](graphs.md)"),
        ("[a](https://example.org/docs/x.md)", "[a](https://example.org/docs/x.md)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(link: str, on_the_site: str) -> None:
    assert site_pages.site_links(link) == on_the_site


def test_the_page_of_examples_has_each_program() -> None:
    page = site_pages.examples_page()
    for path in site_pages.EXAMPLES.glob("*.py"):
        assert f"## {path.name}\n" in page
        assert path.read_text().rstrip() in page


def test_the_list_of_environment_variables_is_that_of_the_code() -> None:
    code = "\n".join(
        path.read_text()
        for folder in ("dflash_trt", "plugins", "triton_repo")
        for path in (ROOT / folder).rglob("*.py")
    )
    read = set(re.findall(r'environ(?:\.get|\.setdefault)?[(\[]"(\w+)"', code)) | set(
        re.findall(r'"(DFLASH_[A-Z_]+)"', code)
    )
    rows = (
        (ROOT / "docs" / "cli.md").read_text().partition("| environment variable |")[2].partition("\n\n")[0]
    )
    listed = {name for line in rows.splitlines() for name in re.findall(r"`([A-Z_]+)`", line.split("|")[1])}
    of_the_hub = {"HF_HOME", "HF_TOKEN"}
    assert read - {"PATH", "LD_LIBRARY_PATH", "TERM", "COLUMNS"} == listed - of_the_hub


DEFAULT = re.compile(r"`(--[a-z-]+)` ?[a-z]* ?\(([0-9][0-9,.]*)\)")


@each_page
def test_numbers_behind_options_are_their_defaults(page: Path) -> None:
    for option, said in DEFAULT.findall(page.read_text()):
        arguments = [each for each in docs_commands.actions() if option in each.option_strings]
        known = {str(each.default).removesuffix(".0") for each in arguments}
        known |= {word for each in arguments for word in re.findall(r"default: (\d+)", each.help or "")}
        assert said.replace(",", "") in known, option


def test_lists_of_the_pages_are_those_of_the_code() -> None:
    api, quantization = ((ROOT / "docs" / name).read_text() for name in ("openai.md", "quantization.md"))
    endpoints = api.partition("## Fields")[0]
    statuses = {int(n) for row in re.findall(r"^\| ([0-9, ]+) \|", api, re.MULTILINE) for n in row.split(",")}
    assert statuses == REASONS.keys() - {404, 405, 499, 500}  # what every server has
    assert [path for path in BODIES if f"`{path}`" not in endpoints] == []
    for scheme, handled in FORMATS.items():
        row = re.findall(rf"^\| `{scheme}` \|.*$", quantization, re.MULTILINE)[0]
        named = set(re.findall(r"`([A-Z0-9_]+)`", row))
        assert named <= {algorithm.name for algorithm in handled.algorithms}
    assert [name for name in ALGORITHMS if name not in quantization] == []
