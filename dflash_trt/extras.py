"""How to install what an extra of this package, or a single option, needs."""

from __future__ import annotations

import re
import shlex

_NAME = "dflash-trt"
_DISTRIBUTIONS = {"yaml": "pyyaml"}  # of modules with another name
# Packages that single options use.
_OPTIONS = {
    "plot": ["matplotlib>=3.8"],
    # It holds a tritonserver, and needs NumPy below 2: an environment of its own.
    "tritonserver": ["nvidia-pytriton>=0.7,<0.8"],
}


def install(*names: str) -> str:
    """The pip command for extras, single options, or one package of an extra ("serve:llguidance").

    ":numpy" is a package of the core, or of any extra. It names the packages themselves, as no index has this one.
    """
    from importlib import metadata  # slow to import, and of error messages alone

    try:
        needed = [
            requirement for name in names for requirement in _OPTIONS.get(name) or _needed(*name.split(":"))
        ]
    except metadata.PackageNotFoundError:  # run from its source
        needed = []
    if not needed and all(name.startswith(":") for name in names):
        needed = [_DISTRIBUTIONS.get(name[1:], name[1:]) for name in names]
    return (
        f"pip install {shlex.join(needed)}"
        if needed
        else f"pip install '.[{','.join(name.partition(':')[0] for name in names)}]' in a checkout"
    )


def _needed(extra: str, package: str = "") -> list[str]:
    """Requirements of an extra: all of them, or that of one package."""
    from importlib import metadata

    requirements: list[str] = []
    optional: list[str] = []  # of any extra
    package = _DISTRIBUTIONS.get(package, package)
    for line in metadata.requires(_NAME) or []:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if not extra:
            named = re.split(r"[^\w.-]", requirement)[0].replace("-", "_") == package.replace("-", "_")
            wanted = named and "extra" not in marker
            optional += [requirement] * (named and not wanted)
        else:
            of_extra = re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", marker)
            wanted = of_extra is not None and requirement.startswith(package)
        if wanted:
            requirements.append(requirement)
    return requirements or optional[:1]
