"""SQL: the named queries and the migrations, as files beside this one.

A query is written with ``{schema}`` where the schema's name belongs and, in the few places where
Postgres takes no parameters (BEGIN, SET), with other names in braces that the caller fills in. The name of a query
in braces stands for its text.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from psycopg import sql

_BRACES = re.compile(r"\{(\w+)\}")
# The name, and the comments behind it, which are not sent.
_NAME = re.compile(r"^-- name: (\w+)\n((?:--.*\n)*)", re.MULTILINE)


def query(name: str, schema: str, **parts: sql.Composable) -> sql.Composed:
    """Return the query ``name`` for one schema, its other placeholders filled in."""
    return sql.SQL(_queries()[name]).format(schema=sql.Identifier(schema), **parts)


def migrations(schema: str) -> dict[int, sql.Composed]:
    """Return the migrations by number, in order."""
    folder = files(__name__) / "migrations"
    found = sorted(
        (int(f.name.split("_")[0]), f.read_text("utf-8")) for f in folder.iterdir() if f.name.endswith(".sql")
    )
    return {number: sql.SQL(text).format(schema=sql.Identifier(schema)) for number, text in found}


def latest() -> int:
    """Return the number of the last migration, which is the version of the schema that it leaves."""
    return max(migrations("any"))


def grants(schema: str, role: str) -> sql.Composed:
    """Return what a worker's role must be granted."""
    text = (files(__name__) / "grants.sql").read_text("utf-8")
    return sql.SQL(text).format(schema=sql.Identifier(schema), role=sql.Identifier(role))


@cache
def _queries() -> dict[str, str]:
    """Split the files at their name lines, and put queries into those that name them."""
    found: dict[str, str] = {}
    for file in sorted((f for f in files(__name__).iterdir() if f.name.endswith(".sql")), key=lambda f: f.name):
        _, *parts = _NAME.split(file.read_text("utf-8"))
        found |= {name: body.strip() for name, _, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}
    return {name: _BRACES.sub(lambda part: found.get(part[1], part[0]), body) for name, body in found.items()}
