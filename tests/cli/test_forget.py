"""``exactly-once reset --forget``: rows of what is gone for good go, and what comes back begins anew."""

# ruff: noqa: PLR0917 - fixtures and parameters are positional

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from exactly_once import LedgerRowMissing
from exactly_once.cli.servers import CommandCluster, stored_rows
from exactly_once.kafka.admin import Topic
from tests.cli.conftest import Command, audit, ledger, offsets, read_to_end, suggested
from tests.conftest import MakeConsumer
from tests.support.topics import add_partitions, create_topic, delete_topic, produce

Db = psycopg.Connection[Any]


def mend(status: str) -> list[str]:
    """The command that `status` names for what is gone."""
    return suggested(status[status.index("exactly-once reset") :])


@pytest.mark.fault("C4", more=True)
def test_a_topic_that_is_gone_for_good_is_forgotten_and_begins_anew_if_it_comes_back(
    operate: Command,
    consumed: str,
    db: Db,
    name: str,
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
) -> None:
    other = create_topic(bootstrap_servers, 1, name=f"{name}-other")
    produce(bootstrap_servers, other, 3, 1)
    assert len(read_to_end(make_consumer, other)) == 3
    delete_topic(bootstrap_servers, consumed)
    checked = operate("status", "--check")
    assert checked.code == 1
    command = mend(checked.out)
    assert operate("adopt", "--topic", consumed, "--to-earliest").err.strip().endswith(" ".join(command))
    before = ledger(db, name)
    dry = operate(*command)
    assert (dry.code, ledger(db, name)) == (0, before)
    assert dry.out.splitlines()[0] == f"group {name}, topic {consumed}, which is gone"
    assert [line.split() for line in dry.out.splitlines()[2:4]] == [["0", "10", "-"], ["1", "10", "-"]]
    assert dry.out.endswith("dry run: nothing was changed; --execute does it\n")
    assert operate(*command, "--reason", "moved house", "--execute").out.endswith("done\n")
    assert audit(db, name, "forget") == [(0, 10, None, "moved house"), (1, 10, None, "moved house")]
    assert len(ledger(db, name)) == 1, "the other topic's"
    assert operate("status", "--check").code == 0
    refused = operate(*command, "--execute")
    assert (refused.code, "nothing to forget" in refused.err) == (1, True)
    create_topic(bootstrap_servers, 2, name=consumed)
    produce(bootstrap_servers, consumed, 6, 2)
    assert read_to_end(make_consumer, consumed) == [(p, o) for p in range(2) for o in range(3)]
    assert operate("status", "--check").code == 0
    # Whoever deletes a row by hand afterwards is told of, as ever.
    db.execute("DELETE FROM exactly_once.ledger WHERE group_id = %s AND topic = %s AND partition = 1", (name, consumed))
    with pytest.raises(LedgerRowMissing, match="it was deleted"):
        read_to_end(make_consumer, consumed)


def test_a_topic_made_again_with_fewer_partitions_is_adopted_and_the_others_forgotten(
    operate: Command, consumed: str, db: Db, name: str, make_consumer: MakeConsumer, bootstrap_servers: str
) -> None:
    delete_topic(bootstrap_servers, consumed)
    create_topic(bootstrap_servers, 1, name=consumed)
    produce(bootstrap_servers, consumed, 7, 1)
    assert f"exactly-once adopt --group-id {name} --topic {consumed}" in operate("status").out
    assert operate("adopt", "--topic", consumed, "--to-earliest", "--execute").code == 0
    assert read_to_end(make_consumer, consumed) == [(0, o) for o in range(7)]
    checked = operate("status", "--check")
    assert (checked.code, checked.out.count("\n")) == (1, 1)
    assert operate(*mend(checked.out), "--execute", "--json").partitions == [
        {"partition": 1, "old_offset": 10, "owner": None, "halted": None}
    ]
    assert operate("status", "--check").code == 0
    # They come later: what arrives before anybody is assigned to them is read, and nothing of the first one again.
    add_partitions(bootstrap_servers, consumed, 3)
    produce(bootstrap_servers, consumed, 6, 3, start=20)
    new = ((7, 8), (0, 1), (0, 1))
    assert read_to_end(make_consumer, consumed, start="latest") == [(p, o) for p in range(3) for o in new[p]]
    assert offsets(db, name) == [9, 2, 2]


def test_what_is_there_is_not_forgotten(operate: Command, consumed: str, db: Db, name: str) -> None:
    before = ledger(db, name)
    for more, complaint, code in (
        ((), "nothing to forget", 1),
        (("--force",), "nothing to forget", 1),
        (("--partition", 1), "leave out --partition", 2),
    ):
        refused = operate("reset", "--topic", consumed, "--forget", "--execute", *more)
        assert (refused.code, complaint in refused.err) == (code, True)
    assert ledger(db, name) == before


def test_where_kafka_cannot_be_asked_nothing_is_forgotten(
    command: Command, consumed: str, db: Db, conninfo: str, name: str
) -> None:
    before = ledger(db, name)
    where = ("--conninfo", conninfo, "--group-id", name, "--topic", consumed, "--forget", "--execute")
    assert command("reset", *where).code == 2, "no brokers are named"
    refused = command("reset", *where, "--bootstrap-servers", "127.0.0.1:1", "--force")
    assert (refused.code, "127.0.0.1:1" in refused.err) == (1, True)
    assert ledger(db, name) == before


