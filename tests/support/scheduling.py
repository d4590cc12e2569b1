"""Which process runs which file of tests: those with Spark go to as many processes as there are cores.

A test with Spark works where others wait, and Spark and its tests give up after a while: side by side in all processes
they would fail for want of a processor. It also spares the other processes a session each.
"""

from __future__ import annotations

import os
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Return a scheduler of files that knows which of them work with Spark."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # noqa: PLC0415  (it is there)

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _assign_work_unit(self, node: Any) -> None:
            with_spark = {each for each in self.nodes if any(map(_has_spark, self.assigned_work[each]))}
            files = sorted(self.workqueue, key=_has_spark, reverse=True)
            if node not in with_spark and len(with_spark) >= (os.cpu_count() or 1):
                files = [file for file in files if not _has_spark(file)]
            if not files:  # what is left are the others' files
                node.shutdown()
                return
            self.workqueue.move_to_end(files[0], last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def _has_spark(file: str) -> bool:
    return file.startswith("tests/spark/")
