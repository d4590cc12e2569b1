"""Batches whose error the user's own function has caught, so that Spark counts them as done: never lost in silence."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from exactly_once.cli import main
from exactly_once.errors import ConfigurationError
from spark_sink import PostgresSink
from tests.spark.scene import JOURNAL, MODES, Scene, Sink, each_mode
from tests.spark.source import write_stream

Db = psycopg.Connection[Any]
LARGE = {mode: options for mode, options in MODES.items() if mode != "small"}
each_large = pytest.mark.parametrize("options", LARGE.values(), ids=LARGE)
"""Without small batches: who writes them notes a failure where the others do, as the first test shows in each mode."""


@pytest.fixture
def strict(name: str, db: Db) -> Iterator[str]:
    """A table that refuses a message of the second batch of ten."""
    db.execute(f'CREATE TABLE {name} (LIKE {JOURNAL} INCLUDING ALL, CONSTRAINT odd CHECK ("offset" <> 7))')
    yield name
    db.execute(f"DROP TABLE {name}")


def catching(sink: PostgresSink, *, only: int | None = None, caught: list[Exception] | None = None) -> Sink:
    """What a user writes who wants the query to go on whatever happens."""

    def write(frame: Any, batch_id: int) -> None:
        try:
            sink(frame, batch_id)
        except Exception as error:
            if only not in (None, batch_id):
                raise
            (caught if caught is not None else []).append(error)

    return write


def written(db: Db, table: str) -> list[int]:
    return [row[0] for row in db.execute(f'SELECT "offset" FROM {table} ORDER BY 1').fetchall()]


def twice(*ranges: range) -> list[int]:
    """Offsets as both partitions have them."""
    return sorted(2 * [offset for each in ranges for offset in each])


def leave_out(scene: Scene, said: str) -> None:
    """Run the commands that an error names."""
    commands = re.findall(r"exactly-once (reset [^;\n]*(?:\d|earliest))", said)
    assert commands, said
    where = ["--conninfo", scene.conninfo, "--bootstrap-servers", scene.bootstrap_servers, "--execute"]
    for command in commands:
        assert main([*shlex.split(command), *where]) == 0, command


def refused(run: Callable[[], object], first: int, last: int) -> str:
    with pytest.raises(
        Exception, match=f"batch {first} failed and was not written since, .* with batch {last}: "
    ) as it:
        run()
    return str(it.value)


@pytest.mark.fault("F13", more=True)
@each_mode
def test_the_batch_behind_one_whose_error_was_caught_is_refused_at_each_start(
    scene: Scene, strict: str, db: Db, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Also at the second and the third, by the first failure and not by the refusals that follow it; each is logged."""
    scene.produce(40)
    caught: list[Exception] = []
    sink = scene.sink(table=strict, **options)
    said = refused(lambda: scene.run(catching(sink, only=1, caught=caught), per_trigger=10), 1, 2)
    assert len(caught) == 1
    assert "odd" in said
    told = [record for record in caplog.records if getattr(record, "action", "") == "batch_failed"]
    assert [(record.levelname, vars(record)["batch_id"]) for record in told] == [("ERROR", 1), ("ERROR", 2)]
    assert "odd" in told[0].getMessage()
    before = written(db, strict)
    assert set(twice(range(5))) <= set(before) <= set(range(10)) - {7}
    for _ in range(2):
        said = refused(lambda: scene.run(scene.sink(table=strict, **options), per_trigger=10), 1, 2)
        assert "odd" in said
    assert written(db, strict) == before
    leave_out(scene, said)
    scene.run(scene.sink(table=strict, **options), per_trigger=10)
    assert written(db, strict) == sorted([*before, *twice(range(10, 20))])


@pytest.mark.parametrize("is_named", [False, True])
def test_a_call_without_the_frames_that_it_needs_is_such_an_error(scene: Scene, is_named: bool) -> None:  # noqa: FBT001
    """A sink with several tables that is called with one frame, and a call of write() without any."""
    sink = scene.sink(table=None, tables={JOURNAL: {}})

    def write(frame: Any, batch_id: int) -> None:
        if batch_id > 0:
            sink.write({JOURNAL: frame}, batch_id)
            return
        with contextlib.suppress(ConfigurationError):
            if is_named:
                sink.write({}, batch_id)
            else:
                sink(frame, batch_id)

    scene.produce(20)
    said = refused(lambda: scene.run(write, per_trigger=10), 0, 1)
    assert f"the sink writes '{JOURNAL}', and was given frames for" in said
    leave_out(scene, said)
    scene.run(write, per_trigger=10)
    scene.lose_checkpoint()
    assert set(scene.ledger().values()) == {10}


@each_large
def test_where_all_errors_are_caught_nothing_goes_on(
    scene: Scene, strict: str, db: Db, options: dict[str, Any]
) -> None:
    scene.produce(40)
    caught: list[Exception] = []
    scene.run(catching(scene.sink(table=strict, **options), caught=caught), per_trigger=10)
    assert len(caught) == 3
    before = written(db, strict)
    db.execute(f"ALTER TABLE {strict} DROP CONSTRAINT odd")
    scene.produce(10)
    said = refused(lambda: scene.run(scene.sink(table=strict, **options)), 1, 4)
    assert written(db, strict) == before
    leave_out(scene, said)
    scene.run(scene.sink(table=strict, **options))
    assert written(db, strict) == sorted([*before, *twice(range(20, 25))])


