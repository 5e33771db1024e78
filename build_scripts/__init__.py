"""Every script imports this package first, before onnxruntime, which would report to its maker otherwise."""

import dflash_trt  # noqa: F401
