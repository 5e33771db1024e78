"""How to install what an extra of this package, or a single option, needs."""

from __future__ import annotations

import re
from importlib import metadata

_NAME = "dflash-trt"
# Packages that single options use.
_OPTIONS = {
    "plot": ["matplotlib>=3.8"],
    # It holds a tritonserver, and needs NumPy below 2: an environment of its own.
    "tritonserver": ["nvidia-pytriton>=0.7,<0.8"],
}


def install(*names: str) -> str:
    """The pip command for extras, single options, or one package of an extra ("serve:llguidance").

    It names the packages themselves, as no index has this one.
    """
    try:
        needed = [each for name in names for each in _OPTIONS.get(name) or _needed(*name.split(":"))]
    except metadata.PackageNotFoundError:  # run from its source
        needed = []
    return (
        f"pip install {' '.join(map(_quoted, needed))}"
        if needed
        else f"pip install '.[{','.join(name.partition(':')[0] for name in names)}]' in a checkout"
    )


def _quoted(requirement: str) -> str:
    return requirement if re.fullmatch(r"[\w.-]+", requirement) else f"'{requirement}'"


def _needed(extra: str, package: str = "") -> list[str]:
    """Requirements of an extra: all of them, or that of one package."""
    requirements: list[str] = []
    for line in metadata.requires(_NAME) or []:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", marker) and requirement.startswith(package):
            requirements.append(requirement)
    return requirements
