"""The SQL files: every statement is named, complete, and the only place where SQL is written."""

from __future__ import annotations

import ast
import itertools
import re
from importlib.resources import files
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

import exactly_once
from exactly_once.ledger.migrate import VERSION, as_sql
from exactly_once.ledger.sql import _queries, migrations, query
from tests.support.findings import nothing

PACKAGE = Path(exactly_once.__file__).parent
FILES = [f for f in files("exactly_once.ledger.sql").iterdir() if f.name.endswith(".sql") and f.name != "grants.sql"]
TEXT = "\n".join(f.read_text("utf-8") for f in FILES)
NAMES = re.findall(r"^-- name: (\w+)$", TEXT, re.MULTILINE)
PLACEHOLDER = re.compile(r"(?<!%)%(?!%)(?:\((\w+)\)([sb])|(.?))")


def test_every_name_line_is_read_and_no_name_is_given_twice() -> None:
    assert len(NAMES) == TEXT.count("-- name:")
    assert sorted(NAMES) == sorted(set(NAMES)) == sorted(_queries())


def comment_of(name: str) -> str:
    """Read the comment lines at the head of a query as one line."""
    lines = TEXT.split(f"-- name: {name}\n")[1].splitlines()
    return " ".join(itertools.takewhile(lambda line: line.startswith("--"), lines))


def test_every_query_says_its_purpose_in_a_sentence() -> None:
    comments = {name: comment_of(name) for name in NAMES}
    vague = {name: said or "nothing" for name, said in comments.items() if not re.fullmatch(r"-- [A-Z].*\.", said)}
    nothing(vague, "no sentence below the name")


def parts_of(name: str) -> dict[str, sql.Composable]:
    """Fill every brace of a query but the schema's."""
    fields = set(re.findall(r"{(\w+)}", _queries()[name])) - {"schema"}
    return {field: sql.Literal("x") for field in fields}


def test_every_query_composes_and_names_all_its_parameters() -> None:
    texts = {name: query(name, 'odd "schema"', **parts_of(name)).as_string(None) for name in NAMES}
    nothing((name for name, text in texts.items() if "{" in text or "}" in text), "a brace is left")
    nothing((name for name, text in texts.items() if text.rstrip().endswith(";")), "a semicolon at the end")
    unnamed = [
        f"{name}: %{kind or other}"
        for name, text in texts.items()
        for named, kind, other in PLACEHOLDER.findall(text)
        if not (named and kind)
    ]
    nothing(unnamed, "only %(name)s or %(name)b, and %% for %")


def test_every_query_touches_only_the_schema_it_is_given() -> None:
    elsewhere = [
        f"{name}: {found[0]}"
        for name, body in _queries().items()
        for found in re.finditer(r"\b(?:FROM|JOIN|UPDATE|INTO)\s+(\S*)(?:ledger|audit|version)\b", body)
        if found[1] != "{schema}."
    ]
    nothing(elsewhere, "not in {schema}")


def locks_in_order(before: str) -> bool:
    """Tell whether what precedes a lock finds one row, or the rows of the ledger in their order."""
    if before.endswith("CROSS JOIN LATERAL {schema}."):
        return re.search(r"ORDER BY w\.topic, w\.partition\) AS w\s+CROSS", before) is not None
    if "partition = %(partition)s" in before:
        return True
    return re.search(r"ORDER BY l\.topic, l\.partition\s*$", before) is not None


def test_rows_are_locked_in_the_order_of_topic_and_partition() -> None:
    """Two workers that lock in different orders deadlock."""
    waits = r"FOR UPDATE(?! SKIP LOCKED)|lock_row"  # who skips what is locked waits for nobody
    parts = {name: re.split(waits, body)[:-1] for name, body in _queries().items()}
    nothing((name for name, befores in parts.items() if not all(map(locks_in_order, befores))), "locks in no order")


