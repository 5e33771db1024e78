"""The pairs with a name, and the published drafters, read or not: the lists in pairs.json.

They follow public descriptions of the repositories, looked up on LOOKED_UP. None of the files was loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.errors import CheckpointError, did_you_mean

SHIPPED = Path(__file__).resolve().parent.parent / "shipped"
_KNOWN_CONFIGS = Path(__file__).resolve().parent / "known"
_LISTS = json.loads(Path(__file__).with_name("pairs.json").read_text(encoding="utf-8"))
LOOKED_UP: str = _LISTS["looked_up"]


@dataclass(frozen=True, slots=True)
class TargetForm:
    """Another published form of a target, with the same drafter.

    name: for `build --target`; empty for a form that nothing here reads. format: how its weights are stored.
    downloads: in the 30 days before LOOKED_UP, where somebody gave them. unread: why nothing here reads it; empty if
    it is read. groups: whether its layers are quantized in several groups, each with a format of its own.
    source, unverified: those of its built-in configuration, where there is one, beyond the pair's.
    """

    name: str
    repository: str
    format: str
    downloads: int | None = None
    unread: str = ""
    groups: bool = False
    source: str = ""
    unverified: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class KnownPair:
    """A target and a drafter for it. A model without a repository comes with the package.

    `thinking`: the mode of the target whose answers the drafter was trained on, and `warning` what another mode
    costs; both may be empty. `family` is the target's model_type.
    `source`: where public code or pages quote the drafter's config.json, with the fields they quote if not all. The
    built-in configurations were compared with them on LOOKED_UP. `unverified`: fields that no source quotes, as
    "drafter.FIELD" or "target.FIELD": they follow from sizes of files, the paper, or drafters of the same series.
    """

    name: str
    target_repo: str | None
    drafter_repo: str | None
    family: str
    block_size: int
    note: str
    thinking: str = ""
    warning: str = ""
    source: str = ""
    unverified: Sequence[str] = ()
    forms: tuple[TargetForm, ...] = ()

    @property
    def names(self) -> list[str]:
        """Its own name, and those of it with other forms of the target."""
        return [self.name, *(form.name for form in self.forms if form.name)]

    @property
    def doubt(self) -> str | None:
        """What to tell who relies on the built-in configuration; None if all of it is quoted."""
        if not self.unverified:
            return None
        return (
            f"the built-in configuration of {self.name} has values that were not checked against the published files: "
            f"{', '.join(self.unverified)}"
        )


@dataclass(frozen=True, slots=True)
class PublishedDrafter:
    """A repository with a drafter.

    target: the repository that it drafts for, or a model whose repository was not looked up. licence: that of its page,
    where a description gives it. block: tokens of a verification, the anchor included; None where it is not stated.
    downloads: in 30 days of autumn 2026, where somebody gave them. unread: what of it no engine reads; empty if it is
    read. only: the engine that alone runs its target. speculators: in the format of the library speculators.
    """

    repository: str
    kind: str
    target: str
    licence: str = "not stated"
    block: int | None = None
    downloads: int | None = None
    unread: str = ""
    only: str = ""
    speculators: bool = False


PAIRS = tuple(
    KnownPair(**values | {"forms": tuple(TargetForm(**form) for form in values.get("forms", ()))})
    for values in _LISTS["pairs"]
)
PUBLISHED = tuple(PublishedDrafter(**values) for values in _LISTS["drafters"])
NAMES = tuple(name for pair in PAIRS for name in pair.names)


def known_configs(name: str) -> tuple[Path, Path]:
    """Directories of a known pair's target and drafter with config.json, but without weights.

    Raises:
        CheckpointError: no pair has that name.
    """
    pair = known_pair(name)
    if pair is None:
        raise CheckpointError(
            f"{name}: no pair has this name{did_you_mean(name, NAMES)}; known pairs: {', '.join(NAMES)}"
        )
    base = next(
        (known for known in PAIRS if pair.drafter_repo and known.drafter_repo == pair.drafter_repo), pair
    )
    target = (SHIPPED if pair.target_repo is None else _KNOWN_CONFIGS) / pair.name / "target"
    if not target.is_dir():
        raise CheckpointError(
            f"{name}: the configuration of {pair.target_repo} does not come with the package; give {base.name}, or the "
            "checkpoint's directory"
        )
    return target, (SHIPPED if pair.drafter_repo is None else _KNOWN_CONFIGS) / base.name / "drafter"


def known_pair(name: str) -> KnownPair | None:
    """The pair with this name, or with a repository of this name. Case and a suffix @revision are ignored.

    For another form of a target, it is a pair of that form.
    """
    name = name.partition("@")[0].lower()
    for pair in PAIRS:
        if name in {known.lower() for known in (pair.name, pair.target_repo, pair.drafter_repo) if known}:
            return pair
        for form in pair.forms:
            if form.name and name in (form.name, form.repository.lower()):
                return replace(
                    pair,
                    name=form.name,
                    target_repo=form.repository,
                    forms=(form,),
                    source="; ".join(filter(None, (pair.source, form.source))),
                    unverified=(*pair.unverified, *form.unverified),
                )
    return None


def find_drafter(name: str) -> PublishedDrafter | None:
    """The drafter with this repository. Case is ignored."""
    return next((drafter for drafter in PUBLISHED if drafter.repository.lower() == name.lower()), None)


def pair_of(drafter: PublishedDrafter) -> KnownPair | None:
    return next((pair for pair in PAIRS if pair.drafter_repo == drafter.repository), None)
