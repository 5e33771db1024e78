"""The rule under which drafts change no token on an engine whose numbers depend on the shape of a pass."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from dflash_trt.errors import DFlashError


@dataclass(frozen=True)
class PassRule:
    """Which passes give a row the same bits. The default allows every pass, and promises nothing by itself.

    widths: numbers of rows of a sequence in a pass, ascending, that agree with each other. A pass with fewer rows than
        the last of them gets the next of these widths, by repeating its last row. Empty: no pass is padded.
    any_batch: whether a row is the same beside any other sequences, and at any place. If not, one sequence is decoded
        at a time.
    any_cut: whether a row is the same however its prompt was cut into passes, and whether the prompt's rows come from
        an answer. If not, only whole chunks of earlier prompts are reused.
    any_tree: whether the rows of an accepted path are the same wherever they lie in a tree. If not, chains are
        verified.
    """

    widths: tuple[int, ...] = ()
    any_batch: bool = True
    any_cut: bool = True
    any_tree: bool = True

    def padded(self, rows: int) -> int:
        """The rows of a pass for so many rows."""
        at = bisect_left(self.widths, rows)
        return self.widths[at] if at < len(self.widths) else rows

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, values: Any) -> Self:
        """The rule that `as_dict` described. Raises DFlashError for anything else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise DFlashError(f"a rule has the fields {', '.join(sorted(names))}")
        widths, others = values["widths"], [values[name] for name in sorted(names - {"widths"})]
        sound = isinstance(widths, list) and all(type(n) is int and n > 0 for n in widths)
        if not sound or widths != sorted(set(widths)) or any(type(each) is not bool for each in others):
            raise DFlashError("the values of a rule are ascending widths, true and false")
        return cls(**{**values, "widths": tuple(widths)})


FREE = PassRule()