@each_large
def test_what_fails_before_the_ledger_has_a_row_is_refused_as_well(
    scene: Scene, name: str, db: Db, options: dict[str, Any]
) -> None:
    """There the sink would otherwise begin where the query stands, as for one that wrote elsewhere before."""
    scene.produce(20)
    caught: list[Exception] = []
    scene.run(catching(scene.sink(table=name, **options), caught=caught), per_trigger=10)
    assert len(caught) == 2
    db.execute(f"CREATE TABLE {name} (LIKE {JOURNAL} INCLUDING ALL)")
    try:
        scene.produce(10)
        for _ in range(2):
            said = refused(lambda: scene.run(scene.sink(table=name, **options)), 0, 2)
        assert written(db, name) == []
        leave_out(scene, said)
        scene.run(scene.sink(table=name, **options))
        assert written(db, name) == twice(range(10, 15))
    finally:
        db.execute(f"DROP TABLE {name}")


@pytest.mark.fault("F13")
def test_a_database_that_cannot_be_reached_is_such_an_error(scene: Scene, db: Db) -> None:
    scene.produce(10)
    caught: list[Exception] = []
    away = PostgresSink("host=127.0.0.1 port=1", table=JOURNAL, group_id=scene.topic, patience_seconds=0)
    scene.run(catching(away, caught=caught))
    assert len(caught) == 1
    scene.produce(10)
    refused(scene.run, 0, 1)


@each_large
def test_a_batch_that_failed_and_came_again_is_forgotten(
    scene: Scene, strict: str, db: Db, options: dict[str, Any]
) -> None:
    """A batch behind it that the user's function leaves out is nobody's failure."""
    scene.produce(20)
    with pytest.raises(Exception, match="odd"):
        scene.run(scene.sink(table=strict, **options), per_trigger=10)
    db.execute(f"ALTER TABLE {strict} DROP CONSTRAINT odd")
    scene.run(scene.sink(table=strict, **options), per_trigger=10)
    scene.produce(10)
    scene.run(lambda _frame, _batch_id: None)
    scene.produce(10)
    scene.run(scene.sink(table=strict, **options))
    assert written(db, strict) == twice(range(10), range(15, 20))


@pytest.mark.parametrize(("before", "now"), [("batch-id", "batch"), ("batch", "batch-id")])
def test_what_failed_under_another_kind_of_ledger_is_refused_as_well(
    scene: Scene, strict: str, db: Db, before: str, now: str
) -> None:
    """Nothing was written yet, else the other kind itself would be refused; so to it the query is a new one."""
    scene.produce(20)
    scene.run(catching(scene.sink(table=strict, **MODES[before])))
    scene.produce(10)
    said = refused(lambda: scene.run(scene.sink(table=strict, **MODES[now])), 0, 1)
    assert written(db, strict) == []
    leave_out(scene, said)
    scene.run(scene.sink(table=strict, **MODES[now]))
    assert written(db, strict) == twice(range(10, 15))


def test_a_failure_behind_one_that_was_left_out_is_named_itself(scene: Scene, strict: str, db: Db) -> None:
    scene.produce(20)
    scene.run(catching(scene.sink(table=strict)), per_trigger=10)
    scene.produce(10)
    leave_out(scene, refused(lambda: scene.run(scene.sink(table=strict)), 1, 2))
    db.execute(f'ALTER TABLE {strict} ADD CONSTRAINT other CHECK ("offset" <> 12)')
    scene.run(catching(scene.sink(table=strict)))
    scene.produce(10)
    assert "other" in refused(lambda: scene.run(scene.sink(table=strict)), 2, 3)


def test_a_ledger_that_was_set_back_is_not_laid_to_the_function(scene: Scene, strict: str, db: Db) -> None:
    scene.produce(30)
    scene.run(catching(scene.sink(table=strict)), per_trigger=10)
    db.execute("UPDATE exactly_once.ledger SET next_offset = 3 WHERE group_id = %s", (scene.topic,))
    scene.produce(10)
    with pytest.raises(Exception, match="database was set back") as it:
        scene.run(scene.sink(table=strict))
    assert "foreachBatch" not in str(it.value)


def test_the_error_of_a_batch_is_raised_where_nothing_can_be_noted(scene: Scene, strict: str) -> None:
    """And the run that has seen it refuses the next batch all the same."""
    scene.produce(30)
    caught: list[Exception] = []
    scene.checkpoint.mkdir()
    (scene.checkpoint / "exactly_once").write_text("no directory")
    sink = scene.sink(table=strict)

    def write(frame: Any, batch_id: int) -> None:
        if batch_id:
            catching(sink, only=1, caught=caught)(frame, batch_id)

    refused(lambda: scene.run(write, per_trigger=10), 1, 2)
    (error,) = caught
    assert "odd" in str(error)
    assert isinstance(error.__context__, OSError)


def test_an_error_of_the_data_source_cannot_be_caught(scene: Scene, strict: str, db: Db) -> None:
    """No function of the user's stands between; the batch comes again at each start until it is written."""
    scene.produce(30)
    for _ in range(2):
        with pytest.raises(Exception, match="odd"):
            write_stream(scene, table=strict, per_trigger=10)
    assert written(db, strict) == twice(range(5))
    db.execute(f"ALTER TABLE {strict} DROP CONSTRAINT odd")
    write_stream(scene, table=strict, per_trigger=10)
    assert written(db, strict) == twice(range(15))
