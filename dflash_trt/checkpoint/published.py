"""Published drafters: those of the known pairs, and all others that were found, read or not.

The lists follow public descriptions of the repositories, looked up on catalogue.LOOKED_UP. None of the files was
loaded. A target without an organisation is a model whose repository was not looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoint.catalogue import PAIRS, KnownPair

NOT_STATED = "not stated"
_FAMILY, _KIND = "the target's family", "the kind"
_LAYOUT = "its layout"


@dataclass(frozen=True, slots=True)
class PublishedDrafter:
    """A repository with a drafter.

    target: the repository that it drafts for. licence: that of its page, where a description gives it.
    block: tokens of a verification, the anchor included; None if not found. downloads: in 30 days of autumn 2026, where
    somebody gave them. unread: what of it no engine reads; empty if it is read.
    speculators: in the format of the library speculators.
    """

    repository: str
    kind: str
    target: str
    licence: str = NOT_STATED
    block: int | None = None
    downloads: int | None = None
    unread: str = ""
    speculators: bool = False

    @property
    def publisher(self) -> str:
        return self.repository.partition("/")[0]

    @property
    def read(self) -> bool:
        return not self.unread


def find_drafter(name: str) -> PublishedDrafter | None:
    """The drafter with this repository. Case is ignored."""
    return next((each for each in PUBLISHED if each.repository.lower() == name.lower()), None)


def pair_of(drafter: PublishedDrafter) -> KnownPair | None:
    """The pair that has this drafter."""
    return next((pair for pair in PAIRS if pair.drafter_repo == drafter.repository), None)


_SIZES = {"4b": "Qwen/Qwen3-4B", "8b": "Qwen/Qwen3-8B", "14b": "Qwen/Qwen3-14B"}
_GEMMA = {"12b": "google/gemma-4-12B-it", "26b": "google/gemma-4-26B-A4B-it", "31b": "google/gemma-4-31B-it"}
_DOWNLOADS = {
    "z-lab/gemma-4-31B-it-DFlash": 10_600,
    "z-lab/Qwen3.8-27B-DFlash2": 442_000,
    "z-lab/Qwen3.6-35B-A3B-DFlash": 276_000,
    "z-lab/Qwen3.6-27B-DFlash": 168_000,
}


def _known() -> tuple[PublishedDrafter, ...]:
    return tuple(
        PublishedDrafter(
            pair.drafter_repo,
            "DFlash2" if pair.drafter_repo.endswith("DFlash2") else "DFlash",
            pair.target_repo,
            "Apache-2.0" if pair.drafter_repo.endswith("DFlash2") else NOT_STATED,
            pair.block_size,
            _DOWNLOADS.get(pair.drafter_repo),
        )
        for pair in PAIRS
        if pair.drafter_repo and pair.target_repo
    )


def _deepspec(prefix: str, suffix: str, kind: str, *, unread: str = "") -> tuple[PublishedDrafter, ...]:
    block = None if unread else 8
    qwen3 = (
        PublishedDrafter(
            f"deepseek-ai/{prefix}_qwen3_{size}_{suffix}", kind, target, block=block, unread=unread
        )
        for size, target in _SIZES.items()
    )
    gemma = f"deepseek-ai/{prefix}_gemma4_12b_{suffix}"
    return (*qwen3, PublishedDrafter(gemma, kind, _GEMMA["12b"], block=block, unread=unread))


def _speculator(target: str, kind: str, *, unread: str = "") -> PublishedDrafter:
    """A drafter of Red Hat, in the format of the library speculators."""
    name = f"RedHatAI/{target.rpartition('/')[2]}-speculator.{kind.lower().replace('-', '')}"
    return PublishedDrafter(name, kind, target, unread=unread, speculators=True)


PUBLISHED = (
    *_known(),
    PublishedDrafter("incoai/Qwen3.8-27B-DFlash2", "DFlash2", "Qwen/Qwen3.8-27B", "Apache-2.0", 8),
    PublishedDrafter("modal-labs/Qwen3.5-397B-A17B-DFlash", "DFlash", "Qwen/Qwen3.5-397B-A17B", block=16),
    PublishedDrafter("lmsys/Qwen3.5-397B-A17B-DFlash", "DFlash", "Qwen/Qwen3.5-397B-A17B", block=16),
    *_deepspec("dspark", "block7", "DSpark"),
    *_deepspec("dflash", "block7", "DeepSpec's DFlash"),
    *_deepspec("eagle3", "ttt7", "EAGLE-3", unread=_LAYOUT),
    PublishedDrafter("JetSpec/jetspec-qwen3-8b", "JetSpec", "Qwen/Qwen3-8B"),
    PublishedDrafter("JetSpec/jetspec-qwen3-30b-a3b", "JetSpec", "Qwen/Qwen3-30B-A3B"),
    PublishedDrafter("JetSpec/jetspec-Qwen3.6-35B-A3B", "JetSpec", "Qwen/Qwen3.6-35B-A3B"),
    PublishedDrafter("JetSpec/jetspec-gpt-oss-20b", "JetSpec", "openai/gpt-oss-20b"),
    PublishedDrafter("JetSpec/jetspec-gemma4-26B-A4B0-it", "JetSpec", _GEMMA["26b"]),
    PublishedDrafter("JetSpec/jetspec-Step-3.7-Flash", "JetSpec", "Step-3.7-Flash", unread=_FAMILY),
    PublishedDrafter("AngelSlim/Qwen3-4b-dflare", "DFlare", "Qwen/Qwen3-4B", block=16),
    *(
        _speculator(target, kind)
        for target, kind in (
            ("Qwen/Qwen3-8B", "DFlash"),
            ("Qwen/Qwen3-30B-A3B", "DFlash"),
            ("Qwen/Qwen3-30B-A3B-Instruct-2507", "DFlash"),
            ("Qwen/Qwen3.6-35B-A3B", "DSpark"),
            (_GEMMA["31b"], "DFlash"),
        )
    ),
    PublishedDrafter("z-lab/gemma4-12B-it-DFlash", "DFlash", _GEMMA["12b"], block=16),
    PublishedDrafter("makora-ai/gemma4-26b-a4b-dspark", "DSpark", _GEMMA["26b"], unread=_LAYOUT),
    PublishedDrafter("nvidia/gpt-oss-120b-Eagle3", "EAGLE-3", "openai/gpt-oss-120b"),
    PublishedDrafter("nvidia/gpt-oss-120b-Eagle3-v2", "EAGLE-3", "openai/gpt-oss-120b"),
    PublishedDrafter("amazon/gpt-oss-120b-p-eagle", "P-EAGLE", "openai/gpt-oss-120b", unread=_KIND),
    _speculator("Qwen/Qwen3-8B", "P-EAGLE", unread=_KIND),
    PublishedDrafter("Huang2020/Qwen3-8B-Domino-b16", "Domino", "Qwen/Qwen3-8B", block=16, unread=_KIND),
    PublishedDrafter("huang2020/Qwen3.6-27B-Domino", "Domino", "Qwen/Qwen3.6-27B", unread=_KIND),
    *(
        PublishedDrafter(repository, kind, target, block=block, unread=_FAMILY)
        for repository, kind, target, block in (
            ("rasyosef/gemma-4-E2B-it-dflash2", "DFlash2", "google/gemma-4-E2B-it", None),
            ("rasyosef/gemma-4-E2B-it-dspark", "DSpark", "google/gemma-4-E2B-it", None),
            ("z-lab/Muse-Glimmer-30B-DFlash2", "DFlash2", "Muse-Glimmer-30B", 16),
            ("incoai/Muse-Glimmer-30B-DFlash2", "DFlash2", "Muse-Glimmer-30B", 16),
            ("meta-models/Muse-Glimmer-30B-assistant", "DFlash", "Muse-Glimmer-30B", None),
            ("z-lab/Kimi-K2.5-DFlash", "DFlash", "Kimi-K2.5", 8),
            ("z-lab/Kimi-K2.6-DFlash", "DFlash", "Kimi-K2.6", 8),
            ("nvidia/Kimi-K2.6-DFlash", "DFlash", "Kimi-K2.6", 8),
            ("modal-labs/Kimi-K3-DFlash", "DFlash", "Kimi-K3", None),
            ("lightseekorg/kimi-k3-dflash2", "DFlash2", "Kimi-K3", None),
            ("lightseekorg/kimi-k3-dspark", "DSpark", "Kimi-K3", None),
            ("Inferact/Kimi-K3-DSpark", "DSpark", "Kimi-K3", None),
            ("RadixArk/Kimi-K3-DSpark", "DSpark", "Kimi-K3", None),
            ("RadixArk/Inkling-DSpark-Preview", "DSpark", "Inkling", None),
            ("z-lab/MiniMax-M2.5-DFlash", "DFlash", "MiniMax-M2.5", None),
            ("z-lab/MiniMax-M2.7-DFlash", "DFlash", "MiniMax-M2.7", None),
            ("z-lab/GLM-5.1-FP8-DFlash", "DFlash", "GLM-5.1-FP8", 8),
            (
                "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DFlash",
                "DFlash",
                "Nemotron-3.5-Lightning",
                8,
            ),
            (
                "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16-DFlash",
                "DFlash",
                "Nemotron-3.5-Lightning",
                8,
            ),
            (
                "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DSpark",
                "DSpark",
                "Nemotron-3.5-Lightning",
                8,
            ),
            (
                "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16-DSpark",
                "DSpark",
                "Nemotron-3.5-Lightning",
                8,
            ),
            ("XiaomiMiMo/MiMo-V2.5-DFlash", "DFlash", "MiMo-V2.5", None),
            ("XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash", "DFlash", "MiMo-V2.5-Pro-FP4", 8),
            ("poolside/Laguna-S-2.1-DFlash", "DFlash", "Laguna-S-2.1", None),
            ("deepseek-ai/DeepSeek-V4-Flash-DSpark", "DSpark", "DeepSeek-V4-Flash", None),
            ("deepseek-ai/DeepSeek-V4-Pro-DSpark", "DSpark", "DeepSeek-V4-Pro", None),
        )
    ),
    PublishedDrafter(
        "poolside/Laguna-XS.2-speculator.dflash", "DFlash", "Laguna-XS.2", unread=_FAMILY, speculators=True
    ),
    PublishedDrafter(
        "incoai/GLM-5.3-Flash-DFlash2", "DFlash2", "GLM-5.3-Flash", "CC BY-NC-ND", 8, unread=_FAMILY
    ),
    *(
        _speculator(target, kind, unread=_FAMILY)
        for target, kind in (
            ("NVIDIA-Nemotron-3-Super-120B-A12B", "DFlash"),
            ("NVIDIA-Nemotron-3-Ultra-550B-A55B", "DFlash"),
            ("Mistral-Small-4-119B-2603", "DFlash"),
            ("Mistral-Small-4-119B-2603", "DSpark"),
            ("DeepSeek-V4-Flash", "DFlash"),
            ("Kimi-K3", "DSpark"),
            ("GLM-5.2", "DSpark"),
        )
    ),
)
