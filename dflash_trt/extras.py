"""How to install what an extra of this package needs."""

from __future__ import annotations

import re
from importlib import metadata

_NAME = "dflash-trt"


def install(extra: str) -> str:
    """The pip command for an extra's packages. It names the packages themselves, as no index has this one."""
    try:
        needed = _needed(extra)
    except metadata.PackageNotFoundError:  # run from its source
        needed = []
    return (
        f"pip install {' '.join(map(_quoted, needed))}"
        if needed
        else f"pip install '.[{extra}]' in a checkout"
    )


def _quoted(requirement: str) -> str:
    return requirement if re.fullmatch(r"[\w.-]+", requirement) else f"'{requirement}'"


def _needed(extra: str) -> list[str]:
    """Requirements of an extra, and of the extras that it names."""
    found: list[str] = []
    for line in metadata.requires(_NAME) or []:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if not re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", marker):
            continue
        own = re.fullmatch(rf"{_NAME}\[([\w,-]+)\]", requirement)
        if own:
            found += [each for name in own[1].split(",") for each in _needed(name)]
        else:
            found.append(requirement)
    return list(dict.fromkeys(found))
