"""`--precision target=...,drafter=...,head=...`: the compute dtypes of a build and the formats of its weights."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dflash_trt.errors import UsageError, did_you_mean
from dflash_trt.formats import SCHEMES

# The dtypes of activations, caches and unquantized weights.
COMPUTE_DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Precision:
    """A compute dtype or a quantization scheme for the target, the drafter, and the drafter's copy of the LM head.

    None: the checkpoint's storage, in the engine's compute dtype. The drafter's head may be quantized more strongly
    than the target's, because drafts need not be exact. The target's head stays as it is.
    """

    target: str | None = None
    drafter: str | None = None
    head: str | None = None

    def scheme(self, role: str) -> str | None:
        """The quantization scheme for the weights of "target", "drafter" or "head", if one was requested."""
        value: str | None = getattr(self, role)
        return value if value in SCHEMES else None

    def compute(self, role: str, default: str) -> str:
        """The compute dtype of "target" or "drafter": one of COMPUTE_DTYPES."""
        value: str | None = getattr(self, role)
        return value if value in COMPUTE_DTYPES else default


def parse_precision(text: str | None) -> Precision:
    """Parse `role=value[,role=value]`; None is the default precision.

    Raises BuildError, naming the part that cannot be read and its allowed values.
    """
    asked: dict[str, str] = {}
    roles = [field.name for field in fields(Precision)]
    for part in [] if text is None else text.split(","):
        role, equals, value = part.strip().lower().partition("=")
        if role not in roles or not equals:
            meant = f"; for the target, write target={role}" if role in COMPUTE_DTYPES + SCHEMES else ""
            raise UsageError(
                f"--precision has {part!r}, expected ROLE=VALUE with a role of: {', '.join(roles)}{meant}"
            )
        allowed = SCHEMES if role == "head" else COMPUTE_DTYPES + SCHEMES
        if value not in allowed:
            near = did_you_mean(value, allowed)
            raise UsageError(f"--precision has {role}={value}{near}, expected one of: {', '.join(allowed)}")
        if role in asked:
            raise UsageError(f"--precision names {role} twice: {asked[role]} and {value}")
        asked[role] = value
    return Precision(**asked)
