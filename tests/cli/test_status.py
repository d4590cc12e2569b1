"""``exactly-once status``: what the ledger has, beside what Kafka has."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from psycopg.conninfo import make_conninfo

from exactly_once import NoCommittedOffset
from exactly_once.cli.output import ago
from exactly_once.embedded.proxy import PostgresProxy
from exactly_once.ledger.claims import claim
from tests.cli.conftest import Command, read_to_end
from tests.conftest import MakeConsumer
from tests.support.topics import add_partitions, create_topic, delete_topic, produce
from tests.support.waiting import until

Db = psycopg.Connection[Any]
KEYS = {
    "group_id", "topic", "partition", "next_offset", "log_start", "log_end", "stable_end", "lag", "leader_epoch",
    "cluster_id", "topic_id", "owned", "owner", "owner_kind", "owner_name", "owner_instance", "owner_epoch",
    "acquired_at", "advanced_at", "advanced_seconds_ago", "halted", "problem",
}  # fmt: skip


def test_the_document_has_stable_keys_and_the_lag_by_position(
    operate: Command, consumed: str, bootstrap_servers: str, name: str
) -> None:
    produce(bootstrap_servers, consumed, 3, 2, start=20)
    result = operate("status", "--json")
    assert (result.code, result.err) == (0, "")
    assert set(result.json) == {"schema", "groups", "partitions", "queries", "ledger"}
    sums = {"partitions": 2, "lag": 3, "halted": 0, "problems": 0, "dead_letters": 0, "claims": None}
    assert result.json["groups"] == [{"group_id": name, **sums}]
    assert all(set(p) == KEYS for p in result.partitions)
    found = [(p["group_id"], p["partition"], p["next_offset"], p["log_end"], p["lag"]) for p in result.partitions]
    assert found == [(name, 0, 10, 12, 2), (name, 1, 10, 11, 1)]
    assert all(0 <= p["advanced_seconds_ago"] < 60 for p in result.partitions)
    assert [p["problem"] for p in result.partitions] == [None, None]


def test_a_lag_behind_an_open_transaction_is_told_from_one_of_a_slow_worker(
    operate: Command, consumed: str, bootstrap_servers: str, name: str
) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": name})
    producer.init_transactions(60)
    producer.begin_transaction()
    for partition in range(2):
        producer.produce(consumed, "open", partition=partition)
    producer.flush(60)
    produce(bootstrap_servers, consumed, 4, 2, start=20)
    waits = "is applied up to offset 10, where a transaction of a producer is open; the rest comes when it ends"
    found = operate("status", "--json").partitions
    assert [(p["log_end"], p["stable_end"], p["lag"], p["problem"]) for p in found] == [(13, 10, 3, None)] * 2
    assert re.sub(r"\s+", " ", operate("status").out).count(waits) == 2
    checked = operate("status", "--check", "--max-lag", "2")
    assert (checked.code, checked.out.count(f"lag 3 is above 2; it {waits}")) == (1, 2)
    assert operate("status", "--check").code == 0
    producer.abort_transaction(60)
    until(lambda: "transaction of a producer" not in operate("status").out, 30, "the markers")


def test_the_owner_is_shown_while_it_owns(operate: Command, topic: str, name: str, make_consumer: MakeConsumer) -> None:
    consumer = make_consumer()
    consumer.subscribe([topic])
    with next(consumer.units()):
        pass
    found = {(p["owned"], p["owner"], p["owner_kind"]) for p in operate("status", "--json").partitions}
    assert found == {(True, f"{name}-1", "consumer")}
    title, header, *lines = operate("status").out.partition("\n\n")[0].splitlines()
    assert title.startswith(f"group {name}: 2 partitions, lag ")
    assert re.split(r"  +", header) == ["PARTITION", "NEXT OFFSET", "LOG END", "LAG", "OWNER", "ADVANCED"]
    assert all(f"  {name}-1  " in line for line in lines)
    assert " s ago" in "".join(lines)
    consumer.close()
    assert operate("status").out.count("  released  ") == 2
    assert {(p["owned"], p["owner"]) for p in operate("status", "--json").partitions} == {(False, None)}


def test_who_makes_advances_slow_is_named(operate: Command, consumed: str, conninfo: str) -> None:
    """Whoever holds an old snapshot keeps dead rows of the ledger from being removed."""
    with psycopg.connect(conninfo) as later, psycopg.connect(conninfo, application_name="a nightly report") as reporter:
        holder = f"backend {reporter.info.backend_pid} a nightly report"
        for connection in (reporter, later):  # both see the same
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.execute("SELECT 1")

        def named() -> dict[str, Any] | None:
            found: dict[str, Any] = operate("status", "--json").json["ledger"]
            return found if found["snapshot_held_by"] == holder else None

        # Autovacuum may hold an older one for a moment.
        found = until(named, 60, "the reporter's snapshot to be the oldest")
        assert found is not None
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


def test_claims_are_shown_with_their_window(operate: Command, consumed: str, conninfo: str, db: Db, name: str) -> None:
    def keep(seconds: float) -> None:
        db.execute("SELECT exactly_once.claim_keep(%s, %s)", (name, seconds))

    with psycopg.connect(conninfo) as connection:
        claim(connection, range(30), schema="exactly_once", group_id=name)
    until(
        lambda: operate("status", "--json").json["groups"][0]["claims"]["keys"] == 30, 20, "the server to have counted"
    )
    text = operate("status").out
    assert "claims: about 30 keys, " in text
    assert "; held for ever" in text
    keep(1e-9)
    db.execute("SELECT exactly_once.claim_turn(%s)", (name,))
    keep(7200)
    assert "; held for 7200 s at least, the window turned " in " ".join(operate("status").out.split())
    (group,) = operate("status", "--json").json["groups"]
    assert (group["claims"]["seconds"], group["claims"]["turns"], group["claims"]["keys"]) == (7200, 1, 30)


def test_an_unknown_group_is_said_to_have_no_rows(operate: Command, name: str) -> None:
    assert operate("status").out == f"the ledger has no rows of group {name}\n"
    assert operate("status", "--json").partitions == []


def test_one_topic_that_is_gone_does_not_hide_the_others(
    operate: Command, consumed: str, bootstrap_servers: str, name: str, make_consumer: MakeConsumer
) -> None:
    doomed = create_topic(bootstrap_servers, 1, name=f"a-{name}")
    read_to_end(make_consumer, doomed)
    delete_topic(bootstrap_servers, doomed)
    result = operate("status", "--json")
    assert result.code == 0
    found = [(p["topic"], p["problem"], p["lag"]) for p in result.partitions]
    problem = f"the topic is gone; if it is for good: exactly-once reset --group-id {name} --topic {doomed} --forget"
    assert found == [(doomed, problem, None), (consumed, None, 0), (consumed, None, 0)]


def test_an_offset_beyond_the_log_and_a_partition_that_is_not_there_are_problems(
    operate: Command, consumed: str, db: Db, name: str
) -> None:
    db.execute("UPDATE exactly_once.ledger SET next_offset = 99 WHERE group_id = %s AND partition = 0", (name,))
    db.execute("INSERT INTO exactly_once.ledger (group_id, topic, partition) VALUES (%s, %s, 5)", (name, consumed))
    shown = operate("status", "--json")
    mend = f"exactly-once reset --group-id {name} --topic {consumed} --forget"
    problem = f"the topic has no such partition; if it is for good: {mend}"
    choose = f"exactly-once reset --group-id {name} --topic {consumed} --partition 0 --to-offset N"
    beyond = f"beyond the log end 10; choose where to go on: {choose}"
    assert [p["problem"] for p in shown.partitions] == [beyond, None, problem]
    # A lag below zero would hide that of others in their sum.
    assert [p["lag"] for p in shown.partitions] == [None, 0, None]
    assert shown.json["groups"][0]["lag"] == 0


def test_a_partition_that_no_worker_has_met_is_shown_and_no_lag_of_its_group_counts_it(
    operate: Command, consumed: str, name: str, bootstrap_servers: str
) -> None:
    add_partitions(bootstrap_servers, consumed, 3)
    found = [(p["partition"], p["next_offset"], p["log_end"], p["lag"]) for p in operate("status", "--json").partitions]
    assert found == [(0, 10, 10, 0), (1, 10, 10, 0), (2, None, 0, None)]
    assert operate("status", "--check").out == f"ok: group {name}: 3 partitions, lag 0 without 1 partition\n"
    produce(bootstrap_servers, consumed, 6, 3, start=20)
    assert operate("status", "--check", "--max-lag", 2).code == 0
    result = operate("status", "--check", "--max-lag", 1)
    unread = f"group {name}, {consumed}[2]: no worker has started it, and its log holds 2 offsets, above 1"
    assert (result.code, unread in result.out) == (1, True), result.out


def test_a_partition_that_no_worker_could_start_is_a_problem(
    operate: Command, topic: str, name: str, bootstrap_servers: str, make_consumer: MakeConsumer
) -> None:
    with closing(Consumer({"bootstrap.servers": bootstrap_servers, "group.id": name})) as old:
        old.commit(offsets=[TopicPartition(topic, 0, 4)], asynchronous=False)
    with make_consumer(start="committed") as consumer:
        consumer.subscribe([topic])
        with pytest.raises(NoCommittedOffset):
            next(iter(consumer))
    checked = operate("status", "--check", "--bootstrap-servers", bootstrap_servers)
    assert checked.code == 1
    assert f"group {name}, {topic}[1]: has messages and no offset" in checked.out
    mended = operate("reset", "--topic", topic, "--partition", "1", "--to-offset", "2", "--execute")
    assert mended.code == 0
    assert f"{topic}[1]" not in operate("status", "--check").out


def test_a_row_that_was_deleted_is_a_problem(
    *, operate: Command, command: Command, consumed: str, db: Db, name: str, conninfo: str, bootstrap_servers: str
) -> None:
    """No worker reads its partition, of which nothing else would tell: also of a topic without any row."""
    other = create_topic(bootstrap_servers, 1, name=f"{name}_other")
    met = (
        "INSERT INTO exactly_once.audit (action, reason, group_id, topic, partition) VALUES ('register', '', %s, %s, 0)"
    )
    db.execute(met, (name, other))
    db.execute("DELETE FROM exactly_once.ledger WHERE group_id = %s AND partition = 1", (name,))
    offline = command("status", "--check", "--conninfo", conninfo, "--group-id", name)
    for result in (operate("status", "--check"), offline):
        assert result.code == 1
        for topic, partition in ((consumed, 1), (other, 0)):
            give = f"exactly-once reset --group-id {name} --topic {topic} --partition {partition} --to-offset N"
            told = f"group {name}, {topic}[{partition}]: its row of the ledger was deleted: restore it, or give it"
            assert f"{told} an offset with: {give}" in result.out
    refused = operate("hand-over", "--to", "spark")
    assert refused.code == 1
    assert "its row of the ledger was deleted" in refused.err
    delete_topic(bootstrap_servers, other)
    assert other not in operate("status").out, "of a topic that is gone nothing is missed"
    assert operate("reset", "--topic", consumed, "--partition", 1, "--to-offset", 10, "--execute").code == 0
    assert operate("status", "--check").code == 0


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


@pytest.fixture
def crowd(db: Db, name: str) -> str:
    """A group of which everything is said that can be said of one."""
    topic = CUSTOMERS
    owner = "22222222-3333-4444-8555-666666666666"
    for partition, named, is_owned, halted in (
        (0, "accounts-7f9c5d6b4-x2k4q", True, None),
        (1, None, True, None),
        (2, None, False, None),
        (3, None, False, HALT),
    ):
        db.execute(
            "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset, owner_token, owner_kind, "
            "owner_name, owner_instance, halted, advanced_at) VALUES (%s, %s, %s, 1234567890, "
            "CASE WHEN %s THEN gen_random_uuid() END, 'consumer', %s, %s, %s, now() - interval '90 minutes')",
            (name, topic, partition, is_owned, named, owner, halted),
        )
    dead_letter(db, name, topic)
    return name


def dead_letter(db: Db, group_id: str, topic: str) -> None:
    db.execute(
        "INSERT INTO exactly_once.dead_letter (group_id, topic, partition, message_offset, timestamp_type, "
        "timestamp_ms, error_class, error, attempts) VALUES (%s, %s, 0, 7, 0, -1, 'x', 'x', 1)",
        (group_id, topic),
    )


HALT = "the handler committed by itself: effects of offsets 1234 to 1290 are durable, offsets are not"
CUSTOMERS = "payments-of-the-european-customers"
MEND = (
    "Decide which offset is right, then: exactly-once reset --group-id GROUP "
    f"--topic {CUSTOMERS} --partition 3 --to-offset N"
)
PICTURES = {
    80: """\
