"""Count the files and functions of the package that one chat runs through, from the messages to the text.

    python -m build_scripts.chat_path [BUNDLE] [--list]

The bundle is open before. What runs in other processes, as chat templates do, and comprehensions are not counted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import dflash_trt
from dflash_trt import LLM

PACKAGE = str(Path(dflash_trt.__file__).parent)
MESSAGES = [{"role": "user", "content": "We have 2 days for Kelmar and Corvel. What should we do?"}]


def functions_of_a_chat(bundle: str) -> set[tuple[str, str]]:
    """File and qualified name of each function that a chat calls."""
    seen = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            seen.add((code.co_filename[len(PACKAGE) + 1 :], code.co_qualname))

    with LLM(bundle) as llm:
        sys.setprofile(profile)
        llm.chat(MESSAGES)
        sys.setprofile(None)
    return seen


def main() -> None:
    """Print the counts, and with --list every function."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", nargs="?", default="tiny")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    found = functions_of_a_chat(arguments.bundle)
    if arguments.list:
        print("\n".join(f"{file}: {name}" for file, name in sorted(found)))
    print(f"{len({file for file, _ in found})} files, {len(found)} functions")


if __name__ == "__main__":
    main()
