"""A target and its drafter as checkpoints: location, configuration and tensors of each; and whether they belong
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dflash_trt.bundle.manifest import digest
from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import PENDING_ROWS, DrafterConfig, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, Outline, parameters_of, role_of
from dflash_trt.errors import BuildError, PairError, show
from dflash_trt.files.disk import own_file
from dflash_trt.text.tokenizer import Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class Source:
    """The directory of a checkpoint, and its hub repository and commit if it is a snapshot of one."""

    directory: Path
    repo: str | None = None
    revision: str | None = None


Config = TypeVar("Config", bound=TargetConfig | DrafterConfig)


@dataclass(frozen=True)
class Side(Generic[Config]):
    """One checkpoint of the pair. `folder` is the place of its weights inside the bundle."""

    source: Source
    config: Config
    checkpoint: Checkpoint | Outline
    folder: str

    def describe(self) -> dict[str, Any]:
        weights: dict[str, dict[str, int]] = {}
        for tensor in self.checkpoint.tensors.values():
            by_dtype = weights.setdefault(role_of(tensor.name), {})
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.nbytes
        return {
            "name": self.source.repo or self.source.directory.resolve().name,
            "revision": self.source.revision,
            "config_sha256": digest(self.config.path),
            "architecture": self.config.architecture,
            "num_hidden_layers": self.config.num_hidden_layers,
            "parameters": sum(
                parameters_of(t, self.checkpoint.quantization) for t in self.checkpoint.tensors.values()
            ),
            "weights": self.folder,
            "weight_bytes": {role: dict(sorted(weights[role].items())) for role in sorted(weights)},
        }


@dataclass(frozen=True)
class CheckpointPair:
    """A target, its drafter if it has one, and the drafter's own LM head, if it has one.

    `draft_tokens`: the token ids of that head's rows; None for all.
    """

    target: Side[TargetConfig]
    drafter: Side[DrafterConfig] | None
    head: Checkpoint | Outline | None = None
    draft_tokens: Sequence[int] | None = None

    @property
    def sides(self) -> dict[str, Side[TargetConfig] | Side[DrafterConfig]]:
        """The checkpoints by role: "target" and, if there is one, "drafter"."""
        return {"target": self.target} | ({"drafter": self.drafter} if self.drafter else {})

    @property
    def draft_config(self) -> DrafterConfig | None:
        return self.drafter.config if self.drafter else None


def tokenizer_files(target: Side[TargetConfig], names: Sequence[str] = TOKENIZER_FILES) -> dict[str, Path]:
    """The files of `names` that the target has, and their paths.

    Raises BuildError if the target has weights but no tokenizer.json.
    """
    directory = target.source.directory
    files = {name: own_file(directory, directory / name) for name in names if (directory / name).is_file()}
    if "tokenizer.json" not in files and isinstance(target.checkpoint, Checkpoint):
        raise BuildError(
            f"{directory}: no tokenizer.json; save the tokenizer in the fast (tokenizers) format there"
        )
    return files


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Check that the drafter fits the shape of the target.

    Raises:
        PairError: naming the drafter's field and both values that disagree.
    """
    layers = target.num_hidden_layers
    for field, mine, theirs in (
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
        ("num_target_layers", drafter.num_target_layers, layers),
    ):
        if mine is not None and mine != theirs:
            name = "num_hidden_layers" if field == "num_target_layers" else field
            raise PairError(
                f"{drafter.path}: {field} is {mine}, but {target.path} has {name} {theirs}; "
                "give the drafter that was trained for this target"
            )
    if target.embedding_scale != 1 and not drafter.masks:
        raise PairError(
            f"{drafter.path}: reads embedded tokens as they are stored, but {target.path} has a model that scales "
            "them: EAGLE-3 heads are not supported for it"
        )
    for index, tap in enumerate(drafter.target_layer_ids):
        if not -1 <= tap < layers:
            raise PairError(
                f"{drafter.path}: tap {index} is the state behind layer {tap}, "
                f"but the target has {layers} layers (0..{layers - 1})"
            )
    if target.delta_layers and drafter.block_size > PENDING_ROWS:
        raise PairError(
            f"{drafter.path}: block_size is {drafter.block_size}, but {target.path} has layers with a state, of which "
            f"at most {PENDING_ROWS} rows can be taken back"
        )
    if drafter.mask_token_id >= target.vocab_size:
        raise PairError(
            f"{drafter.path}: dflash_config.mask_token_id is {drafter.mask_token_id}, but the target embeds "
            f"{target.vocab_size} tokens (0..{target.vocab_size - 1})"
        )


def check_tokenizers(target_dir: Path, drafter_dir: Path | None, mask_token_id: int | None) -> None:
    """Check the token ids that the pair shares, or those of a target without a drafter.

    The target needs a tokenizer.json whose ids its embedding covers. The mask token must not be an ordinary entry of
    the vocabulary: drafters are trained with a special or unused id. A drafter may lack a tokenizer, as most published
    ones do. If it has one, every token must have the same id in both. `mask_token_id` is None for a drafter
    without masks.

    Raises:
        CheckpointError: the target's tokenizer.json is missing, or one is malformed or does not work.
        PairError: naming the token and both ids.
    """
    path, tokenizer = target_dir / "tokenizer.json", Tokenizer(target_dir)
    tokens = tokenizer.backend.get_vocab(with_added_tokens=True)
    fields = Fields.read(target_dir / "config.json")
    vocab_size = (fields.section("text_config") or fields).integer("vocab_size")
    token, largest = max(tokens.items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        raise PairError(f"{path}: token {show(token)} has id {largest}, but vocab_size is {vocab_size}")
    tokenizer.check()
    if drafter_dir is None:
        return
    added = tokenizer.backend.get_added_tokens_decoder()
    usual = next((token for token, id_ in tokens.items() if id_ == mask_token_id and id_ not in added), None)
    if usual is not None:
        raise PairError(
            f"{drafter_dir / 'config.json'}: dflash_config.mask_token_id is {mask_token_id}, but in {path} that is "
            f"the ordinary token {show(usual)}; a mask token is a special or an unused one"
        )
    other_path = drafter_dir / "tokenizer.json"
    if not other_path.exists():
        return
    others = Tokenizer(drafter_dir).backend.get_vocab(with_added_tokens=True)
    if others != tokens:
        differing = (token for token in tokens | others if tokens.get(token) != others.get(token))
        token = min(differing, key=lambda token: (others.get(token, tokens.get(token, 0)), token))
        raise PairError(
            f"{other_path}: token {show(token)} has id {others.get(token)}, but in {path} it has "
            f"{tokens.get(token)}; the drafter was trained with another tokenizer"
        )
