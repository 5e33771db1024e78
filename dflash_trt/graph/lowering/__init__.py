"""How each number format becomes nodes of a graph. formats/ has the numbers themselves."""

from dflash_trt.graph.lowering.base import TRT_DOMAIN

__all__ = ["TRT_DOMAIN"]
