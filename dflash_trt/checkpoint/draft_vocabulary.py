"""The tokens that a drafter may draft: `draft_vocabulary.json`, beside its configuration.

A drafter that takes its target's head reads all of it in every pass. With fewer tokens it reads fewer rows. Every token
stays right, because the target decides; a token that is not in the list is never drafted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from dflash_trt.errors import CheckpointError
from dflash_trt.files.reading import read_object

FILE = "draft_vocabulary.json"
# A kind takes up to 256 candidates of each place.
LEAST = 256


def read_draft_vocabulary(file: Path, vocab_size: int) -> list[int]:
    """The token ids of `file`, {"tokens": [ids]}, in ascending order.

    Raises CheckpointError unless these are at least 256 different ids below `vocab_size`.
    """
    tokens = read_object(file).get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise CheckpointError(f"{file}: tokens is missing or is not a list of token ids")
    if len(tokens) < LEAST:
        raise CheckpointError(f"{file}: tokens has {len(tokens)} ids, expected at least {LEAST}")
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise CheckpointError(
            f"{file}: tokens has {outside}, but the target's vocab_size is {vocab_size}: the file belongs to another "
            "target"
        )
    if len(set(tokens)) < len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise CheckpointError(f"{file}: tokens has {twice} twice")
    return sorted(tokens)


def most_frequent(
    answers: Iterable[list[int]], size: int, vocab_size: int, always: Iterable[int]
) -> list[int]:
    """`size` token ids in ascending order: `always`, then those that are most frequent in `answers`, then the lowest.

    Tokenizers give low ids to frequent pairs. So the lowest ids are a fair guess beyond the answers.
    """
    counts = Counter(token for answer in answers for token in answer)
    ordered = [*always, *(token for token, _ in counts.most_common()), *range(vocab_size)]
    return sorted(list(dict.fromkeys(ordered))[:size])
