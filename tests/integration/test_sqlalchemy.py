"""SQLAlchemy, in both ways that docs/how-to/sqlalchemy.md shows, and the traps that it names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
import sqlalchemy
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import StaticPool

from exactly_once import ExactlyOnceConsumer, TransactionNotYours, Unit
from exactly_once.ledger.dead_letters import find
from exactly_once.testing import message, unit
from tests.integration.scene import Scene
from tests.support.worker import record

EXAMPLE = Path(__file__).parents[2] / "examples" / "sqlalchemy_app"
DRIVER = "postgresql+psycopg://"


class Base(DeclarativeBase):
    pass


class Number(Base):
    """Even numbers are refused by a constraint of the table."""

    __tablename__ = "sqlalchemy_number"
    __table_args__ = (sqlalchemy.CheckConstraint("value <> 4"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int]


class Shared(NamedTuple):
    """What the example has for others to copy."""

    engine: sqlalchemy.Engine
    connect: Callable[[], psycopg.Connection[Any]]
    session_in: Callable[[Unit], AbstractContextManager[Session]]
    both: dict[psycopg.Connection[Any], sqlalchemy.Connection]


@pytest.fixture
def shared(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    """The example's own code, on this test's database."""
    url = "postgresql://{user}:{password}@{host}:{port}/{dbname}".format(
        **{"password": "", **conninfo_to_dict(scene.conninfo)}
    )
    monkeypatch.setenv("EXACTLY_ONCE_CONNINFO", url)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import units  # type: ignore[import-not-found]  # noqa: PLC0415 - found only now

    engine = units.engine
    Base.metadata.create_all(engine)
    yield Shared(engine, units.connect, units.session_in, units._shared)
    Base.metadata.drop_all(engine)
    engine.dispose()
    for name in ("units", "models"):
        del sys.modules[name]


def add(session: Session, messages: Any) -> None:
    session.add_all([Number(value=int(each.value() or b"")) for each in messages])


def values(shared: Shared) -> list[int]:
    with Session(shared.engine) as session:
        return sorted(session.scalars(sqlalchemy.select(Number.value)))


def dead(scene: Scene) -> list[int]:
    with psycopg.connect(scene.conninfo) as connection:
        return [letter.message_offset for letter in find(connection, schema="exactly_once", group_id=scene.topic)]


def run(scene: Scene, shared: Shared, handler: Callable[[Unit], object], **options: Any) -> None:
    scene.consumer(connect=shared.connect).run(handler, until_end=True, on_poison="dead-letter", **options)


@pytest.mark.parametrize("in_thread", [False, True])
def test_session_writes_in_the_unit_and_what_the_server_refuses_is_found(
    scene: Scene, shared: Shared, *, in_thread: bool
) -> None:
    """The error comes wrapped by SQLAlchemy, and is still known as the message's fault."""

    def handler(u: Unit) -> None:
        record(u, "test")
        with shared.session_in(u) as session:
            add(session, u.messages)

    run(scene, shared, handler, in_thread=in_thread)
    assert dead(scene) == [4]
    assert values(shared) == scene.applied() == [n for n in range(20) if n != 4]


def test_commit_and_rollback_of_the_session_are_savepoints(scene: Scene, shared: Shared) -> None:
    def handler(u: Unit) -> None:
        with shared.session_in(u) as session:
            session.add(Number(value=4))
            session.rollback()
            add(session, [each for each in u.messages if each.value() != b"4"])
            session.commit()
            record(u, "test")

    run(scene, shared, handler)
    scene.assert_exact()
    assert values(shared) == [n for n in range(20) if n != 4]


@pytest.mark.parametrize("undo", [Session.rollback, Session.close])
def test_what_a_session_of_one_message_undoes_is_that_message(
    undo: Callable[[Session], None], scene: Scene, shared: Shared
) -> None:
    def handler(u: Unit) -> None:
        record(u, "test")
        for each in u.messages:
            with shared.session_in(u) as session:
                add(session, [each])
                try:
                    session.flush()
                except sqlalchemy.exc.IntegrityError:
                    undo(session)

    run(scene, shared, handler)
    scene.assert_exact()
    assert values(shared) == [n for n in range(20) if n != 4]


def test_lost_connection_is_replaced_and_the_unit_comes_again(scene: Scene, shared: Shared) -> None:
    lost: list[int] = []

    def handler(u: Unit) -> None:
        with shared.session_in(u) as session:
            if not lost:
                lost.append(u.connection.info.backend_pid)
                scene.query(f"SELECT pg_terminate_backend({lost[0]})")
            add(session, [each for each in u.messages if each.value() != b"4"])
            session.flush()
            record(u, "test")

    run(scene, shared, handler)
    assert lost
    assert dead(scene) == []
    scene.assert_exact()
    assert values(shared) == [n for n in range(20) if n != 4]


def test_joined_session_commits_or_rolls_back_effects_and_offsets_together(scene: Scene, shared: Shared) -> None:
    consumer: ExactlyOnceConsumer = scene.consumer()
    attempts: list[int] = []
    for u in consumer.units(until_end=True):
        attempts.append(u.attempt)
        with Session(shared.engine) as session, session.begin() as transaction:
            with u.join(session.connection().connection.driver_connection):  # type: ignore[arg-type]
                record(u, "test")
                add(session, [each for each in u.messages if each.value() != b"4"])
                session.flush()
            if len(attempts) == 1:
                transaction.rollback()
    assert attempts[:2] == [1, 2]
    scene.assert_exact()
    assert values(shared) == [n for n in range(20) if n != 4]


# Traps.


def engine_on(u: Unit) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(
        DRIVER, creator=lambda: u.connection, poolclass=StaticPool, pool_reset_on_return=None
    )


def test_first_connection_of_a_new_engine_cannot_roll_the_unit_back(scene: Scene) -> None:
    def handler(u: Unit) -> None:
        record(u, "test")
        with engine_on(u).connect():
            pass

    with (
        psycopg.connect(scene.conninfo) as own,
        pytest.raises(TransactionNotYours, match=r"rollback\(\)"),
        unit(own, [message(scene.topic)]) as u,
    ):
        handler(u)


def test_engine_that_was_initialised_before_leaves_the_unit_alone(scene: Scene, shared: Shared) -> None:
    with shared.connect() as own, unit(own, [message(scene.topic)]) as u:
        record(u, "test")
        with shared.session_in(u) as session:
            statement = sqlalchemy.text("SELECT count(*) FROM journal.entries WHERE topic = :topic")
            assert session.scalar(statement, {"topic": scene.topic}) == 1


def test_session_without_an_outer_transaction_cannot_commit_the_unit(scene: Scene, shared: Shared) -> None:
    def handler(u: Unit) -> None:
        with Session(shared.both[u.connection]) as session:
            session.add(Number(value=1))
            session.commit()

    with (
        shared.connect() as own,
        pytest.raises(TransactionNotYours, match=r"commit\(\)"),
        unit(own, [message(scene.topic)]) as u,
    ):
        handler(u)
