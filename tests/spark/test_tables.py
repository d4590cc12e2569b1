"""Which table a group writes, and what a query with a new checkpoint finds there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.spark.scene import JOURNAL, Scene
from tests.spark.source import write_stream


@pytest.fixture
def other(name: str, db: psycopg.Connection[Any]) -> Iterator[str]:
    """Another table like the journal's."""
    db.execute(f"CREATE TABLE {name} (LIKE {JOURNAL} INCLUDING ALL)")
    yield name
    db.execute(f"DROP TABLE {name}")


def test_a_group_that_writes_another_table_than_before_is_refused(
    scene: Scene, other: str, db: psycopg.Connection[Any]
) -> None:
    count = f"SELECT count(*) FROM {other}"
    scene.produce(10)
    db.execute(f"ALTER TABLE {other} ADD CONSTRAINT nothing CHECK (false)")
    with pytest.raises(Exception, match="nothing"):
        scene.run(scene.sink(table=other))
    scene.lose_checkpoint()
    scene.run()  # into the journal: nothing was written there
    scene.check()
    scene.lose_checkpoint()
    db.execute(f"ALTER TABLE {other} DROP CONSTRAINT nothing")
    with pytest.raises(Exception, match=rf"ConfigurationError.*{JOURNAL}(.|\n)*previous_table='{JOURNAL}'"):
        scene.run(scene.sink(table=other))
    scene.lose_checkpoint()
    with pytest.raises(Exception, match=rf"ConfigurationError.*{JOURNAL}"):
        write_stream(scene, table=other)
    assert db.execute(count).fetchone() == (0,)
    scene.lose_checkpoint()
    scene.produce(10)
    for _ in range(2):  # left in the program
        scene.run(scene.sink(table=other, previous_table=JOURNAL))
        assert db.execute(count).fetchone() == (10,)


@pytest.fixture
def moving(scene: Scene, name: str, db: psycopg.Connection[Any]) -> Iterator[str]:
    """A table of a role; as soon as it is written to, new sessions of the role find another one under its name."""
    db.execute(f"CREATE SCHEMA {name}_other; CREATE TABLE public.{name} (LIKE {JOURNAL} INCLUDING ALL)")
    db.execute(f"CREATE TABLE {name}_other.{name} (LIKE {JOURNAL} INCLUDING ALL)")
    db.execute(f"CREATE ROLE {name} SUPERUSER LOGIN PASSWORD '{name}'")
    db.execute(
        f"""CREATE FUNCTION {name}_other.move() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN ALTER ROLE {name} SET search_path = {name}_other, public; RETURN NULL; END $$"""
    )
    db.execute(f"CREATE TRIGGER t AFTER INSERT ON public.{name} EXECUTE FUNCTION {name}_other.move()")
    scene.conninfo = make_conninfo(scene.conninfo, user=name, password=name)
    yield name
    db.execute(f"DROP TABLE public.{name}; DROP SCHEMA {name}_other CASCADE; DROP ROLE {name}")


@pytest.mark.parametrize("options", [{}, {"transaction": "partition"}, {"small_batch": 1000}])
def test_a_run_writes_the_table_that_it_began_with(
    scene: Scene, moving: str, db: psycopg.Connection[Any], options: dict[str, Any]
) -> None:
    """Each task has a session of its own."""
    scene.produce(10)
    scene.run(scene.sink(table=moving, **options), per_trigger=2)
    assert db.execute(f"SELECT count(*) FROM public.{moving}").fetchone() == (10,)
    scene.produce(2)
    with pytest.raises(Exception, match=rf"has written into public.{moving}, now the table is {moving}_other.{moving}"):
        scene.run(scene.sink(table=moving, **options))
    assert db.execute(f"SELECT count(*) FROM {moving}_other.{moving}").fetchone() == (0,)


def test_the_data_source_refuses_another_table_within_a_run(
    scene: Scene, moving: str, db: psycopg.Connection[Any]
) -> None:
    scene.produce(10)
    with pytest.raises(Exception, match=rf"has written into public.{moving}, now the table is {moving}_other.{moving}"):
        write_stream(scene, table=moving, per_trigger=2)
    assert db.execute(f"SELECT count(*) FROM {moving}_other.{moving}").fetchone() == (0,)


def test_a_table_that_was_emptied_is_told(
    scene: Scene, other: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    scene.produce(10)
    for is_empty in (False, False, True):  # at its first start nothing was written
        if is_empty:
            db.execute(f"TRUNCATE {other}")
        caplog.clear()
        scene.run(scene.sink(table=other))
        scene.produce(2)
        told = [r.getMessage() for r in caplog.records if getattr(r, "action", None) == "applied_before"]
        assert [f"{other} is empty, and" in text.replace('"', "") for text in told] == [True] * is_empty


@pytest.mark.parametrize("writes", ["sink", "data source"])
def test_a_table_that_a_crash_would_empty_is_refused(
    scene: Scene, other: str, db: psycopg.Connection[Any], writes: str
) -> None:
    """Its rows would be gone then, and the ledger would still have their offsets."""
    db.execute(f"ALTER TABLE {other} SET UNLOGGED")
    scene.produce(10)
    write = (
        partial(write_stream, scene) if writes == "data source" else lambda table: scene.run(scene.sink(table=table))
    )
    with pytest.raises(Exception, match=rf"TableError.*{other}.* is unlogged.*SET LOGGED"):
        write(table=other)
    db.execute(f"ALTER TABLE {other} SET LOGGED")
    write(table=other)
    assert db.execute(f"SELECT count(*) FROM {other}").fetchone() == (10,)


@pytest.mark.parametrize(("new", "per_trigger", "end"), [(0, 10, 5), (10, None, 10)])
def test_a_new_checkpoint_that_brings_what_is_written_is_told_once(
    scene: Scene, caplog: pytest.LogCaptureFixture, new: int, per_trigger: int | None, end: int
) -> None:
    """A topic that was made again looks alike, where nobody asks for its id; one that is longer is dropped in part."""
    scene.produce(20)
    scene.run()
    scene.lose_checkpoint()
    scene.produce(new)
    with caplog.at_level(logging.WARNING, "spark_sink"):
        scene.run(per_trigger=per_trigger)
    (told,) = [r for r in caplog.records if getattr(r, "action", None) == "new_checkpoint"]
    assert f"offsets 0 to {end} of {scene.topic}[0], offsets 0 to {end} of {scene.topic}[1]" in told.getMessage()
    scene.check()


@pytest.mark.parametrize("source", [False, True])
@pytest.mark.parametrize("first", ["offsets", "batch-id"])
def test_a_group_that_counts_otherwise_than_before_is_refused(scene: Scene, first: str, source: bool) -> None:  # noqa: FBT001
    """Offsets do not tell which batches were counted, nor batches which offsets were written: rows would come twice."""

    def run(ledger: str) -> None:
        if source:
            write_stream(scene, ledger=ledger)
        else:
            scene.run(scene.sink(ledger=ledger))

    (other,) = {"offsets", "batch-id"} - {first}
    scene.produce(20)
    run(first)
    scene.forget_last_commit()
    if source and first == "offsets":
        run(other)  # the data source counts batches, too
    else:
        with pytest.raises(Exception, match=f"written with ledger='{first}', now it is '{other}'"):
            run(other)
    scene.check()
    scene.lose_checkpoint()
    with pytest.raises(Exception, match=f"written with ledger='{first}', now it is '{other}'|QueryChanged"):
        run(other)
    scene.check()
