"""Interrupts: an exception at a chosen line of the library, as a signal handler may raise it at any line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import exactly_once

# A mark's filter: between the body of a `with` and its end, an interrupt leaves a socket to the garbage collector.
SOCKET = "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
LIBRARY = str(Path(exactly_once.__file__).parent)


class Interrupt(BaseException):
    """What the signal handler raises; like KeyboardInterrupt it is no Exception."""


class Interrupter:
    """Raises at the n-th line that the library executes in this thread."""

    def __init__(self) -> None:
        self.left = 0
        self.files: tuple[str, ...] = ()
        self.where: list[str] = []

    @contextmanager
    def after(self, lines: int, *files: str) -> Iterator[None]:
        """Interrupt the block after so many lines of the library, or of these files of it, once."""
        self.left, self.files = lines, files
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        return self._line if name.startswith(LIBRARY) and name.endswith(self.files or "") else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and self.left > 0:
            self.left -= 1
            if self.left == 0:
                name = Path(frame.f_code.co_filename).name
                self.where.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
                raise Interrupt(self.where[-1])
        return self._line