group GROUP: 4 partitions, 1 HALTED, 1 dead letter
PARTITION                         NEXT OFFSET  LOG END  LAG  OWNER     ADVANCED
payments-of-the-…an-customers[0]   1234567890  -        -    acco…k4q  1.5 h ago
payments-of-the-…an-customers[1]   1234567890  -        -    22222222  1.5 h ago
payments-of-the-…an-customers[2]   1234567890  -        -    released  1.5 h ago
! payments-of-th…an-customers[3]   1234567890  -        -    released  1.5 h ago
! payments-of-the-european-customers[3] halted: the handler committed by itself:
  effects of offsets 1234 to 1290 are durable, offsets are not. Decide which
  offset is right, then: exactly-once reset --group-id GROUP --topic
  payments-of-the-european-customers --partition 3 --to-offset N
""",
    100: """\
group GROUP: 4 partitions, 1 HALTED, 1 dead letter
PARTITION                                NEXT OFFSET  LOG END  LAG  OWNER                  ADVANCED
payments-of-the-european-customers[0]     1234567890  -        -    accounts-7…d6b4-x2k4q  1.5 h ago
payments-of-the-european-customers[1]     1234567890  -        -    22222222               1.5 h ago
payments-of-the-european-customers[2]     1234567890  -        -    released               1.5 h ago
! payments-of-the-european-customers[3]   1234567890  -        -    released               1.5 h ago
! payments-of-the-european-customers[3] halted: the handler committed by itself: effects of offsets
  1234 to 1290 are durable, offsets are not. Decide which offset is right, then: exactly-once reset
  --group-id GROUP --topic payments-of-the-european-customers --partition 3 --to-offset N
