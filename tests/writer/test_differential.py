"""A differential fuzz: what the writer makes of a value is what Postgres makes of the same text, or a meant difference.

Each type gets random values, edges and values of other types: as JSON, from a function and from Arrow, appended and
upserted by arrays and by a stage. Each commit draws values of its own; ``EXACTLY_ONCE_SEED`` repeats those of another.
``EXACTLY_ONCE_FUZZ_SECONDS`` makes it longer, ``EXACTLY_ONCE_FUZZ_VALUES=1000000`` says how many are compared at least.
"""

from __future__ import annotations

import base64
import json
import os
import random
import string
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from confluent_kafka import Message

from exactly_once.writer import FunctionDecoder, TableSink, TableWriter
from exactly_once.writer.arrow import write_arrow
from exactly_once.writer.from_json import JsonDecoder
from exactly_once.writer.plan import Plan
from tests.support.seeds import first_seed
from tests.writer.conftest import Connection
from tests.writer.differences import REFUSED, Case, explained, page
from tests.writer.types_table import OWN_TYPES, TYPES

SECONDS = float(os.environ.get("EXACTLY_ONCE_FUZZ_SECONDS", "30"))
LEAST = int(os.environ.get("EXACTLY_ONCE_FUZZ_VALUES", "0"))
BATCH = 200
DOUBTFUL = 3
"""Of a batch so many values that Postgres refuses are tried, because each takes a transaction of its own."""
VALUES = {k: [j for j, _ in values] for row in TYPES for k, values in row.values.items()}
KINDS = [
    *(k for k in VALUES if k != "json[]"),
    *("xid", "cid", "oid[]"),
    "smallint[]",
    "real[]",
    "timestamp[]",
    "date[]",
    "time[]",
    "uuid[]",
    "inet[]",
    "varchar(3)[]",
    *("interval year to month", "interval minute to second"),
]
POOL = [j for values in VALUES.values() for j in values] + [j for r in TYPES for bad in r.bad.values() for j in bad]
WAYS: list[dict[str, Any]] = [{"mode": "append"}, {"mode": "upsert"}, {"mode": "upsert", "small_batch": 0}]
PAGE = Path(__file__).parents[2] / "docs" / "types.md"


