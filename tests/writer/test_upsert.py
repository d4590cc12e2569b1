"""However a stream of changes is cut into batches, a table ends as if each had been applied alone."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from itertools import pairwise
from typing import Any, Literal
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactly_once.errors import ConfigurationError
from exactly_once.writer import MISSING, BadRow, TableWriter, Tombstone
from exactly_once.writer.changes import UNAVAILABLE
from tests.writer.conftest import Connection, MakeTable, rows_of

BERLIN = ZoneInfo("Europe/Berlin")

keys = st.tuples(st.integers(0, 2), st.sampled_from("ab"))
numbers = st.none() | st.integers(0, 3)
changes = st.one_of(
    st.tuples(keys, numbers, numbers, numbers).map(lambda c: (*c[0], *c[1:])),
    keys.map(Tombstone),
)
changes_with_gaps = st.one_of(
    st.tuples(keys, *[numbers | st.just(MISSING)] * 3).map(lambda c: (*c[0], *c[1:])),
    keys.map(Tombstone),
)

OPTIONS: dict[str, dict[str, Any]] = {
    "all columns": {},
    "only one is updated": {"update": ["x"]},
    "the newer one": {"newest_by": "version"},
    "the newer one, only some are updated": {"newest_by": "version", "update": ["version", "x"]},
    "fields may be missing": {"missing": "keep"},
    "fields may be missing, the newer one": {"missing": "keep", "newest_by": "version"},
    "fields may be missing, only one is updated": {"missing": "keep", "update": ["x"]},
    "missing fields are defaults": {"missing": "default"},
    "missing fields are defaults, the newer one": {"missing": "default", "newest_by": "version"},
    "one is added to": {"add": ["x"]},
    "one is added to, fields may be missing": {"add": ["x"], "missing": "keep"},
    "one is added to, the newer one": {"add": ["x"], "newest_by": "version"},
    "one is added to, only some are updated": {"add": ["x"], "update": ["x", "y"]},
}


# Triggers that keep some rows out, keep some rows, and write down what they see of the others.
TRIGGERS = """
CREATE TEMP TABLE seen (number serial, id int, part text, what text) ON COMMIT DROP;
CREATE FUNCTION pg_temp.sift() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN RETURN CASE WHEN OLD.y = 3 THEN NULL ELSE OLD END; END IF;
    RETURN CASE WHEN NEW.version = 0 THEN NULL ELSE NEW END;
END $$;
CREATE FUNCTION pg_temp.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO seen (id, part, what) SELECT r.id, r.part, concat_ws(' ', TG_OP, r)
    FROM (SELECT (CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END).*) AS r;
    RETURN NULL;
