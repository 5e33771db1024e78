"""Check a bundle on the machine that will run it, and keep a report of it."""

from __future__ import annotations

import faulthandler
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

from dflash_trt.files.disk import whole_file
from dflash_trt.reports.checks import Checks, Failure, Figures, Skip
from dflash_trt.reports.environment import describe
from dflash_trt.reports.localize import Compared

FORMAT = "dflash-trt selftest"


@dataclass
class Check:
    """One check's result. `state` is passed, failed, skipped or timed out."""

    name: str
    proves: str
    state: str = "running"
    detail: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0


class Selftest(Checks):
    """The checks of a bundle, run in order: `environment`, and then those of `Checks`, which has the arguments."""

    def __init__(self, bundle: Path, reference: Path | None = None) -> None:
        super().__init__(bundle, reference)
        self.checks = [self.environment, *self.all]

    def run(self, report: Path, limit: float) -> Iterator[Check]:
        """Run each check for `limit` seconds at most, and keep `report` up to date.

        A check that takes longer ends the process: a pass on a device cannot be interrupted.
        """
        done: list[Check] = []
        for check in self.checks:
            name, proves = check.__name__.replace("_", " "), (check.__doc__ or "").partition("\n")[0]
            result = Check(name, proves.rstrip("."))
            done.append(result)
            timer = threading.Timer(limit, _give_up, (report, self.header, done, limit))
            timer.daemon = True
            timer.start()
            begin = perf_counter()
            try:
                if not self.loaded and check not in (self.environment, self.integrity):
                    raise Skip("the bundle did not load")
                result.figures = check()
                result.state = "passed"
            except Skip as reason:
                result.state, result.detail = "skipped", str(reason)
            except Failure as error:
                result.state, result.detail = "failed", str(error)
            except Exception as error:
                result.state, result.detail = "failed", f"{type(error).__name__}: {error}"
            timer.cancel()
            result.seconds = round(perf_counter() - begin, 3)
            write_report(report, self.header, done, self.localizer.compared if self.localizer else ())
            yield result

    @cached_property
    def header(self) -> dict[str, Any]:
        """The bundle's manifest without its files, and the machine."""
        fields = {name: value for name, value in self.bundle.manifest.items() if name != "files"}
        return {"bundle": fields, "machine": describe()}

    def environment(self) -> Figures:
        """The versions and the machine that a report is about."""
        machine = self.header["machine"]
        return {"dflash_trt": machine["dflash_trt"], "gpus": machine["gpus"], "cpu": machine["cpu"]}


def write_report(
    report: Path, header: dict[str, Any], checks: Sequence[Check], compared: Sequence[Compared] = ()
) -> None:
    """Write the report, so that a reader never sees a part of it."""
    content = {"format": FORMAT, **header, "checks": [asdict(check) for check in checks]}
    content["layers"] = [asdict(result) for result in compared]
    with whole_file(report) as file:
        file.write(json.dumps(content, indent=1, default=str).encode() + b"\n")


def _give_up(report: Path, header: dict[str, Any], checks: Sequence[Check], limit: float) -> None:
    checks[-1].state, checks[-1].detail = "timed out", f"did not end within {limit:g} s"
    write_report(report, header, checks)
    faulthandler.dump_traceback()
    os._exit(1)
