"""Check that a target and a drafter belong together."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import PENDING_ROWS, DrafterConfig, TargetConfig
from dflash_trt.errors import PairError, show
from dflash_trt.files.reading import read_object
from dflash_trt.text.tokenizer import TOKENIZER_BYTES, Tokenizer


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


def check_tokenizers(target_dir: Path, drafter_dir: Path, mask_token_id: int | None) -> None:
    """Check the token ids that the pair shares.

    The target needs a tokenizer.json whose ids its embedding covers. The mask token must not be an ordinary entry of
    the vocabulary: drafters are trained with a special or unused id. A drafter may lack a tokenizer, as most published
    ones do. If it has one, every token must have the same id in both. `mask_token_id` is None for a drafter
    without masks.

    Raises:
        CheckpointError: a tokenizer.json is missing, malformed or does not work.
        PairError: naming the token and both ids.
    """
    path = target_dir / "tokenizer.json"
    ordinary, added = _vocabulary(path)
    tokens = ordinary | added
    config = target_dir / "config.json"
    fields = Fields(config, read_object(config))
    vocab_size = (fields.section("text_config") or fields).integer("vocab_size")
    token, largest = max(tokens.items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        raise PairError(f"{path}: token {show(token)} has id {largest}, but vocab_size is {vocab_size}")
    Tokenizer(target_dir).check()
    usual = next(
        (token for token, token_id in ordinary.items() if token_id == mask_token_id and token not in added),
        None,
    )
    if usual is not None:
        raise PairError(
            f"{drafter_dir / 'config.json'}: dflash_config.mask_token_id is {mask_token_id}, but in {path} that is "
            f"the ordinary token {show(usual)}; a mask token is a special or an unused one"
        )
    other_path = drafter_dir / "tokenizer.json"
    if not other_path.exists():
        return
    ordinary, added = _vocabulary(other_path)
    others = ordinary | added
    if others != tokens:
        differing = (token for token in tokens | others if tokens.get(token) != others.get(token))
        token = min(differing, key=lambda token: (others.get(token, tokens.get(token, 0)), token))
        raise PairError(
            f"{other_path}: token {show(token)} has id {others.get(token)}, but in {path} it has "
            f"{tokens.get(token)}; the drafter was trained with another tokenizer"
        )


def _vocabulary(path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Token -> id in a tokenizer.json: the model's tokens, and the added tokens."""
    fields = Fields(path, read_object(path, TOKENIZER_BYTES))
    model = fields.section("model")
    if model is None:
        raise fields.error("model", "is missing, expected an object with the vocabulary")
    vocab = model.get("vocab")
    if isinstance(vocab, list):  # Unigram: [token, score] in the order of the ids
        pieces = [entry[0] if isinstance(entry, list) and entry else None for entry in vocab]
        vocab = {piece: index for index, piece in enumerate(pieces) if isinstance(piece, str)}
    if not isinstance(vocab, dict) or not all(
        type(i) is int and i >= 0 and type(t) is str for t, i in vocab.items()
    ):
        raise model.error("vocab", "is not a vocabulary, expected an object of token ids")
    added = fields.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(entry, dict) for entry in added):
        raise fields.error("added_tokens", f"is {show(added)}, expected a list of objects")
    entries = [Fields(path, entry, f"added_tokens[{index}].") for index, entry in enumerate(added)]
    return vocab, {entry.string("content"): entry.integer("id", minimum=0) for entry in entries}
