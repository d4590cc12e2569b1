"""Output: what was found or planned, as a table for people or as one JSON document for programs."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from exactly_once import _log

ago = _log.ago
_GAP = "  "
_LEAST = 8  # characters of a name, and of a line, that are always shown: with less, pods of one deployment look alike


def show(
    args: argparse.Namespace,
    document: object,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    title: Sequence[str] = (),
    give: Sequence[int] = (),
    notes: Sequence[str] = (),
    done: str | None = None,
) -> None:
    """Print ``document`` if ``--json`` was given; else title, table and notes.

    ``done`` is what was changed: it is true also where nothing can be printed any more.
    """
    args.done = done or ("the change was made" if getattr(args, "execute", False) else None)
    if args.json:
        print_json(document)
        return
    for line in title:
        print(line)
    if rows:
        print_table(header, rows, give=give)
    for note in notes:
        print_lines(note)


def ending(args: argparse.Namespace) -> str:
    """Return the last line of a plan: whether it was carried out."""
    return "done" if args.execute else "dry run: nothing was changed; --execute does it"


def width() -> int | None:
    """Return how many columns a line may have; None where nobody counts them, as in a pipe."""
    # COLUMNS is set by whoever pages or records the output of a pipe.
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return max(shutil.get_terminal_size().columns, _LEAST)
    return None


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, give: Sequence[int] = ()) -> None:
    """Print columns that are as wide as they must be, numbers to the right.

    Where a line would be longer than the terminal is wide, the columns in ``give`` are shortened, the first one first.
    """
    lines = [list(header), *([printable(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for column in give:
        spare = (width() or sys.maxsize) - sum(widths) - len(_GAP) * (len(widths) - 1)
        least = max(len(header[column]), _LEAST)
        widths[column] = max(min(widths[column], least), widths[column] + min(spare, 0))
    # A column of offsets has "-" where there is none, so one number is enough.
    right = [any(isinstance(row[i], int) for row in rows) for i in range(len(header))]
    for line in lines:
        cells = [shortened(cell, size) for cell, size in zip(line, widths, strict=True)]
        cells = [
            cell.rjust(size) if is_right else cell.ljust(size)
            for cell, size, is_right in zip(cells, widths, right, strict=True)
        ]
        print(_GAP.join(cells).rstrip())


def shortened(text: str, size: int) -> str:
    """Leave out the middle of a text that is too long: names differ at their ends."""
    if len(text) <= size:
        return text
    behind = (size - 1) // 2  # one column is the ellipsis
    return f"{text[: size - 1 - behind]}…{text[len(text) - behind :]}"


def print_lines(text: str, *, indent: str = "") -> None:
    """Print a sentence in as many lines as it takes."""
    size = width()
    if size is None:
        print(indent + printable(text))
        return
    more = " " * len(indent)
    print(*textwrap.wrap(printable(text), size, initial_indent=indent, subsequent_indent=more), sep="\n")


def print_json(document: object) -> None:
    """Print one JSON document; times in ISO 8601."""

    def plain(value: Any) -> str:
        return value.isoformat() if isinstance(value, datetime) else str(value)

    print(json.dumps(_finite(document), indent=2, default=plain, allow_nan=False))


def _finite(value: Any) -> Any:
    """Write numbers that JSON does not have as texts, the way Postgres writes them: NaN, Infinity, -Infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def printable(value: object) -> str:
    """Show a value in one line: what Kafka or a handler's error put there must not move the cursor of a terminal."""
    return "-" if value is None else "".join(c if c.isprintable() else " " for c in str(value))
