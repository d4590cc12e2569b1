"""Display: what a viewer sees. Live and in colour on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Self, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

Row = tuple[str, str, str]
_BAR_COLUMNS = 40  # leaves room for its numbers and a label in 80 columns


def row(name: str, texts: Sequence[str], cut_short: Sequence[object]) -> Row:
    """Return a line of the table, of two sides; one that was cut short has no figures."""
    left, right = ("cut short" if is_cut else text for text, is_cut in zip(texts, cut_short, strict=True))
    return name, left, right


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command: rich would exit with 1, which is a verdict."""
        raise  # noqa: PLE0704  (called where the error is handled)


class Display:
    """Lines, each with the time since the beginning, above a bar. Honours NO_COLOR."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._began_at = time.monotonic()
        self._console = _Console(file=out or sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
        bar = (TextColumn("       "), BarColumn(_BAR_COLUMNS), MofNCompleteColumn(), TextColumn("applied"))
        # Without a terminal a bar would be lines of its own.
        is_live = self._console.is_terminal
        self._progress = Progress(*bar, console=self._console, transient=True, disable=not is_live)
        self._task = self._progress.add_task("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.no_progress()

    def title(self, text: str) -> None:
        self._console.print(f"\n{text}", style="bold")

    def log(self, text: str, *, style: str = "") -> None:
        """Print what happens, in one line; ``style`` is a colour, where there are colours."""
        seconds = f"{time.monotonic() - self._began_at:5.1f}s"
        self._console.print(Text.assemble((seconds, "dim"), "  ", (text, style)))

    def line(self, text: str) -> None:
        self._console.print(text)

    def progress(self, done: int, total: int) -> None:
        self._progress.start()  # again and again: a title or a table takes the bar away
        self._progress.update(self._task, completed=done, total=total)

    def no_progress(self) -> None:
        self._progress.stop()

    def table(self, head: Row, rows: Sequence[Row], *, good: bool) -> None:
        table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
        table.add_column(head[0])
        table.add_column(head[1], justify="right", style="green" if good else "bold red")
        table.add_column(head[2], justify="right", style="yellow")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)
