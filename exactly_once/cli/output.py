"""Output: tables for people, one JSON document for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print columns that are as wide as they must be, numbers to the right."""
    lines = [list(header), *([printable(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    right = [any(isinstance(row[i], int) for row in rows) for i in range(len(header))]
    for line in lines:
        cells = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        )
        print("  ".join(cells).rstrip())


def print_json(document: object) -> None:
    """Print one JSON document; times in ISO 8601."""
    print(json.dumps(document, indent=2, default=_plain))


def printable(value: object) -> str:
    """Show a value in one line: what Kafka or a handler's error put there must not move the cursor of a terminal."""
    return "-" if value is None else "".join(c if c.isprintable() else " " for c in str(value))


def ago(seconds: float | None) -> str | None:
    """Say how long ago something was, in its largest unit."""
    if seconds is None:
        return None
    for size, name in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {name} ago"
    return f"{max(seconds, 0):.1f} s ago"


def _plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
