"""Output: what libraries write to the file descriptors stays with the test that it belongs to.

librdkafka's threads write to the standard error at any moment, so also between two tests, when pytest captures
nothing. Where several worker processes share a terminal, these lines would stand between the dots of the others.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from typing import IO, Any

import pytest


def _divert_standard_error() -> IO[bytes] | None:
    """Send this process' standard error to a file, if it is a worker's; the report of a failed test shows it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    file = tempfile.TemporaryFile(prefix="tests-stderr-")  # noqa: SIM115  (open as long as the process lives)
    os.dup2(file.fileno(), 2)
    return file


# On import, which `-p` puts before pytest's capturing: that keeps the descriptor which it finds.
_diverted = _divert_standard_error()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what was written outside of the test, and make every text fit for sending to the terminal's process."""
    report = yield
    written = _take()
    if written and report.failed:
        report.sections.append(("Written around the test", written))
    # A lone surrogate, which tests print on purpose, cannot be sent as UTF-8.
    report.sections = [(title, _sendable(text)) for title, text in report.sections]
    if isinstance(report.longrepr, str):
        report.longrepr = _sendable(report.longrepr)
    return report


def _take() -> str:
    """Return what was written since the last call."""
    if _diverted is None:
        return ""
    end = os.lseek(2, 0, os.SEEK_END)
    written = os.pread(_diverted.fileno(), end, 0)
    os.ftruncate(_diverted.fileno(), 0)
    os.lseek(_diverted.fileno(), 0, os.SEEK_SET)
    return written.decode("utf-8", "replace")


def _sendable(text: Any) -> str:
    return str(text).encode("utf-8", "backslashreplace").decode("utf-8")
