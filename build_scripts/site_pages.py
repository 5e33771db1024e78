"""A hook of mkdocs: adds pages from outside docs/, and rewrites links that the repository has."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ABOVE = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
EXAMPLES = ROOT / "examples"


def on_files(files: Any, config: Any) -> Any:
    """Add README.md as the first page, the pages beside it, and a page with the examples."""
    from mkdocs.structure.files import File

    pages = {"index.md": _read("README.md"), "examples.md": examples_page()} | {n: _read(n) for n in ABOVE}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    # Links of a page in a folder of docs/ are right already.
    return markdown if "/" in page.file.src_uri else site_links(markdown)


def site_links(markdown: str) -> str:
    """Turn links between docs/, the repository's root and examples/ into links of the site, which has all pages in
    one place.
    """
    markdown = re.sub(
        r"\]\((?:\.\./)?examples/(?:(\w+)\.py)?\)", lambda m: f"](examples.md{_anchor(m[1])})", markdown
    )
    return re.sub(
        r"(\]\(|src(?:set)?=\")(?:\.\./|docs/)(?!examples)([\w./-]+\.(?:md|svg|webp)(?:#[\w-]+)?(?=[)\"]))",
        r"\1\2",
        markdown,
    )


def _anchor(example: str | None) -> str:
    return f"#{example}py" if example else ""


def examples_page() -> str:
    """A section for each program in examples/: its name, the first sentence of its docstring, and the program."""
    out = [
        "# Examples",
        "",
        "After reading this page you can start your own program from a working one.",
    ]
    for path in sorted(EXAMPLES.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        summary = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        out += ["", f"## {path.name}", "", summary, "", "```python", text.rstrip(), "```"]
    return "\n".join(out) + "\n"


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
