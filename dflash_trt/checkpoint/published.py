"""Published drafters for targets of the families that are read: those of the known pairs, and others.

The lists follow public descriptions of the repositories. None of the files was loaded. The licence is that of the
repository's page, where a description gives it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoint.catalogue import PAIRS

NOT_STATED = "not stated"


@dataclass(frozen=True, slots=True)
class PublishedDrafter:
    """A repository with a drafter. target: the repository that it drafts for. read: whether its layout is read."""

    repository: str
    kind: str
    target: str
    licence: str = NOT_STATED
    read: bool = True

    @property
    def publisher(self) -> str:
        return self.repository.partition("/")[0]


_QWEN3 = {"4b": "Qwen/Qwen3-4B", "8b": "Qwen/Qwen3-8B", "14b": "Qwen/Qwen3-14B"}


def _deepspec(prefix: str, suffix: str, kind: str, *, read: bool = True) -> tuple[PublishedDrafter, ...]:
    return tuple(
        PublishedDrafter(f"deepseek-ai/{prefix}_qwen3_{size}_{suffix}", kind, target, read=read)
        for size, target in _QWEN3.items()
    )


PUBLISHED = (
    *(
        PublishedDrafter(pair.drafter_repo, "DFlash", pair.target_repo)
        for pair in PAIRS
        if pair.drafter_repo and pair.target_repo and not pair.drafter_repo.endswith("DFlash2")
    ),
    *(
        PublishedDrafter(f"{publisher}/Qwen3.8-27B-DFlash2", "DFlash2", "Qwen/Qwen3.8-27B", "Apache-2.0")
        for publisher in ("z-lab", "incoai")
    ),
    *_deepspec("dspark", "block7", "DSpark"),
    *_deepspec("dflash", "block7", "DeepSpec's DFlash"),
    *_deepspec("eagle3", "ttt7", "EAGLE-3", read=False),
    PublishedDrafter("JetSpec/jetspec-qwen3-8b", "JetSpec", "Qwen/Qwen3-8B"),
    PublishedDrafter("JetSpec/jetspec-qwen3-30b-a3b", "JetSpec", "Qwen/Qwen3-30B-A3B"),
    PublishedDrafter("JetSpec/jetspec-Qwen3.6-35B-A3B", "JetSpec", "Qwen/Qwen3.6-35B-A3B"),
    PublishedDrafter("JetSpec/jetspec-gpt-oss-20b", "JetSpec", "openai/gpt-oss-20b"),
    PublishedDrafter("AngelSlim/Qwen3-4b-dflare", "DFlare", "Qwen/Qwen3-4B"),
    *(
        PublishedDrafter(f"RedHatAI/{target.partition('/')[2]}-speculator.{kind.lower()}", kind, target)
        for target, kind in (
            ("Qwen/Qwen3-8B", "DFlash"),
            ("Qwen/Qwen3-30B-A3B", "DFlash"),
            ("Qwen/Qwen3-30B-A3B-Instruct-2507", "DFlash"),
            ("Qwen/Qwen3.6-35B-A3B", "DSpark"),
        )
    ),
    PublishedDrafter("nvidia/gpt-oss-120b-Eagle3", "EAGLE-3", "openai/gpt-oss-120b"),
    PublishedDrafter("nvidia/gpt-oss-120b-Eagle3-v2", "EAGLE-3", "openai/gpt-oss-120b"),
    PublishedDrafter("amazon/gpt-oss-120b-p-eagle", "P-EAGLE", "openai/gpt-oss-120b", read=False),
    PublishedDrafter("RedHatAI/Qwen3-8B-speculator.peagle", "P-EAGLE", "Qwen/Qwen3-8B", read=False),
)
