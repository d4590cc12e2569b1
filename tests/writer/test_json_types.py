"""Every type of the page takes its values from JSON, by the sink into Postgres, unchanged, or refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message

from exactly_once.writer import BadRow, TableSink
from exactly_once.writer.from_json import JsonDecoder
from tests.writer.conftest import Connection
from tests.writer.types_table import OWN_TYPES, TYPES, page

PAGE = Path(__file__).parents[2] / "docs" / "types.md"
GOOD = [(kind, json, shown) for row in TYPES for kind, values in row.values.items() for json, shown in values]
BAD = [(kind, json) for row in TYPES for kind, values in row.bad.items() for json in values]
WAYS: dict[str, dict[str, Any]] = {
    "append": {"mode": "append"},
    "arrays": {"mode": "upsert"},
    "stage": {"mode": "upsert", "small_batch": 0},
}


@pytest.fixture
def own(work: Connection) -> Iterator[Connection]:
    """A connection with types of our own, which go away with the transaction."""
    work.execute("SET LOCAL TimeZone = 'UTC'")
    for statement in filter(str.strip, OWN_TYPES.split(";")):
        work.execute(statement)
    yield work
    work.rollback()


def message(text: str, offset: int = 0) -> Message:
    return Message(topic="t", partition=1, offset=offset, value=text.encode())


def test_the_page_says_what_is_tested() -> None:
    assert page() in PAGE.read_text(), page()


@pytest.mark.parametrize("way", WAYS)
def test_values_from_json_are_stored_as_they_are(way: str, own: Connection, subtests: pytest.Subtests) -> None:
    """Each in a table of its type, alone and together with the others, which changes by what way it goes."""
    for number, kind in enumerate(dict.fromkeys(kind for kind, _, _ in GOOD)):
        values = [(json, shown) for k, json, shown in GOOD if k == kind]
        own.execute(f"CREATE TEMP TABLE of_type_{number} (id int PRIMARY KEY, v {kind})")
        sink = TableSink(f"of_type_{number}", decoder=JsonDecoder(), **WAYS[way])
        batches = [[f'{{"id":{i},"v":{json}}}'] for i, (json, _) in enumerate(values)]
        batches += [[f'{{"id":{100 + i},"v":{json}}}' for i, (json, _) in enumerate(values)] + ['{"id":999,"v":null}']]
        with subtests.test(kind):
            for batch in batches:
                sink.write(own, [message(text) for text in batch])
            cast = "rtrim(v)" if kind == "char(3)" else "v::text"
            found = [text for (text,) in own.execute(f"SELECT {cast} FROM of_type_{number} ORDER BY id").fetchall()]
            shown = [text for _, text in values]
            assert found == [*shown, *shown, None]


def test_other_values_from_json_are_refused_by_name(own: Connection, subtests: pytest.Subtests) -> None:
    for number, (kind, json) in enumerate(BAD):
        with subtests.test(f"{kind} <- {json}"):
            own.execute("SAVEPOINT before")
            own.execute(f"CREATE TEMP TABLE bad_{number} (id int, v {kind})")
            sink = TableSink(f"bad_{number}", decoder=JsonDecoder())
            with pytest.raises(BadRow) as caught:
                sink.write(own, [message('{"id":1,"v":null}'), message(f'{{"id":2,"v":{json}}}', 7)])
            own.execute("ROLLBACK TO SAVEPOINT before")
            assert (caught.value.topic, caught.value.partition, caught.value.offset) == ("t", 1, 7)
            # Of a domain's constraint Postgres names no column; malformed JSON is of the whole message.
            is_unnamed = isinstance(caught.value.__cause__, psycopg.errors.CheckViolation) or "JSON" in str(
                caught.value
            )
            assert caught.value.column == "v" or is_unnamed