END $$;
CREATE TRIGGER sift BEFORE INSERT OR UPDATE OR DELETE ON changed FOR EACH ROW EXECUTE FUNCTION pg_temp.sift();
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON changed FOR EACH ROW EXECUTE FUNCTION pg_temp.note();
"""


def stored_after(
    connection: Connection, batches: list[list[Any]], options: dict[str, Any], *, triggers: str = ""
) -> list[Any]:
    connection.rollback()
    connection.execute(
        "CREATE TEMP TABLE changed (id int, part text, version int DEFAULT 1, x int DEFAULT 7, y int,"
        " other text DEFAULT 'd', PRIMARY KEY (id, part)) ON COMMIT DROP"
    )
    # Rows that are there already, so that what a change leaves can be seen.
    there = "SELECT id, part, 1, 9, 9, 'old' FROM generate_series(0, 1) AS id, (VALUES ('a'), ('b')) AS p(part)"
    connection.execute(f"INSERT INTO changed {there}")
    writer = TableWriter("changed", mode="upsert", columns=["id", "part", "version", "x", "y"], **options)
    connection.execute(triggers)
    for batch in batches:
        writer.write(connection, batch)
    stored = connection.execute("SELECT * FROM changed ORDER BY id, part").fetchall()
    seen = "SELECT id, part, what FROM seen ORDER BY number"
    return [stored, connection.execute(seen).fetchall()] if triggers else stored


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("triggers", ["", TRIGGERS], ids=["", "triggers"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_batches_of_any_size_leave_the_same_rows(
    options: dict[str, Any], triggers: str, data: st.DataObject, work: Connection
) -> None:
    """Triggers see each change of a key, too."""
    kind = changes_with_gaps if "missing" in options else changes
    stream = data.draw(st.lists(kind, min_size=1, max_size=25))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=4)))
    edges = [0, *cuts, len(stream)]
    batches = [stream[a:b] for a, b in pairwise(edges)]
    expected = stored_after(work, [[change] for change in stream], options, triggers=triggers)
    for small_batch in (500, 0):
        assert stored_after(work, batches, {**options, "small_batch": small_batch}, triggers=triggers) == expected


@pytest.mark.parametrize("small_batch", [500, 0])
@pytest.mark.parametrize(
    "trigger",
    [
        "AFTER INSERT OR UPDATE ON {0}_1 FOR EACH ROW EXECUTE FUNCTION {0}_note()",
        "AFTER INSERT OR UPDATE ON {0} FOR EACH ROW WHEN (NEW.v > 0) EXECUTE FUNCTION {0}_note()",
        "AFTER UPDATE ON {0} REFERENCING NEW TABLE AS new FOR EACH STATEMENT EXECUTE FUNCTION {0}_note()",
    ],
    ids=["partition", "row", "transition table"],
)
def test_a_trigger_sees_each_change_of_a_batch(
    trigger: str, small_batch: int, db: Connection, work: Connection, make_table: MakeTable
) -> None:
    """Also one that is made between two batches."""
    table = make_table("(k int PRIMARY KEY, v int) PARTITION BY LIST (k)")
    db.execute(f"CREATE TABLE {table}_1 PARTITION OF {table} FOR VALUES IN (1); CREATE TABLE {table}_seen (v int)")
    writer = TableWriter(table, mode="upsert", small_batch=small_batch)
    writer.write(work, [(1, 0)])
    work.commit()
    see = "SELECT v FROM new" if "NEW TABLE" in trigger else "VALUES (NEW.v)"
    body = f"BEGIN INSERT INTO {table}_seen {see}; RETURN NULL; END"
    db.execute(f"CREATE FUNCTION {table}_note() RETURNS trigger LANGUAGE plpgsql AS '{body}'")
    db.execute(f"CREATE TRIGGER note {trigger.format(table)}")
    assert writer.write(work, [(1, 1), (1, 2), (1, 3)]) == 3
    assert work.execute(f"SELECT v FROM {table}_seen ORDER BY v").fetchall() == [(1,), (2,), (3,)]
    work.commit()
    db.execute(f"ALTER TABLE {table} DISABLE TRIGGER ALL; ALTER TABLE {table}_1 DISABLE TRIGGER ALL")
    assert writer.write(work, [(1, 4), (1, 5)]) == 1, "no trigger sees them, so the last one is enough"
    work.commit()
    db.execute(f"DROP TABLE {table}, {table}_seen; DROP FUNCTION {table}_note CASCADE")


KEY_IN_LOWER_CASE = "BEGIN NEW.k = lower(NEW.k); RETURN NEW; END"
ONE_OF_A_KIND = "BEGIN DELETE FROM {0} WHERE v = NEW.v AND k <> NEW.k; RETURN NEW; END"
CHILDREN = "ADD parent text REFERENCES {0} ON DELETE CASCADE"
GRANDCHILDREN = """
    CREATE TABLE {0}_child (k text PRIMARY KEY REFERENCES {0} ON DELETE CASCADE);
    INSERT INTO {0}_child VALUES ('a');
    ALTER TABLE {0} ADD parent text REFERENCES {0}_child ON DELETE CASCADE"""

ORPHANS = """
    CREATE TABLE {0}_child (k text PRIMARY KEY REFERENCES {0} ON DELETE CASCADE);
    INSERT INTO {0}_child VALUES ('a');
    CREATE FUNCTION pg_temp.{0}_orphan() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN DELETE FROM {0} WHERE v = 7; RETURN NULL; END';
    CREATE TRIGGER t AFTER DELETE ON {0}_child FOR EACH ROW EXECUTE FUNCTION pg_temp.{0}_orphan()"""


@pytest.mark.parametrize("small_batch", [500, 0])
@pytest.mark.parametrize(
    ("ddl", "trigger", "mode", "changes"),
    [
        ("", KEY_IN_LOWER_CASE, "insert-ignore", [("bob", 1), ("BOB", 2)]),
        ("", ONE_OF_A_KIND, "upsert", [("b", 1), ("a", 1)]),
        ("", ONE_OF_A_KIND, "upsert", [("b", 1), ("a", 2), Tombstone(("a",)), ("c", 1)]),
        (f"ALTER TABLE {{0}} {CHILDREN}", "", "upsert", [("z", 0, "a"), Tombstone(("a",)), ("a", 2, None)]),
        (GRANDCHILDREN, "", "upsert", [("z", 0, "a"), Tombstone(("a",)), ("a", 2, None)]),
        (ORPHANS, "", "upsert", [Tombstone(("a",)), ("y", 7), ("z", 8)]),
        (ORPHANS, "", "upsert", [("y", 7), Tombstone(("a",)), ("a", 2)]),
    ],
    ids=[
        *("key that a trigger changes", "trigger at others", "with deletes", "foreign key", "foreign keys in a ring"),
        *("trigger of a child", "trigger of a child, behind"),
    ],
)
def test_changes_of_several_keys_are_made_in_their_order_where_rows_have_to_do_with_each_other(  # noqa: PLR0917
    ddl: str, trigger: str, mode: Any, changes: list[Any], small_batch: int, work: Connection, make_table: MakeTable
) -> None:
    found = []
    for batches in ([[change] for change in changes], [changes]):
        table = make_table("(k text PRIMARY KEY, v int)")
        work.execute(f"INSERT INTO {table} VALUES ('a', 1)")
        work.execute(ddl.format(table))
        if trigger:
            body = trigger.format(table)
            work.execute(f"CREATE FUNCTION pg_temp.{table}() RETURNS trigger LANGUAGE plpgsql AS '{body}'")
            made = f"CREATE TRIGGER t BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW"
            work.execute(f"{made} EXECUTE FUNCTION pg_temp.{table}()")
        writer = TableWriter(table, mode=mode, small_batch=small_batch)
        for batch in batches:
            writer.write(work, batch)
        found.append(rows_of(work, table))
        work.rollback()
    assert found[0] == found[1]


def test_a_foreign_key_of_one_partition_is_such_a_tie_too(work: Connection, make_table: MakeTable) -> None:
    table = make_table("(k int PRIMARY KEY, parent int) PARTITION BY RANGE (k)")
    work.execute(f"CREATE TABLE {table}_1 PARTITION OF {table} FOR VALUES FROM (0) TO (9)")
    work.execute(f"ALTER TABLE {table}_1 ADD FOREIGN KEY (parent) REFERENCES {table}_1 ON DELETE CASCADE")
    changes = [(1, None), (2, 1), Tombstone((1,)), (1, None)]
    TableWriter(table, mode="upsert").write(work, changes)
    assert rows_of(work, table) == [(1, None)]


@pytest.mark.parametrize("kind", ["INSTEAD", "ALSO"])
def test_a_rule_for_deletes_does_what_it_says(
    kind: str, work: Connection, make_table: MakeTable, db: Connection
) -> None:
    """As one that marks rows in place of deleting them; one that comes between two batches is minded as well."""
    table = make_table("(k int PRIMARY KEY, v int, deleted bool DEFAULT false)")
    writer = TableWriter(table, mode="upsert", columns=["k", "v"])
    assert writer.write(work, [(1, 1), (2, 2), (3, 3), Tombstone((3,))]) == 2
    work.commit()
    # With a rule a tombstone is no reason to leave out what came before it.
    act = f"UPDATE {table} SET deleted = true WHERE k = OLD.k + {int(kind == 'ALSO')}"
    db.execute(f"CREATE RULE mark AS ON DELETE TO {table} DO {kind} {act}")
    writer.write(work, [(1, 9), Tombstone((1,)), Tombstone((7,)), (5, 5), Tombstone((5,))])
    rows = {"INSTEAD": [(1, 9, True), (2, 2, False), (5, 5, True)], "ALSO": [(2, 2, True)]}
    assert sorted(rows_of(work, table)) == rows[kind]
    assert writer.missed_deletes == 1


def test_a_row_that_a_policy_keeps_from_being_deleted_has_what_was_stored_before(
    work: Connection, make_table: MakeTable, name: str
) -> None:
    table = make_table("(k int PRIMARY KEY, v text)")
    work.execute(f"INSERT INTO {table} VALUES (1, 'old'); ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    work.execute(f"CREATE ROLE {name}; GRANT ALL ON {table} TO {name}")
    for command, rule in (("SELECT", "USING"), ("INSERT", "WITH CHECK"), ("UPDATE", "USING")):
        work.execute(f"CREATE POLICY p_{command} ON {table} FOR {command} {rule} (true)")
    work.execute(f"SET LOCAL ROLE {name}")
    writer = TableWriter(table, mode="upsert")
    writer.write(work, [(1, "new"), Tombstone((1,)), (2, "x"), Tombstone((2,))])
    assert rows_of(work, table) == [(1, "new"), (2, "x")]
    assert writer.missed_deletes == 2


@pytest.mark.parametrize("small_batch", [500, 0])
def test_a_field_of_a_row_that_is_too_old_does_not_come_in_with_a_newer_one(small_batch: int, work: Connection) -> None:
    options = {"missing": "keep", "newest_by": "version", "small_batch": small_batch}
    batch = [(0, "a", 0, 1, MISSING), (0, "a", 2, MISSING, 2)]
    assert stored_after(work, [batch], options)[0] == (0, "a", 2, 9, 2, "old")


@pytest.mark.parametrize("options", [{}, {"add": ["n"]}, {"newest_by": "n"}])
def test_the_change_that_lacks_a_value_of_no_row_is_named(
    options: dict[str, Any], work: Connection, make_table: MakeTable
) -> None:
    """Also where the changes of a key go in rounds: what follows in the batch is not at fault."""
    table = make_table("(k int PRIMARY KEY, n int, v text)")
    writer = TableWriter(table, mode="upsert", missing="keep", **options)
    lacking, deleted, other = (1, 1, UNAVAILABLE), Tombstone((1,)), (2, 1, "x")
    is_split = bool(options)  # else the delete is all that happens
    for batch, at in (
        ([other, (1, 1, "x"), deleted, lacking], 3),
        ([other, deleted, lacking, (1, 1, UNAVAILABLE)], 2),
        *([([lacking, deleted], 0), ([other, lacking, deleted, (1, 1, UNAVAILABLE)], 1)] if is_split else []),
    ):
        work.execute("SAVEPOINT s")
        with pytest.raises(BadRow, match=rf"^row {at}: column v: .* no such row"):
            writer.write(work, batch)
        work.execute("ROLLBACK TO s")


@pytest.mark.parametrize("kind", ["double precision", "char(3)", "jsonb", "inet", "interval", "int[]"])
def test_a_unit_without_rows_changes_nothing(kind: str, work: Connection, make_table: MakeTable) -> None:
    """Also where Postgres is asked for the order of keys and ages, of which there are none; the command begins so."""
    table = make_table(f"(k {kind} PRIMARY KEY, version {kind})")
    writer = TableWriter(table, mode="upsert", newest_by="version")
    assert writer.write(work, []) == 0
    assert writer.write(work, [(None, None)][:0], columns=["version", "k"]) == 0


@pytest.mark.parametrize("kind", ["int", "double precision", "text"])
def test_the_first_row_of_a_key_stays_whatever_fields_others_lack(
    kind: str, work: Connection, make_table: MakeTable
) -> None:
    """Rows that lack the same columns are stored together, and must not overtake those before them."""
    for key in (["id"], None):
        table = make_table(f"(id {kind} PRIMARY KEY, a int DEFAULT 7, seq int)")
        writer = TableWriter(table, mode="insert-ignore", key=key)
        one, two = ("1", "2") if kind == "text" else (1, 2)
        writer.write(work, [(two, 5, 0), (one, MISSING, 1), (one, 5, 2), (two, MISSING, 3)])
        found = work.execute(f"SELECT id::text, a, seq FROM {table} ORDER BY id").fetchall()
        assert found == [("1", 7, 1), ("2", 5, 0)]


@pytest.mark.parametrize("small_batch", [0, 500])
def test_a_row_that_is_replaced_at_once_is_sent_where_that_is_asked_for(
    small_batch: int, work: Connection, make_table: MakeTable
) -> None:
    """Also where a value of another unique column goes from row to row meanwhile."""
    table = make_table("(a int PRIMARY KEY, b int UNIQUE CHECK (b <> 13))")
    options: dict[str, Any] = {"mode": "upsert", "small_batch": small_batch}
    moves = [(1, 1), (1, 2), (2, 1), (2, 3), Tombstone((1,)), (1, 1), Tombstone((2,)), (3, 3)]
    assert TableWriter(table, **options, sends_each=True).write(work, moves) == 8
    assert rows_of(work, table) == [(1, 1), (3, 3)]
    assert TableWriter(table, **options).write(work, [(4, 13), (4, 4)]) == 1
    with pytest.raises(BadRow, match="violates check constraint"):
        TableWriter(table, **options, sends_each=True).write(work, [(5, 13), (5, 5)])


@pytest.mark.parametrize("kind", ["ext.citext", "ext.folded"])
def test_keys_and_ages_compare_as_the_index_does_where_their_schema_is_not_on_the_path(
    kind: str, work: Connection, name: str
) -> None:
    schema = f"{name}_ext"
    work.execute(f"CREATE SCHEMA {schema}; DROP EXTENSION IF EXISTS citext; CREATE EXTENSION citext SCHEMA {schema}")
    work.execute(f"CREATE DOMAIN {schema}.folded AS {schema}.citext")
    kind = kind.replace("ext", schema, 1)
    work.execute(f"CREATE TEMP TABLE folded (k {kind} PRIMARY KEY, age {kind}, v int) ON COMMIT DROP")
    writer = TableWriter("folded", mode="upsert", newest_by="age")
    for change in (("A", "a", 1), ("a", "B", 2), ("a", "A", 3)):
        writer.write(work, [change])
    assert work.execute("SELECT k::text, age::text, v FROM folded").fetchall() == [("A", "B", 2)]
    writer.write(work, [Tombstone(("a",))])
    assert work.execute("SELECT FROM folded").fetchall() == []
    assert writer.missed_deletes == 0


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(versions=st.lists(st.none() | st.tuples(numbers, numbers), min_size=1, max_size=6))
def test_the_newest_is_the_same_in_one_batch_where_a_part_of_what_tells_is_null(
    versions: list[tuple[int | None, int | None] | None], work: Connection
) -> None:
    with work.transaction(force_rollback=True):
        work.execute("CREATE TYPE pg_temp.version AS (major int, minor int)")
        changes = [(1, version, n) for n, version in enumerate(versions)]
        found = []
        for name, batches in (("at_once", [changes]), ("one_by_one", [[change] for change in changes])):
            work.execute(f"CREATE TEMP TABLE {name} (id int PRIMARY KEY, version pg_temp.version, n int)")
            writer = TableWriter(name, mode="upsert", newest_by="version")
            for batch in batches:
                writer.write(work, batch)
            found.append(rows_of(work, name))
        assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["serial", "int GENERATED BY DEFAULT AS IDENTITY", "int DEFAULT 7"])
@pytest.mark.parametrize("mode", ["upsert", "insert-ignore"])
def test_a_row_without_its_key_is_refused_also_where_the_table_would_make_one(
    mode: Literal["upsert", "insert-ignore"], kind: str, work: Connection, make_table: MakeTable
) -> None:
    table = make_table(f"(id {kind} PRIMARY KEY, x text)")
    with pytest.raises(BadRow, match=r"^row 1: column id: the key has no value$"):
        TableWriter(table, mode=mode, missing="default").write(work, [(1, "a"), (MISSING, "b"), (2, "c")])


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("options", [{"mode": "insert-ignore"}, {"newest_by": "age"}, {"update": []}])
def test_rows_that_the_table_had_already_or_newer_are_counted(
    options: dict[str, Any], size: int, work: Connection, make_table: MakeTable
) -> None:
    table = make_table("(id int PRIMARY KEY, age int)")
    writer = TableWriter(table, **{"mode": "upsert", **options})
    rows = [(number, 5) for number in range(size)]
    assert writer.write(work, rows) == size
    assert writer.write(work, [*((number, 4) for number in range(size)), (size, 5)]) == 1
    assert writer.ignored_rows == size
    assert work.execute(f"SELECT count(*), min(age) FROM {table}").fetchone() == (size + 1, 5)


@pytest.mark.parametrize("size", [1, 2])
def test_the_hour_that_comes_twice_in_a_time_zone_is_two(size: int, work: Connection) -> None:
    """Python compares the clock of two times of one zone, and not when they are."""
    summer, winter = (datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=fold) for fold in (0, 1))
    earlier_clock = winter.replace(minute=15)
    work.execute("CREATE TEMP TABLE hours (at timestamptz PRIMARY KEY, v int) ON COMMIT DROP")
    work.execute("CREATE TEMP TABLE newest (id int PRIMARY KEY, at timestamptz, v int) ON COMMIT DROP")
    changes: list[tuple[str, dict[str, Any], list[Any]]] = [
        ("hours", {}, [(summer, 1), (winter, 2)]),
        ("newest", {"newest_by": "at"}, [(1, earlier_clock, 2), (1, summer, 1)]),
    ]
    for table, options, rows in changes:
        writer = TableWriter(table, mode="upsert", **options)
        for start in range(0, len(rows), size):
            writer.write(work, rows[start : start + size])
    assert work.execute("SELECT v FROM hours ORDER BY at").fetchall() == [(1,), (2,)]
    assert work.execute("SELECT v FROM newest").fetchall() == [(2,)]


@pytest.mark.parametrize("other", ["2026-01-01T00:00:00Z", "infinity"])
@pytest.mark.parametrize("way", [{"mode": "append"}, {"mode": "upsert"}, {"mode": "upsert", "small_batch": 0}])
def test_zones_of_16_hours_and_more_are_stored_in_each_way(way: Any, other: str, work: Connection) -> None:
    """Python has them, and the text that Postgres reads has not; a value such as infinity has others go as text."""
    work.execute("SET LOCAL TimeZone = 'UTC'")
    work.execute("CREATE TEMP TABLE far (id int PRIMARY KEY, at timestamptz, all_at timestamptz[]) ON COMMIT DROP")
    far = datetime(2026, 1, 2, 12, tzinfo=timezone(timedelta(hours=-16, minutes=-30)))
    last = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone(timedelta(hours=23)))
    writer = TableWriter("far", **way)
    writer.write(work, [(1, far, [far]), (2, other, [other]), (3, last, None)])
    found = work.execute("SELECT at::text, all_at::text FROM far WHERE id <> 2 ORDER BY id").fetchall()
    stored = "2026-01-03 04:30:00+00"
    assert found == [(stored, f'{{"{stored}"}}'), ("9999-12-31 00:59:59+00", None)]


@pytest.mark.parametrize(
    ("kind", "forms"),
    [
        ("numeric", ["1.0", "1.00", "1"]),
        ("numeric(6,2)", ["1.0", "1.00", "1"]),
        ("jsonb", ["1.0", "1", "1.00"]),
        ("interval", ["24 hours", "1 day", "86400 seconds"]),
    ],
)
def test_a_key_is_stored_as_it_was_written_first_however_changes_are_cut(
    kind: str, forms: list[str], work: Connection, make_table: MakeTable
) -> None:
    for middle in ((forms[1], 2), Tombstone((forms[1],))):
        found = []
        for size in (1, 3):
            table = make_table(f"(k {kind} PRIMARY KEY, v int)")
            writer = TableWriter(table, mode="upsert")
            stream: list[Any] = [(forms[0], 1), middle, (forms[2], 3)]
            for start in range(0, 3, size):
                writer.write(work, stream[start : start + size])
            found += work.execute(f"SELECT k::text, v FROM {table}").fetchall()
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "why"),
    [({"update": ["v"]}, "update leaves at as it is"), ({"update": ["v", "at"], "add": ["at"]}, "add makes at a sum")],
)
def test_a_version_that_changes_do_not_store_is_refused(options: dict[str, Any], why: str) -> None:
    """Changes would be compared with what a row was first, and what is left would depend on how batches are cut."""
    with pytest.raises(ConfigurationError, match=why):
        TableWriter("t", mode="upsert", newest_by="at", **options)


@pytest.mark.parametrize("small_batch", [0, 100])
@pytest.mark.parametrize("gap", [MISSING, UNAVAILABLE])
def test_a_column_that_takes_no_null_keeps_what_it_has(
    gap: Any, small_batch: int, work: Connection, make_table: MakeTable
) -> None:
    """Though Postgres looks for nulls before it looks whether the row is there."""
    table = make_table('(id int, "a %" text, v text NOT NULL, w date NOT NULL, n int, PRIMARY KEY (id, "a %"))')
    work.execute(f"INSERT INTO {table} VALUES (1, 'a', 'v1', '2026-01-01', 1), (2, 'a', 'v2', '2026-01-02', 2)")
    writer = TableWriter(table, mode="upsert", missing="keep", small_batch=small_batch)
    writer.write(work, [(1, "a", gap, gap, 5), (2, "a", "new", gap, 6), (1, "a", gap, date(2026, 2, 1), gap)])
    assert rows_of(work, table) == [
        (1, "a", "v1", date(2026, 2, 1), 5),
        (2, "a", "new", date(2026, 1, 2), 6),
    ]
    with pytest.raises(BadRow), work.transaction():
        writer.write(work, [(3, "a", gap, date(2026, 1, 1), 5)])


@pytest.mark.parametrize(
    ("kind", "text", "stored"),
    [
        ("interval year to month", "5", "5 mons"),
        ("interval minute to second", "1:30", "00:01:30"),
        ("interval hour to minute", "1:30", "01:30:00"),
        ("interval day to second(1)", "2.26", "00:00:02.3"),
        ("interval year to month[]", "{5,NULL}", '{"5 mons",NULL}'),
    ],
)
def test_the_fields_of_an_interval_say_what_a_number_means(
    kind: str, text: str, stored: str, work: Connection, make_table: MakeTable
) -> None:
    """As the input of the column reads it; a cast of text reads seconds, and then drops them. As a key, too."""
    domain = f"{make_table('()')}_domain"
    work.execute(f"CREATE DOMAIN {domain} AS {kind}")
    work.commit()
    for type_name in (kind, domain):
        table = make_table(f"(k {type_name} PRIMARY KEY, v {type_name})")
        for small_batch in (500, 0):
            writer = TableWriter(table, mode="upsert", small_batch=small_batch)
            assert writer.write(work, [(text, text), (text, text)]) == 1
            assert work.execute(f"SELECT k::text, v::text FROM {table}").fetchall() == [(stored, stored)]
            assert writer.write(work, [Tombstone((text,))]) == 1
    work.execute(f"DROP DOMAIN {domain} CASCADE")
    work.commit()
