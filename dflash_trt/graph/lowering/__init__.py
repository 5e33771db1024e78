"""How each number format becomes nodes of a graph. formats/ has the numbers themselves."""

from .base import Activations, LinearKind, Lowering
from .formats import LOWERINGS

__all__ = ["LOWERINGS", "Activations", "LinearKind", "Lowering"]
