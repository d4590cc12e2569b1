"""The oracle, which the demo and the soak use as well."""

from __future__ import annotations

from exactly_once.demo.journal import (
    APPEND,
    COUNT,
    CREATE,
    Entry,
    Identity,
    Record,
    Verdict,
    check,
    compare,
    counted,
    create,
    entries,
    entry,
    scan,
)

__all__ = [
    "APPEND",
    "COUNT",
    "CREATE",
    "Entry",
    "Identity",
    "Record",
    "Verdict",
    "check",
    "compare",
    "counted",
    "create",
    "entries",
    "entry",
    "scan",
]
