"""Django, in both ways that docs/how-to/django.md shows, and the traps that it names.

Django is set up once for a process, so each test runs a program of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.integration.scene import Scene

EXAMPLE = Path(__file__).parents[2] / "examples" / "django_app"

BEFORE = """
    import os
    import django, psycopg
    from django.core.management import call_command
    from django.db import connection, transaction
    from exactly_once import ExactlyOnceConsumer, TransactionNotYours
    from exactly_once.testing import message, unit
    django.setup()
    call_command("migrate", "--run-syncdb", verbosity=0)
    from votes.models import Poll

    SERVERS, NAME = {servers!r}, {name!r}
    KAFKA = {{"bootstrap.servers": SERVERS, "group.id": NAME}}
    polls = lambda: list(Poll.objects.order_by("name").values_list("name", "votes"))
    Poll.objects.all().delete()
"""


@pytest.fixture(autouse=True)
def _without_tables_afterwards(conninfo: str) -> Iterator[None]:
    yield
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS votes_vote, votes_poll, django_migrations")


def run(program: str, scene: Scene) -> str:
    """Run a program with Django set up for the example's models; return what it printed."""
    url = "postgresql://{user}:{password}@{host}:{port}/{dbname}".format(
        **{"password": "", **conninfo_to_dict(scene.conninfo)}
    )
    before = textwrap.dedent(BEFORE).format(servers=scene.bootstrap_servers, name=scene.topic)
    done = subprocess.run(
        [sys.executable, "-c", before + textwrap.dedent(program)],
        cwd=EXAMPLE,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "settings",
            "EXACTLY_ONCE_BOOTSTRAP_SERVERS": scene.bootstrap_servers,
            "EXACTLY_ONCE_CONNINFO": url,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_joined_atomic_block_commits_or_rolls_back_effects_and_offsets_together(scene: Scene) -> None:
    """With nested blocks, hooks, and an attempt that is rolled back."""
    printed = run(
        """
        hooks, attempts = [], []
        with ExactlyOnceConsumer(KAFKA, conninfo=os.environ["EXACTLY_ONCE_CONNINFO"], max_messages=10) as consumer:
            consumer.subscribe([NAME])
            for u in consumer.units(until_end=True):
                attempts.append(u.attempt)
                with transaction.atomic():
                    with u.join(connection.connection):
                        for m in u.messages:
                            with transaction.atomic():
                                Poll.objects.create(name=m.value().decode())
                        transaction.on_commit(lambda: hooks.append(len(u.messages)))
                    if len(attempts) == 1:
                        transaction.set_rollback(True)
        assert attempts[:2] == [1, 2], attempts
        assert sum(hooks) == 20, hooks
        assert sorted(int(name) for name, _ in polls()) == list(range(20))
        print("done")
        """,
        scene,
    )
    assert printed == "done\n"
    assert scene.ledger("next_offset") == [20]


def test_units_transaction_has_savepoints_for_atomic_and_finds_poison(scene: Scene) -> None:
    """A name that is there already is refused by the server; Django wraps the error."""
    run(
        """
        from after_connect import connect
        Poll.objects.create(name="7")

        def handler(u):
            for m in u.messages:
                with transaction.atomic():
                    Poll.objects.create(name=m.value().decode())
            assert connection.connection is u.connection

        with ExactlyOnceConsumer(KAFKA, connect=connect) as consumer:
            consumer.subscribe([NAME])
            consumer.run(handler, on_poison="dead-letter", until_end=True)
        """,
        scene,
    )
    dead = scene.query("SELECT message_offset, sqlstate FROM exactly_once.dead_letter WHERE group_id = %s")
    assert dead == [(7, "23505")]
    assert scene.query("SELECT count(DISTINCT name), count(*) FROM votes_poll") == [(20, 20)]
    assert scene.ledger("next_offset") == [20]


TRAPS = {
    "atomic() under a foreign BEGIN": """
        connection.ensure_connection()
        with unit(connection.connection, [message("t")], unused_ok=True):
            for start in (transaction.atomic().__enter__, lambda: Poll.objects.get_or_create(name="x")):
                try:
                    start()
                except TransactionNotYours as error:
                    assert "autocommit on the connection of an open unit" in str(error), error
                else:
                    raise AssertionError("it worked")
    """,
    "hooks never run in the unit's transaction": """
        from after_connect import connect
        hooks = []
        with unit(connect(), [message("t")]):
            with transaction.atomic():
                Poll.objects.create(name="x")
                transaction.on_commit(lambda: hooks.append(1))
        assert hooks == []
    """,
    "a connection is not closed inside a unit": """
        from after_connect import connect
        try:
            with unit(connect(), [message("t")]):
                Poll.objects.create(name="x")
                connection.close()
        except TransactionNotYours:
            assert polls() == []
        else:
            raise AssertionError("nobody noticed")
    """,
}


@pytest.mark.parametrize("trap", TRAPS)
def test_trap_is_as_the_how_to_says(trap: str, scene: Scene) -> None:
    run(TRAPS[trap], scene)
