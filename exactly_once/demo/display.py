"""Display: what a viewer sees. Live on a terminal that has rich, plain lines everywhere else."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

Row = tuple[str, str, str]


class Display:
    """Plain lines, each with the time since the beginning."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._began_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def title(self, text: str) -> None:
        """Begin a part."""
        self.line(f"\n{text}")

    def say(self, text: str, *, style: str = "") -> None:
        """Say what happens, in one line; ``style`` is a colour, where there are colours."""
        self.line(f"{self._seconds()}  {text}")

    def progress(self, done: int, total: int) -> None:
        """Show how far it is; plain lines do not."""

    def no_progress(self) -> None:
        """Take the progress away."""

    def table(self, head: Row, rows: Sequence[Row], *, good: bool) -> None:
        """Show the result side by side."""
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(3)]
        for row in (head, ("-" * widths[0], "-" * widths[1], "-" * widths[2]), *rows):
            self.line(f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}")

    def line(self, text: str) -> None:
        """Write a line as it is."""
        self._out.write(f"{text}\n")
        self._out.flush()

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._began_at:5.1f}s"


class RichDisplay(Display):
    """The same lines in colour above a live bar, and a table with borders. rich honours NO_COLOR."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        from rich.console import Console  # noqa: PLC0415  (an extra brings it)
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415

        self._console = Console(file=out, highlight=False)
        bar = (TextColumn("       "), BarColumn(40), MofNCompleteColumn(), TextColumn("applied"))
        self._progress = Progress(*bar, console=self._console, transient=True)
        self._task = self._progress.add_task("")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def title(self, text: str) -> None:
        """Begin a part."""
        self._console.print(f"\n{text}", style="bold", markup=False)

    def say(self, text: str, *, style: str = "") -> None:
        """Say what happens, in one line; ``style`` is a colour."""
        from rich.text import Text  # noqa: PLC0415

        self._console.print(Text.assemble((self._seconds(), "dim"), "  ", (text, style)))

    def progress(self, done: int, total: int) -> None:
        """Show how far it is."""
        self._progress.start()
        self._progress.update(self._task, completed=done, total=total)

    def no_progress(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def table(self, head: Row, rows: Sequence[Row], *, good: bool) -> None:
        """Show the result side by side."""
        from rich.table import Table  # noqa: PLC0415

        table = Table(show_edge=False, pad_edge=True)
        table.add_column(head[0])
        table.add_column(head[1], justify="right", style="green" if good else "bold red")
        table.add_column(head[2], justify="right", style="yellow")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def line(self, text: str) -> None:
        """Write a line as it is."""
        self._console.print(text, markup=False, soft_wrap=True)


def open_display(out: TextIO | None = None) -> Display:
    """Return what the output can show."""
    out = out or sys.stdout
    if out.isatty() and importlib.util.find_spec("rich") is not None:
        return RichDisplay(out)
    return Display(out)