""",
    160: f"""\
group GROUP: 4 partitions, 1 HALTED, 1 dead letter
PARTITION                                NEXT OFFSET  LOG END  LAG  OWNER                     ADVANCED
payments-of-the-european-customers[0]     1234567890  -        -    accounts-7f9c5d6b4-x2k4q  1.5 h ago
payments-of-the-european-customers[1]     1234567890  -        -    22222222                  1.5 h ago
payments-of-the-european-customers[2]     1234567890  -        -    released                  1.5 h ago
! payments-of-the-european-customers[3]   1234567890  -        -    released                  1.5 h ago
! payments-of-the-european-customers[3] halted: {HALT}. Decide which
  offset is right, then: exactly-once reset --group-id GROUP --topic {CUSTOMERS} --partition 3 --to-offset N
""",
}


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_the_table_fits_the_terminal(
    columns: int, command: Command, conninfo: str, crowd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = command("status", "--conninfo", conninfo, "--group-id", crowd).out
    picture, _, _ = text.replace(crowd, "GROUP").rpartition("\nledger: ")  # which others' rows and sessions are in
    assert picture == PICTURES[columns]
    assert max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize("columns", ["1", "-3", "none"])
def test_a_terminal_that_is_no_width_is_shown_the_table(
    columns: str, command: Command, conninfo: str, crowd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = command("status", "--conninfo", conninfo, "--group-id", crowd)
    assert (result.code, result.err) == (0, "")
    assert "1234567890" in result.out


def test_spark_queries_fit_the_terminal_too(
    command: Command, conninfo: str, db: Db, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    db.execute(
        "INSERT INTO exactly_once.spark_query (group_id, query_id, run_id, batch_id, row_count, dropped, written_at) "
        "VALUES (%s, gen_random_uuid()::text, gen_random_uuid()::text, 123456, 1000000, 0, now() - interval '1 hour')",
        (name,),
    )
    header, row = command("status", "--conninfo", conninfo, "--group-id", name).out.splitlines()
    assert len(row) <= 80
    assert row.split()[3:] == ["123456", "1000000", "0", "1.0", "h", "ago", "-"]
    assert re.split(r"  +", header)[:4] == ["GROUP", "SPARK QUERY", "RUN", "BATCH"]


def test_a_line_in_a_pipe_is_as_long_as_it_must_be(command: Command, conninfo: str, crowd: str) -> None:
    text = command("status", "--conninfo", conninfo, "--group-id", crowd).out
    assert text.replace(crowd, "GROUP").rpartition("\nledger: ")[0] == re.sub(r"\n  (?=\S)", " ", PICTURES[160])


def test_a_check_says_what_needs_an_operator_and_exits_with_1(
    command: Command, conninfo: str, crowd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    where = ("--conninfo", conninfo, "--group-id", crowd)
    result = command("status", "--check", *where)
    halted = f"group {crowd}, payments-of-the-european-customers[3]: halted: {HALT}. {MEND.replace('GROUP', crowd)}"
    assert (result.code, result.out, result.err) == (1, f"{halted}\n", "")
    many = command("status", "--check", "--max-dead-letters", 0, "--json", *where)
    assert (many.code, many.json["troubles"]) == (1, [halted, f"group {crowd}: 1 dead letter, above 0"])
    assert command("status", *where).code == 0, "only a check judges"


def test_a_check_of_a_group_that_is_well_exits_with_0(
    operate: Command, consumed: str, bootstrap_servers: str, db: Db, name: str
) -> None:
    produce(bootstrap_servers, consumed, 5, 2, start=20)
    dead_letter(db, name, consumed)
    well = operate("status", "--check", "--max-lag", 3, "--max-dead-letters", 1)
    assert (well.code, well.out) == (0, f"ok: group {name}: 2 partitions, lag 5, 1 dead letter\n")
    behind = operate("status", "--check", "--max-lag", 2)
    assert (behind.code, behind.out) == (1, f"group {name}, {consumed}[0]: lag 3 is above 2\n")
    assert operate("status", "--check", "--json").json["troubles"] == []


def test_a_check_finds_offsets_that_no_consumer_would_take_and_groups_that_are_not_there(
    operate: Command, consumed: str, db: Db, name: str
) -> None:
    db.execute("UPDATE exactly_once.ledger SET next_offset = 99 WHERE group_id = %s AND partition = 0", (name,))
    result = operate("status", "--check")
    choose = f"exactly-once reset --group-id {name} --topic {consumed} --partition 0 --to-offset N"
    said = f"group {name}, {consumed}[0]: beyond the log end 10; choose where to go on: {choose}\n"
    assert (result.code, result.out) == (1, said)
    db.execute("DELETE FROM exactly_once.ledger WHERE group_id = %s", (name,))
    gone = f"the ledger has no rows of group {name}\n"
    assert operate("status", "--check").out == gone
    # What outlives the rows does not stand for them.
    dead_letter(db, name, consumed)
    db.execute("SELECT exactly_once.claim_keep(%s, 60)", (name,))
    result = operate("status", "--check")
    assert (result.code, result.out) == (1, gone)
    assert operate("status").out.startswith(f"{gone}group {name}: 0 partitions, 1 dead letter\n")


def test_a_check_without_its_servers_is_not_passed(command: Command, consumed: str, conninfo: str, name: str) -> None:
    where = ("--bootstrap-servers", "127.0.0.1:1", "--group-id", name)
    away = command("status", "--check", "--conninfo", conninfo, *where)
    assert (away.code, "127.0.0.1:1" in away.err) == (1, True)
    assert away.out == ""
    assert command("status", "--check", "--conninfo", "host=127.0.0.1 port=1", *where).code == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--max-lag", "5"], "pass --check"),
        (["--check", "--max-lag", "5"], "--bootstrap-servers"),
        (["--check", "--watch"], "not allowed with"),
        (["--check", "--max-lag", "-1"], "0 or more"),
        (["--watch", "0"], "seconds from 0.1"),
        (["--watch", "--json"], "leave out --json"),
    ],
)
def test_a_check_or_watch_that_means_nothing_is_refused(command: Command, args: list[str], said: str) -> None:
    result = command("status", "--conninfo", "host=127.0.0.1 port=1", *args)
    assert result.code == 2
    assert said in result.err


def test_watching_shows_what_changes_and_outlives_the_database(conninfo: str, consumed: str, db: Db, name: str) -> None:
    with PostgresProxy(conninfo) as proxy:
        command = [sys.executable, "-m", "exactly_once", "status", "--watch", "0.1", "--group-id", name]
        with subprocess.Popen(
            [*command, "--conninfo", proxy.conninfo], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == f"group {name}: 2 partitions\n"
            proxy.cut_all()
            db.execute("UPDATE exactly_once.ledger SET halted = 'why' WHERE group_id = %s AND partition = 0", (name,))
            for line in process.stdout:
                if line == f"group {name}: 2 partitions, 1 HALTED\n":
                    break
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "")


def test_ages_are_told_in_their_largest_unit() -> None:
    told = [ago(seconds) for seconds in (None, -0.1, 1.25, 60, 5400, 200_000)]
    assert told == [None, "0.0 s ago", "1.2 s ago", "1.0 min ago", "1.5 h ago", "2.3 d ago"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_terminal_cannot_show_is_escaped_and_no_error(encoding: str, conninfo: str, db: Db, name: str) -> None:
    group = f"größe → {name}"
    db.execute("INSERT INTO exactly_once.ledger (group_id, topic, partition) VALUES (%s, 'tä', 0)", (group,))
    command = [sys.executable, "-m", "exactly_once", "status", "--conninfo", conninfo, "--group-id", group]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u2192" in done.stdout


def test_a_time_out_of_the_role_is_told_with_what_mends_it(command: Command, conninfo: str) -> None:
    with psycopg.connect(conninfo) as other:
        other.execute("LOCK TABLE exactly_once.ledger")
        result = command("status", "--conninfo", make_conninfo(conninfo, options="-c statement_timeout=200"))
    assert result.code == 1
    assert "statement timeout; a statement waited too long" in result.err
    assert "ALTER ROLE ... SET statement_timeout" in result.err