class Values:
    """Draws values, as JSON."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._makers: list[Callable[[], str]] = [
            self._whole, self._whole, self._fraction, self._moment, self._text, self._word, self._list, self._object,
            lambda: rng.choice(POOL), lambda: self._mutated(rng.choice(POOL)),
        ]  # fmt: skip

    def of(self, kind: str) -> str:
        """Draw a value that may fit a type."""
        if kind.endswith("[]") and self._rng.random() < 0.7:
            return f"[{', '.join(self.of(kind[:-2]) for _ in range(self._rng.randrange(4)))}]"
        if self._rng.random() < 0.4 and kind in VALUES:
            return self._mutated(self._rng.choice(VALUES[kind]))
        return self._rng.choice(self._makers)()

    def _whole(self) -> str:
        number = self._rng.choice((1, -1)) * self._rng.getrandbits(
            self._rng.choice((1, 7, 15, 16, 31, 32, 53, 54, 63, 64, 90))
        )
        return self._maybe_quoted(str(number + self._rng.choice((-1, 0, 1))))

    def _fraction(self) -> str:
        digits = "".join(self._rng.choices(string.digits, k=self._rng.randrange(1, 25)))
        exponent = f"e{self._rng.choice((1, -1)) * self._rng.randrange(400)}" if self._rng.random() < 0.3 else ""
        return self._maybe_quoted(f"{self._rng.choice(('', '-'))}{self._rng.randrange(1000)}.{digits}{exponent}")

    def _moment(self) -> str:
        moment = datetime(1, 1, 1, tzinfo=UTC) + timedelta(seconds=self._rng.randrange(315_537_897_600))
        fraction = "".join(self._rng.choices("0123456789555", k=self._rng.randrange(10)))
        zone = self._rng.choice(("", "Z", "+01:00", "-0530", "+14"))
        form = self._rng.choice(
            ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%H:%M:%S", "%Y-%m-%d", "%H:%M", "%Y-%m-%dT%H:%M")
        )
        text = f"{moment:{form}}".rjust(len("2026-01-01") if form == "%Y-%m-%d" else 0, "0")
        return json.dumps(text + (f".{fraction}" if fraction and form.endswith("S") else "") + zone)

    def _text(self) -> str:
        some = "abc \t\"\\,{}()[]\u00e4\u4e2d\U0001f600'0123-"
        return json.dumps(
            "".join(self._rng.choices(some, k=self._rng.randrange(8))), ensure_ascii=self._rng.random() < 0.5
        )

    def _word(self) -> str:
        return self._rng.choice((
            "null", "true", "false", '"NaN"', '"Infinity"', '"-infinity"', '""', "-0", "-0.0", "0", "[]", "{}",
            json.dumps(str(UUID(int=self._rng.getrandbits(128)))),
            json.dumps(f"{self._rng.randrange(300)}.1.2.{self._rng.randrange(256)}/{self._rng.randrange(40)}"),
            json.dumps(base64.b64encode(self._rng.randbytes(self._rng.randrange(6))).decode()),
        ))  # fmt: skip

    def _list(self) -> str:
        return f"[{','.join(self._rng.choice(self._makers)() for _ in range(self._rng.randrange(3)))}]"

    def _object(self) -> str:
        names = self._rng.sample(
            ("name", "size", "more", "price", "tags", "a", "start", "days"), self._rng.randrange(4)
        )
        return f"{{{','.join(f'{json.dumps(n)}:{self._rng.choice(self._makers)()}' for n in names)}}}"

    def _maybe_quoted(self, text: str) -> str:
        if self._rng.random() < 0.7:
            return text
        # Which some types read as octal or hexadecimal.
        return f'"{self._rng.choice(("", "", "", "0", "+0", " 0", "0x", "00"))}{text}"'

    def _mutated(self, text: str) -> str:
        if self._rng.random() < 0.5 or not text:
            return text
        at = self._rng.randrange(len(text))
        changed = (
            text[:at]
            + self._rng.choice(("", "0", "5", "-", ".", " ", ":", "T", "Z", "x", "]"))
            + text[at + self._rng.randrange(2) :]
        )
        try:
            json.loads(changed)
        except (ValueError, RecursionError):
            return text
        return changed


class Server:
    """A table and a reference for each type."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        connection.execute("SET TimeZone = 'UTC'")
        # Rounds are committed, so the types go into a schema that no other test sees.
        connection.execute("DROP SCHEMA IF EXISTS fuzz CASCADE; CREATE SCHEMA fuzz; SET search_path = fuzz, public")
        for statement in filter(str.strip, OWN_TYPES.split(";")):
            connection.execute(statement)
        for number, kind in enumerate(KINDS):
            # A json is its text, which all functions read and write anew; here behind the field's name.
            reference = f"SELECT ARRAY[v::text] FROM json_to_record(doc::json) AS t(v {kind})"
            if kind == "json":
                reference = "SELECT ARRAY[nullif(btrim(substr(doc, 6, length(doc) - 6))::json::text, 'null')]"
            connection.execute(f"CREATE TEMP TABLE fuzz_{number} (id int PRIMARY KEY, v {kind})")
            connection.execute(
                f"""CREATE FUNCTION pg_temp.reference_{number}(doc text) RETURNS text[] LANGUAGE plpgsql AS $$
                BEGIN
                    RETURN ({reference});
                EXCEPTION WHEN OTHERS THEN RETURN NULL;
                END $$"""
            )

    def theirs(self, kind: str, values: Sequence[str]) -> list[object]:
        """Return what Postgres makes of values in JSON."""
        statement = f"SELECT pg_temp.reference_{KINDS.index(kind)}(d) FROM unnest(%s::text[]) d"
        found = self.connection.execute(statement, [[f'{{"v":{v}}}' for v in values]]).fetchall()
        return [REFUSED if array is None else array[0] for (array,) in found]

    def cases(
        self, kind: str, values: Sequence[str], write: Callable[[Sequence[int]], object], good: Sequence[int]
    ) -> list[Case]:
        """Write the values that are not refused yet; return what became of all.

        Of those that Postgres refuses only some are tried, each alone.
        """
        theirs = self.theirs(kind, values)
        doubtful = [i for i in good if theirs[i] is REFUSED]
        tried = doubtful[:DOUBTFUL]
        self._written(write, [i for i in good if theirs[i] is not REFUSED])
        for i in tried:
            self._written(write, [i])
        table = f"fuzz_{KINDS.index(kind)}"
        found: dict[int, object] = dict(self.connection.execute(f"SELECT id, v::text FROM {table}").fetchall())
        self.connection.execute(f"TRUNCATE {table}")
        left_out = set(doubtful[DOUBTFUL:])
        return [
            Case(kind, value, found.get(i, REFUSED), theirs[i]) for i, value in enumerate(values) if i not in left_out
        ]

    def _written(self, write: Callable[[Sequence[int]], object], some: Sequence[int]) -> None:
        """Write some values, without those that Postgres refuses."""
        if not some:
            return
        self.connection.execute("SAVEPOINT before")
        try:
            write(some)
        except (ValueError, psycopg.Error) as error:
            self.connection.execute("ROLLBACK TO SAVEPOINT before")
            if (offset := getattr(error, "offset", None)) is not None:
                self._written(write, [i for i in some if i != offset])
            elif len(some) > 1:
                half = len(some) // 2
                self._written(write, some[:half])
                self._written(write, some[half:])


def by_sink(server: Server, kind: str, values: Sequence[str], decoder: Any, way: Any) -> list[Case]:
    """Write values as messages; what the decoder and the codecs refuse is sorted out before."""
    sink = TableSink(f"fuzz_{KINDS.index(kind)}", decoder=decoder, **way)
    work = server.connection
    sink.write(work, [])
    plan = Plan(sink.writer.table(work), ["id", "v"])
    sent = [
        Message(topic="t", partition=0, offset=i, value=f'{{"id":{i},"v":{v}}}'.encode()) for i, v in enumerate(values)
    ]

    def is_good(message: Message) -> bool:
        try:
            decoded = decoder.decode([message])
            return plan.find_bad(decoded, decoded.origins) is None
        except ValueError:
            return False

    good = [i for i, message in enumerate(sent) if is_good(message)]
    return server.cases(kind, values, lambda some: sink.write(work, [sent[i] for i in some]), good)