def test_rows_of_another_cluster_need_force(operate: Command, db: Db, name: str) -> None:
    """From there a topic of this cluster would look as if it was gone."""
    db.execute(
        "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset, cluster_id) "
        "VALUES (%s, 'elsewhere', 0, 5, 'another')",
        (name,),
    )
    refused = operate("reset", "--topic", "elsewhere", "--forget", "--execute")
    assert (refused.code, "belongs to cluster another" in refused.err, offsets(db, name)) == (1, True, [5])
    assert operate("reset", "--topic", "elsewhere", "--forget", "--execute", "--force").code == 0
    assert offsets(db, name) == []


def test_a_topic_whose_partitions_nobody_may_see_is_not_gone(
    operate: Command, consumed: str, db: Db, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka tells a principal without DESCRIBE of no partitions; the broker of the tests has no authorizer."""
    monkeypatch.setattr(CommandCluster, "topics", lambda *_: {consumed: Topic(None, 0)})
    for more in ((), ("--execute",), ("--execute", "--force")):
        refused = operate("reset", "--topic", consumed, "--forget", *more)
        assert (refused.code, "may this principal DESCRIBE" in refused.err) == (1, True)
    for command in (("reset", "--to-earliest"), ("reset", "--to-offset", 3), ("adopt", "--to-committed")):
        refused = operate(*command, "--topic", consumed, "--execute")
        assert (refused.code, "may this principal DESCRIBE" in refused.err) == (1, True), command
    shown = operate("status", "--check")
    assert (shown.code, "DESCRIBE" in shown.out, "--forget" in shown.out) == (1, True, False)
    assert offsets(db, name) == [10, 10]


def test_dead_letters_and_halts_of_what_goes_are_named(operate: Command, db: Db, name: str) -> None:
    db.execute(
        "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset, halted, owner_token, owner_kind, "
        "owner_name) VALUES (%s, 'gone', 0, 5, 'by a test', gen_random_uuid(), 'consumer', 'pod-1')",
        (name,),
    )
    db.execute(
        "INSERT INTO exactly_once.dead_letter (group_id, topic, partition, message_offset, timestamp_type, "
        "timestamp_ms, error_class, error, attempts) VALUES (%s, 'gone', 0, 3, 0, 0, 'E', 'e', 1)",
        (name,),
    )
    refused = operate("reset", "--topic", "gone", "--forget")
    assert (refused.code, "belongs to a cluster that is not known" in refused.err) == (1, True)
    for more in ((), ("--execute",)):
        shown = operate("reset", "--topic", "gone", "--forget", "--force", *more).out
        assert "fences consumer pod-1; no longer halted: by a test" in shown
        assert "1 dead letters of them stay" in shown
    assert db.execute("SELECT status FROM exactly_once.dead_letter WHERE group_id = %s", (name,)).fetchall() == [
        ("dead",)
    ]


def test_a_row_that_is_taken_meanwhile_stays(
    operate: Command, consumed: str, db: Db, name: str, bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its topic is back; no server can be stopped between look and deletion, so an old look is shown."""
    delete_topic(bootstrap_servers, consumed)
    look = stored_rows

    def then_taken(*args: Any, **options: Any) -> Any:
        rows = look(*args, **options)
        db.execute("UPDATE exactly_once.ledger SET owner_epoch = owner_epoch + 1 WHERE group_id = %s", (name,))
        return rows

    monkeypatch.setattr("exactly_once.cli.reset.stored_rows", then_taken)
    refused = operate("reset", "--topic", consumed, "--forget", "--execute")
    assert (refused.code, "nothing was changed, try again" in refused.err) == (1, True)
    assert offsets(db, name) == [10, 10]
    assert audit(db, name, "forget") == []


def test_an_owner_that_lives_reads_its_other_topics_on(
    *,
    operate: Command,
    consumed: str,
    db: Db,
    name: str,
    make_consumer: MakeConsumer,
    bootstrap_servers: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("exactly_once.consumer.maintenance.RECHECK_SECONDS", 0.2)
    other = create_topic(bootstrap_servers, 1, name=f"{name}-other")
    produce(bootstrap_servers, other, 3, 1)
    consumer = make_consumer()
    consumer.subscribe([consumed, other])
    for unit in consumer.units(until_end=True):
        with unit:
            pass
    delete_topic(bootstrap_servers, consumed)
    assert operate("reset", "--topic", consumed, "--forget", "--execute").code == 0
    seen: list[tuple[str | None, int | None]] = []
    units = consumer.units()
    # It has noticed that rows of its are gone.
    while "missing" not in {getattr(r, "action", "") for r in caplog.records} or len(seen) < 3:
        produce(bootstrap_servers, other, 1, 1)
        with next(units) as unit:
            seen += [(m.topic(), m.offset()) for m in unit.messages]
    assert seen == [(other, o) for o in range(3, 3 + len(seen))]
    assert len(ledger(db, name)) == 1