def given_parameters() -> dict[str, set[str]]:
    """Find for each query the keywords that the ledger passes with it."""
    given: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse((PACKAGE / "ledger" / "rows.py").read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("_run", "_rows"):
            name = node.args[1]
            if isinstance(name, ast.Constant):
                given.setdefault(str(name.value), set()).update(k.arg for k in node.keywords if k.arg)
    return given


def test_the_ledger_gives_every_parameter_and_no_other() -> None:
    passed = given_parameters()
    assert passed
    wanted = {name: {found for found, _, _ in PLACEHOLDER.findall(_queries()[name])} for name in passed}
    implied = {"group_id", "topics", "partitions", "generations"}
    nothing({name: wanted[name] - given - implied for name, given in passed.items()}, "not given")
    nothing({name: given - wanted[name] for name, given in passed.items()}, "given, and not in the query")


def test_a_query_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        query("no_such_query", "exactly_once")


def test_a_part_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeyError):
        query("begin", "exactly_once")


def test_migrations_are_numbered_without_holes_up_to_the_version() -> None:
    assert list(migrations("s")) == list(range(1, VERSION + 1))


@pytest.mark.parametrize("schema", ["exactly_once", 'odd "schema"', "Großbuchstaben"])
def test_a_migration_names_its_schema_everywhere(schema: str) -> None:
    quoted = sql.Identifier(schema).as_string(None)
    for ddl in migrations(schema).values():
        text = ddl.as_string(None)
        assert "{schema}" not in text
        created = re.findall(r"^CREATE (?:TABLE|FUNCTION|VIEW)\s+(?:OR REPLACE )?(.*)", text, re.MULTILINE)
        assert created
        assert all(line.startswith(f"{quoted}.") for line in created)


def test_the_whole_schema_can_be_printed() -> None:
    text = as_sql("s", "r")
    assert text.startswith('CREATE SCHEMA IF NOT EXISTS "s";')
    assert 'TO "r"' in text


_STATEMENT = re.compile(
    r"^\s*(?:SELECT|INSERT|UPDATE|DELETE|MERGE|WITH|CREATE|ALTER|DROP|TRUNCATE|LOCK|SET|COPY|GRANT|SAVEPOINT|BEGIN"
    r"|COMMIT|ROLLBACK)\b(?! as\b)[ A-Z;]*",
)
_TRIVIAL = {"BEGIN", "COMMIT", "ROLLBACK", "; COMMIT"}
_COMPOSED = {"COPY {} ({}) FROM STDIN", "ALTER TABLE {} {}"}
"""Names the user's own table."""


def sql_strings(path: Path) -> list[str]:
    """Find the strings of a module that are SQL; docstrings and sentences are not."""
    tree = ast.parse(path.read_text("utf-8"))
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    # An f-string is prose for people: composed SQL is made of sql.Identifier and the like.
    prose |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in prose
        and _STATEMENT.match(node.value)
        and " " in node.value  # a word alone names an operation of a change event
        and not re.search(r"[a-z], [a-z]|\. ", node.value)
    ]


def test_no_module_holds_sql() -> None:
    apart = {"cli", "demo", "embedded", "soak"}  # programs about the library, with tables of their own
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in apart]
    held = {path.name: set(sql_strings(path)) - _TRIVIAL - _COMPOSED for path in paths}
    nothing(held, "SQL outside of exactly_once/ledger/sql")


def test_psycopg_reads_the_placeholders_as_we_do() -> None:
    """The ledger merges parameters on the client for the advance: a stray % would be an error there."""
    from psycopg._queries import PostgresClientQuery  # noqa: PLC0415 - no public way to convert without a server
    from psycopg.adapt import Transformer  # noqa: PLC0415

    for name in NAMES:
        text = query(name, "s", **parts_of(name)).as_string(None)
        wanted = {found: None for found, _, _ in PLACEHOLDER.findall(text) if found}
        if wanted:
            PostgresClientQuery(Transformer()).convert(text, wanted)
    assert psycopg.paramstyle == "pyformat"
