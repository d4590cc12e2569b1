"""``exactly-once status``: what the ledger has, beside what Kafka has."""

from __future__ import annotations

import re
from typing import Any

import psycopg
from confluent_kafka.admin import AdminClient

from exactly_once.cli.output import ago
from tests.cli.conftest import Command, read_to_end
from tests.conftest import MakeConsumer
from tests.support.topics import create_topic, produce
from tests.support.waiting import until

Db = psycopg.Connection[Any]
KEYS = {
    "group_id", "topic", "partition", "next_offset", "log_start", "log_end", "lag", "leader_epoch", "cluster_id",
    "topic_id", "owned", "owner", "owner_kind", "owner_name", "owner_instance", "owner_epoch", "acquired_at",
    "advanced_at", "advanced_seconds_ago", "halted", "problem",
}  # fmt: skip


def test_the_document_has_stable_keys_and_the_lag_by_position(
    operate: Command, consumed: str, bootstrap_servers: str, name: str
) -> None:
    produce(bootstrap_servers, consumed, 3, 2, start=20)
    result = operate("status", "--json")
    assert (result.code, result.err) == (0, "")
    assert set(result.json) == {"schema", "partitions", "queries", "ledger"}
    assert all(set(p) == KEYS for p in result.partitions)
    found = [(p["group_id"], p["partition"], p["next_offset"], p["log_end"], p["lag"]) for p in result.partitions]
    assert found == [(name, 0, 10, 12, 2), (name, 1, 10, 11, 1)]
    assert all(0 <= p["advanced_seconds_ago"] < 60 for p in result.partitions)
    assert [p["problem"] for p in result.partitions] == [None, None]


def test_the_owner_is_shown_while_it_owns(operate: Command, topic: str, name: str, make_consumer: MakeConsumer) -> None:
    consumer = make_consumer()
    consumer.subscribe([topic])
    with next(consumer.units()):
        pass
    found = {(p["owned"], p["owner"], p["owner_kind"]) for p in operate("status", "--json").partitions}
    assert found == {(True, f"{name}-1", "consumer")}
    text = operate("status").out.splitlines()
    header = ["GROUP", "TOPIC", "PARTITION", "NEXT OFFSET", "LOG END", "LAG", "OWNER", "KIND", "ADVANCED", "PROBLEM"]
    assert re.split(r"  +", text[0]) == header
    assert all(f"{name}-1  consumer" in line for line in text[1:-2])
    assert " s ago" in "".join(text)
    consumer.close()
    assert {(p["owned"], p["owner"]) for p in operate("status", "--json").partitions} == {(False, None)}


def test_who_makes_advances_slow_is_named(operate: Command, consumed: str, conninfo: str) -> None:
    """Whoever holds an old snapshot keeps dead rows of the ledger from being removed."""
    with psycopg.connect(conninfo, application_name="a nightly report") as reporter:
        holder = f"backend {reporter.info.backend_pid} a nightly report"
        reporter.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reporter.execute("SELECT 1")
        found = operate("status", "--json").json["ledger"]
        assert found["snapshot_held_by"] == holder
        assert min(found["snapshot_transactions"], found["snapshot_seconds"], found["dead_rows"]) >= 0
        line = operate("status").out.splitlines()[-1]
        assert re.fullmatch(rf"ledger: \d+ dead rows, \d+ bytes; oldest snapshot: {holder}, since .*", line)
    assert holder not in operate("status").out


def test_without_brokers_it_shows_what_the_database_knows(
    command: Command, consumed: str, conninfo: str, name: str
) -> None:
    result = command("status", "--conninfo", conninfo, "--group-id", name, "--json")
    assert result.code == 0
    assert [(p["next_offset"], p["log_end"], p["lag"]) for p in result.partitions] == [(10, None, None)] * 2


def test_without_a_group_it_shows_all_of_them(
    command: Command, consumed: str, conninfo: str, bootstrap_servers: str, db: Db
) -> None:
    name = consumed
    db.execute(
        "INSERT INTO exactly_once.ledger (group_id, topic, partition) VALUES (%s, %s, 0)", (f"{name}-other", name)
    )
    result = command("status", "--conninfo", conninfo, "--bootstrap-servers", bootstrap_servers, "--json")
    assert {name, f"{name}-other"} <= {p["group_id"] for p in result.partitions}
    (unstarted,) = [p for p in result.partitions if p["group_id"] == f"{name}-other"]
    assert (unstarted["next_offset"], unstarted["log_end"], unstarted["lag"]) == (None, 10, None)


def test_an_unknown_group_is_said_to_have_no_rows(operate: Command, name: str) -> None:
    assert operate("status").out == f"the ledger has no rows of group {name}\n"
    assert operate("status", "--json").partitions == []


def test_one_topic_that_is_gone_does_not_hide_the_others(
    operate: Command, consumed: str, bootstrap_servers: str, name: str, make_consumer: MakeConsumer
) -> None:
    doomed = create_topic(bootstrap_servers, 1, name=f"a-{name}")
    read_to_end(make_consumer, doomed)
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.delete_topics([doomed])[doomed].result(30)
    until(lambda: doomed not in admin.list_topics(timeout=10).topics, 30, "the topic's end")
    result = operate("status", "--json")
    assert result.code == 0
    found = [(p["topic"], p["problem"], p["lag"]) for p in result.partitions]
    assert found == [(doomed, "the topic is gone", None), (consumed, None, 0), (consumed, None, 0)]


def test_an_offset_beyond_the_log_and_a_partition_that_is_not_there_are_problems(
    operate: Command, consumed: str, db: Db, name: str
) -> None:
    db.execute("UPDATE exactly_once.ledger SET next_offset = 99 WHERE group_id = %s AND partition = 0", (name,))
    db.execute("INSERT INTO exactly_once.ledger (group_id, topic, partition) VALUES (%s, %s, 5)", (name, consumed))
    found = {p["partition"]: p["problem"] for p in operate("status", "--json").partitions}
    assert found == {0: "beyond the log end", 1: None, 5: "the topic has no such partition"}


def test_brokers_that_do_not_answer_are_an_error_behind_what_the_database_knows(
    command: Command, consumed: str, conninfo: str, name: str
) -> None:
    result = command(
        "status", "--conninfo", conninfo, "--bootstrap-servers", "127.0.0.1:1", "--group-id", name, "--json"
    )
    assert result.code == 1
    assert [p["next_offset"] for p in result.partitions] == [10, 10]
    assert result.err.count("\n") == 1
    assert "127.0.0.1:1" in result.err
    assert "Connection refused" in result.err


def test_a_name_with_control_characters_does_not_move_the_cursor(operate: Command, db: Db, name: str) -> None:
    db.execute(
        "INSERT INTO exactly_once.ledger (group_id, topic, partition, halted) VALUES (%s, 't', 0, %s)",
        (name, "up\x1b[2A\nand away"),
    )
    assert "halted: up [2A and away" in operate("status").out


def test_ages_are_told_in_their_largest_unit() -> None:
    told = [ago(seconds) for seconds in (None, -0.1, 1.25, 60, 5400, 200_000)]
    assert told == [None, "0.0 s ago", "1.2 s ago", "1.0 min ago", "1.5 h ago", "2.3 d ago"]