def json_cases(server: Server, kind: str, draw: Values, way: Any) -> list[Case]:
    """Compare values in JSON."""
    return by_sink(server, kind, [draw.of(kind) for _ in range(BATCH)], JsonDecoder(), way)


def function_cases(server: Server, kind: str, draw: Values, way: Any) -> list[Case]:
    """Compare texts, from a function."""
    drawn = [draw.of(kind) for _ in range(BATCH)]
    texts = [str(json.loads(v)) if v.startswith('"') else v for v in drawn]
    if kind in ("json", "jsonb"):  # which take text to be JSON; but null in JSON is no value of a column
        texts = [
            text.encode(errors="ignore").decode().replace("\0", "").strip() for text in texts if text.strip() != "null"
        ]
    decoder = FunctionDecoder(lambda m: {"id": m.offset(), "v": texts[m.offset() or 0]})
    values = texts if kind in ("json", "jsonb") else list(map(json.dumps, texts))
    return by_sink(server, kind, values, decoder, way)


ARROW: dict[str, tuple[Any, Callable[[random.Random], Any]]] = {
    "smallint": (pa.int64(), lambda r: r.randrange(-40_000, 40_000)),
    "integer": (pa.int64(), lambda r: r.choice((1, -1)) * r.getrandbits(r.choice((8, 31, 32)))),
    "bigint": (pa.uint64(), lambda r: r.getrandbits(r.choice((8, 63, 64)))),
    "real": (pa.float32(), lambda r: r.choice((r.random(), 0.0, -0.0, float("inf"), r.getrandbits(20)))),
    "double precision": (
        pa.float64(),
        lambda r: r.choice((r.random() * 10 ** r.randrange(-300, 300), -0.0, float("nan"))),
    ),
    "text": (pa.string(), lambda r: "".join(r.choices('a\u00e4 "\\\t\0', k=r.randrange(5)))),
    "varchar(3)": (pa.string(), lambda r: "".join(r.choices("ab ", k=r.randrange(6)))),
    "boolean": (pa.bool_(), lambda r: r.random() < 0.5),
    "uuid": (pa.string(), lambda r: str(UUID(int=r.getrandbits(128)))),
}


def arrow_cases(server: Server, kind: str, rng: random.Random, way: Any) -> list[Case]:
    """Compare values of Arrow with their texts."""
    arrow_type, make = ARROW[kind]
    array = pa.array([None if rng.random() < 0.1 else make(rng) for _ in range(BATCH)], arrow_type)
    values = array.to_pylist()
    writer = TableWriter(f"fuzz_{KINDS.index(kind)}", **way)

    def write(some: Sequence[int]) -> int:
        batch = pa.record_batch({"id": pa.array(some, pa.int32()), "v": array.take(pa.array(some))})
        return write_arrow(writer, server.connection, batch)

    texts = ["null" if v is None else json.dumps(v if isinstance(v, (str, bool)) else repr(v)) for v in values]
    return server.cases(kind, texts, write, range(BATCH))


def test_the_page_says_what_differs() -> None:
    assert page() in PAGE.read_text(), page()


@pytest.mark.slow
@pytest.mark.timeout(300 + 2 * SECONDS + LEAST / 1000)  # values a second, on a machine that is busy
def test_values_are_stored_as_postgres_reads_them(work: Connection) -> None:
    seed = first_seed()
    rng = random.Random(seed)
    server, draw = Server(work), Values(rng)
    unexplained: dict[tuple[str, str, bool, bool], Case] = {}
    compared, until = 0, time.monotonic() + SECONDS
    while compared < LEAST or time.monotonic() < until:
        for kind in rng.sample(KINDS, len(KINDS)):
            way = rng.choice(WAYS)
            groups = {"json": json_cases(server, kind, draw, way)}
            groups["function"] = function_cases(server, kind, draw, way)
            if kind in ARROW:
                groups["arrow"] = arrow_cases(server, kind, rng, way)
            for path, cases in groups.items():
                for case in cases:
                    compared += 1
                    if not explained(case):
                        sort = (path, kind, case.ours is REFUSED, case.theirs is REFUSED)
                        unexplained[sort] = min(unexplained.get(sort, case), case, key=lambda c: len(c.json))
            work.commit()  # a transaction with a million savepoints and locks would be ever slower
            if compared >= LEAST and time.monotonic() > until:
                break
    print(f"{compared} values compared, from seed {seed}")
    assert compared > 0
    shown = [
        f"{path}: {c.kind} <- {c.json}: {c.ours!r}, Postgres {c.theirs!r}" for (path, *_), c in unexplained.items()
    ]
    assert not shown, "\n".join(shown)
