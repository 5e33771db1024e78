"""Settings that must precede any import of triton: kernels run in its interpreter, on a CPU."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
