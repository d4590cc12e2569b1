"""A program whose adapters for everything are registered globally, and wrong, before it imports the library.

Arguments: brokers, conninfo, topic, which is also the group. It consumes to the end; offset 2 becomes a dead letter.
"""

from __future__ import annotations

import sys
from datetime import datetime
from types import NoneType
from typing import Any
from uuid import UUID

import psycopg
from psycopg.adapt import Buffer, Dumper, Loader
from psycopg.types.json import Jsonb

AT = datetime(2005, 5, 5)  # noqa: DTZ001 - the column has none either


class Wrong(Dumper):
    """Sends a word for whatever it is given."""

    oid = psycopg.adapters.types["text"].oid

    def dump(self, obj: Any) -> bytes:
        return b"wrong"


class WrongToo(Loader):
    """Gives a word for whatever the server sends."""

    def load(self, data: Buffer) -> str:
        return "wrong"


for kind in (str, int, float, bool, UUID, list, dict, bytes, datetime, NoneType, Jsonb):
    psycopg.adapters.register_dumper(kind, Wrong)
for name in ("bool", "int4", "int8", "float8", "uuid", "text", "timestamptz", "jsonb", "bytea", "text[]"):
    psycopg.adapters.register_loader(name, WrongToo)


def main(bootstrap_servers: str, conninfo: str, topic: str) -> None:
    from exactly_once import ExactlyOnceConsumer, Unit  # noqa: PLC0415 - behind what the program registers
    from exactly_once.publish import PostgresWindow, PublishOwner  # noqa: PLC0415
    from exactly_once.writer import TableWriter  # noqa: PLC0415

    writers = [TableWriter(f"{topic}_own", small_batch=rows) for rows in (0, 100)]  # by COPY, and by one statement

    def handler(unit: Unit) -> None:
        assert unit.execute("SELECT 5").fetchone() == ("wrong",)
        assert all(unit.claim_many(f"{topic}-{message.offset()}" for message in unit.messages))
        if any(message.offset() == 2 for message in unit.messages):
            raise ValueError("of the handler")
        for number, writer in enumerate(writers):
            rows = [(m.offset() or 0, number, "five", {"five": 5}, AT) for m in unit.messages]
            writer.write(unit.connection, rows)

    kafka = {"bootstrap.servers": bootstrap_servers, "group.id": topic}
    with ExactlyOnceConsumer(kafka, conninfo=conninfo, start="earliest", max_messages=10) as consumer:
        consumer.subscribe([topic])
        consumer.run(handler, on_poison="dead-letter", until_end=True)
    with PublishOwner(conninfo, name=topic) as owner:
        window = PostgresWindow(owner, scope=topic, seconds=3600, changes_window=True)
        print([window.reserve(key).name for key in ("a", "b", "a")])


main(*sys.argv[1:])
