"""The statements of the publish side: named, with a purpose, each used, and granted."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from exactly_once import publish
from exactly_once.ledger.sql import query
from tests.support.findings import nothing

TEXT = (files("exactly_once.ledger.sql") / "publish.sql").read_text("utf-8")
NAMES = re.findall(r"^-- name: (\w+)\n-- [A-Z]", TEXT, re.MULTILINE)
PACKAGE = Path(publish.__file__).parent
FILES = [*PACKAGE.glob("*.py"), PACKAGE.parent / "cli" / "publish.py"]
SOURCES = "".join(path.read_text("utf-8") for path in FILES)


def test_every_statement_is_named_and_says_its_purpose() -> None:
    assert len(NAMES) == TEXT.count("-- name:") == len(set(NAMES))
    assert all(name.startswith("publish_") for name in NAMES), "all files share their names"


def test_every_statement_composes_and_is_used() -> None:
    """That it is one complete statement is held by tests/unit/test_sql.py, for all files."""
    for name in NAMES:
        query(name, 'odd "schema"')  # needs no part but the schema
    nothing((name for name in NAMES if f'"{name}"' not in SOURCES), "never used")


def test_no_module_holds_sql() -> None:
    assert not re.search(r"\"(SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH) ", SOURCES)
