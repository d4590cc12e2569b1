"""``exactly-once reset``: offsets move in one transaction, owners are fenced, halted partitions go on."""

# ruff: noqa: PLR0917 - fixtures and parameters are positional

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from psycopg import sql

from exactly_once import Fenced, HandlerCommitted, LedgerRowMissing, OffsetBelowLogStart, OwnedBySpark, PartitionHalted
from tests.cli.conftest import Command, audit, ledger, offsets, read_to_end, suggested
from tests.conftest import MakeConsumer
from tests.support.topics import create_topic, delete_records, produce
from tests.support.waiting import until

Db = psycopg.Connection[Any]
EVERYTHING = [(p, o) for p in range(2) for o in range(10)]


def test_a_dry_run_shows_old_and_new_and_changes_nothing(operate: Command, consumed: str, db: Db, name: str) -> None:
    before = ledger(db, name)
    result = operate("reset", "--topic", consumed, "--to-earliest", "--json")
    assert result.code == 0
    assert result.json["executed"] is False
    assert [(p["partition"], p["old_offset"], p["new_offset"]) for p in result.partitions] == [(0, 10, 0), (1, 10, 0)]
    assert ledger(db, name) == before
    assert audit(db, name, "reset") == []
    text = operate("reset", "--topic", consumed, "--to-earliest")
    assert "dry run: nothing was changed" in text.out
    assert text.out.splitlines()[2].split() == ["0", "10", "->", "0", "0", "10", "-"]


def test_the_table_fits_the_terminal(
    operate: Command, consumed: str, db: Db, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    db.execute("UPDATE exactly_once.ledger SET halted = repeat('because ', 20) WHERE group_id = %s", (name,))
    assert max(map(len, operate("reset", "--topic", consumed, "--to-earliest").out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("target", "again", "left_out", "said"),
    [
        (["--to-offset", 4], [6, 6], [0, 0], "messages: 12 would come again, their effects a second time (counted"),
        (["--to-latest"], [0, 0], [3, 3], "messages: 6 would be left out, without effects (counted in offsets"),
        (["--to-offset", 12, "--partition", 0], [0], [2], "messages: 2 would be left out"),
        (["--to-offset", 10], [0, 0], [0, 0], "no message comes again, none is left out"),
        (["--to-current"], [0, 0], [0, 0], "no message comes again, none is left out"),
        (["--to-offset", 500, "--force"], [0, 0], [3, 3], "messages: 6 would be left out"),
        (
            ["--to-offset", 500, "--partition", 1, "--force"],
            [0],
            [3],
            "{topic}[1] ends at offset 13: messages that are produced at offsets below 500 would be left out",
        ),
    ],
)
def test_a_dry_run_says_how_many_messages_come_again_or_are_left_out(
    operate: Command,
    consumed: str,
    bootstrap_servers: str,
    target: list[object],
    again: list[int],
    left_out: list[int],
    said: str,
) -> None:
    produce(bootstrap_servers, consumed, 6, 2, start=20)
    shown = operate("reset", "--topic", consumed, *target, "--json").partitions
    assert ([p["again"] for p in shown], [p["left_out"] for p in shown]) == (again, left_out)
    assert f"\n{said.replace('{topic}', consumed)}" in operate("reset", "--topic", consumed, *target).out


def test_what_was_done_says_it_of_the_offsets_that_were_there(operate: Command, consumed: str) -> None:
    assert "\nmessages: 20 come again, their" in operate("reset", "--topic", consumed, "--to-earliest", "--execute").out
    assert "\nmessages: 20 are left out, w" in operate("reset", "--topic", consumed, "--to-latest", "--execute").out


def test_one_that_moves_both_ways_says_both_and_counts_only_what_the_log_has(
    operate: Command, consumed: str, db: Db, name: str, bootstrap_servers: str
) -> None:
    db.execute("UPDATE exactly_once.ledger SET next_offset = 6 WHERE group_id = %s AND partition = 0", (name,))
    for partition in range(2):
        delete_records(bootstrap_servers, consumed, 7, partition)
    both = operate("reset", "--topic", consumed, "--to-offset", 8).out
    assert (
        "\nmessages: 2 would come again, their effects a second time; 1 would be left out, without effects; "
        "1 that the log has lost would be left out, too (counted"
    ) in both


def test_a_new_group_is_told_what_it_leaves_out(operate: Command, topic: str) -> None:
    assert "\nmessages: 16 would be left out" in operate("reset", "--topic", topic, "--to-offset", 8).out


def test_rows_that_are_gone_are_not_told_to_bring_nothing_again(
    operate: Command, consumed: str, db: Db, name: str
) -> None:
    """As after a failover to a standby that had none of them: the ledger cannot tell what took effect."""
    db.execute("DELETE FROM exactly_once.ledger WHERE group_id = %s", (name,))
    given = ("reset", "--topic", consumed, "--to-earliest")
    assert [p["again"] for p in operate(*given, "--json").partitions] == [None, None]
    shown = operate(*given).out
    assert "comes again" not in shown
    assert "\npartitions without an offset: 2; which of their messages took effect is not known\n" in shown
    left_out = operate("reset", "--topic", consumed, "--to-latest").out
    assert "\nmessages: 20 would be left out (counted" in left_out
    assert "\npartitions without an offset: 2; which of their" in left_out
    assert "choose another --to-..." in operate("reset", "--topic", consumed, "--to-committed").err


def test_execute_moves_all_partitions_and_leaves_audit_rows(
    operate: Command, consumed: str, db: Db, name: str, make_consumer: MakeConsumer
) -> None:
    result = operate("reset", "--topic", consumed, "--to-earliest", "--reason", "a bug of ours", "--execute")
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("done\n")
    assert offsets(db, name) == [0, 0]
    assert audit(db, name, "reset") == [(0, 10, 0, "a bug of ours"), (1, 10, 0, "a bug of ours")]
    assert read_to_end(make_consumer, consumed) == EVERYTHING


def test_only_the_partitions_that_are_named_move(operate: Command, consumed: str, db: Db, name: str) -> None:
    assert operate("reset", "--topic", consumed, "--partition", 1, "--to-offset", 4, "--execute").code == 0
    assert offsets(db, name) == [10, 4]


def test_to_latest_leaves_out_what_came_meanwhile(
    operate: Command, consumed: str, db: Db, name: str, bootstrap_servers: str
) -> None:
    produce(bootstrap_servers, consumed, 6, 2, start=20)
    assert operate("reset", "--topic", consumed, "--to-latest", "--execute").code == 0
    assert offsets(db, name) == [13, 13]


def test_to_time_finds_the_first_message_that_is_not_older(
    operate: Command, db: Db, name: str, bootstrap_servers: str, make_consumer: MakeConsumer
) -> None:
    create_topic(bootstrap_servers, 1, name=name)
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    noon = int(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp() * 1000)
    for minute in range(5):
        producer.produce(name, b"x", partition=0, timestamp=noon + minute * 60_000)
    assert producer.flush(60) == 0
    read_to_end(make_consumer, name)
    # A zone that is not UTC: 13:02 there is 12:02 in UTC.
    result = operate("reset", "--topic", name, "--to-time", "2026-01-31T13:01:30+01:00", "--execute")
    assert (result.code, offsets(db, name)) == (0, [2])
    result = operate("reset", "--topic", name, "--to-time", "2026-02-01T00:00:00Z", "--execute")
    assert (result.code, offsets(db, name)) == (0, [5])


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        (["--to-time", "2026-01-31"], "has no zone: 2026-01-31T00:00:00Z is UTC"),
        (["--to-time", "yesterday"], "not a time"),
        (["--to-time", "1969-12-31T23:59:59.999+00:00"], "before 1970"),
        (["--to-offset", "-1"], "is not an offset"),
        (["--to-offset", str(2**63)], "is not an offset"),
        (["--to-earliest", "--to-latest"], "not allowed with"),
        (["--to-current", "--partition", "-1"], "-1 is not the number of a partition"),
        ([], "one of the arguments"),
    ],
)
def test_targets_that_mean_nothing_are_refused_before_any_server_is_asked(
    command: Command, target: list[str], complaint: str
) -> None:
    result = command("reset", "--topic", "t", *target)
    assert result.code == 2
    assert complaint in result.err
    assert result.err.count("\n") == 1


def test_offsets_outside_the_log_need_force(operate: Command, consumed: str, db: Db, name: str) -> None:
    refused = operate("reset", "--topic", consumed, "--to-offset", 11, "--execute")
    assert refused.code == 1
    assert "offset 11 of" in refused.err
    assert "offsets 0 to 10" in refused.err
    assert offsets(db, name) == [10, 10]
    assert operate("reset", "--topic", consumed, "--to-offset", 10, "--execute").code == 0
    assert operate("reset", "--topic", consumed, "--to-offset", 11, "--execute", "--force").code == 0
    assert offsets(db, name) == [11, 11]


def test_a_live_owner_is_fenced_and_goes_on_from_the_new_offset(
    operate: Command, topic: str, db: Db, name: str, make_consumer: MakeConsumer
) -> None:
    db.execute(f'CREATE TABLE "{name}" (partition int, "offset" bigint)')
    consumer = make_consumer(max_messages=4)
    consumer.subscribe([topic])
    effect = f'INSERT INTO "{name}" VALUES (%s, %s)'
    units = consumer.units(until_end=True)
    with next(units) as unit:
        unit.executemany(effect, [(m.partition(), m.offset()) for m in unit.messages])
    unit = next(units)
    epochs: list[int] = []
    with pytest.raises(Fenced, match="nobody, it was reset or released"), unit:  # noqa: PT012
        unit.executemany(effect, [(m.partition(), m.offset()) for m in unit.messages])
        epochs += [p["owner_epoch"] for p in operate("status", "--json").partitions]
        shown = operate("reset", "--topic", topic, "--to-offset", 2, "--execute")
        assert shown.code == 0
        assert f"fences consumer {name}-1" in shown.out
    assert [p["owner_epoch"] for p in operate("status", "--json").partitions] == [e + 1 for e in epochs]
    assert offsets(db, name) == [2, 2], "the fenced unit moved nothing"
    db.execute(f'TRUNCATE "{name}"')
    for unit in units:
        try:
            with unit:
                unit.executemany(effect, [(m.partition(), m.offset()) for m in unit.messages])
        except Fenced:
            continue  # the other partition, which had been handed out before the reset
    effects = db.execute(f'SELECT * FROM "{name}" ORDER BY 1, 2').fetchall()
    assert effects == [(p, o) for p in range(2) for o in range(2, 10)]


def test_an_idle_owner_notices_a_reset_without_a_new_message(
    operate: Command, topic: str, make_consumer: MakeConsumer
) -> None:
    """Between units the loop looks at its rows every few seconds; no message need come to tell of a reset."""
    consumer = make_consumer()
    consumer.subscribe([topic])
    seen: list[tuple[int | None, int | None]] = []
    for unit in consumer.units(until_end=True):
        with unit:
            pass
    assert operate("reset", "--topic", topic, "--to-earliest", "--execute").code == 0
    for unit in consumer.units(idle_seconds=60):
        with unit:
            seen += [(m.partition(), m.offset()) for m in unit.messages]
        if len(seen) >= len(EVERYTHING):
            break
    assert sorted(seen) == EVERYTHING


def test_to_current_fences_and_keeps_what_the_owner_committed_meanwhile(
    operate: Command, topic: str, db: Db, name: str, make_consumer: MakeConsumer
) -> None:
    consumer = make_consumer(max_messages=4)
    consumer.subscribe([topic])
    units = consumer.units(until_end=True)
    with next(units):
        pass
    positions = "SELECT partition, next_offset, leader_epoch FROM exactly_once.ledger WHERE group_id = %s ORDER BY 1"
    stood = db.execute(positions, (name,)).fetchall()
    assert {epoch for _, _, epoch in stood} != {None}
    unit = next(units)
    with pytest.raises(Fenced), unit:
        assert operate("reset", "--topic", topic, "--to-current", "--execute").code == 0
    assert db.execute(positions, (name,)).fetchall() == stood, "the offset is the same, so is the epoch of its log"
    assert db.execute(
        "SELECT count(*) FROM exactly_once.ledger WHERE group_id = %s AND owner_token IS NULL", (name,)
    ).fetchone() == (2,)


def test_to_current_needs_no_broker(command: Command, consumed: str, conninfo: str, name: str) -> None:
    result = command("reset", "--topic", consumed, "--to-current", "--conninfo", conninfo, "--group-id", name, "--json")
    assert result.code == 0
    assert [(p["old_offset"], p["new_offset"]) for p in result.partitions] == [(10, 10), (10, 10)]
    refused = command("reset", "--topic", consumed, "--to-earliest", "--conninfo", conninfo, "--group-id", name)
    assert refused.code == 2
    assert "--bootstrap-servers" in refused.err


def test_a_row_that_is_locked_by_a_running_unit_is_waited_for_with_a_limit(
    operate: Command, consumed: str, conninfo: str, name: str, db: Db
) -> None:
    with psycopg.connect(conninfo) as other:
        other.execute("SELECT FROM exactly_once.ledger WHERE group_id = %s FOR UPDATE", (name,))
        result = operate("reset", "--topic", consumed, "--to-earliest", "--execute")
    assert result.code == 1
    assert "a unit of work" in result.err
    assert offsets(db, name) == [10, 10]


def test_a_halted_partition_goes_on_after_the_command_that_the_error_names(
    operate: Command, topic: str, name: str, make_consumer: MakeConsumer, db: Db
) -> None:
    consumer = make_consumer()
    consumer.subscribe([topic])
    unit = next(consumer.units())
    with pytest.raises(HandlerCommitted) as committed, unit:
        unit.connection.execute("COMMIT")
    consumer.close()
    halted = {p["partition"] for p in operate("status", "--json").partitions if p["halted"]}
    assert halted == {m.partition() for m in unit.messages}
    assert "halted: the handler committed" in operate("status").out
    with pytest.raises(PartitionHalted) as refused:
        read_to_end(make_consumer, topic)
    for error in (committed.value, refused.value):
        given = [arg if arg != "N" else "5" for arg in suggested(str(error))]
        assert operate(*given).code == 0
    for partition in halted:
        mend = ("reset", "--topic", topic, "--partition", partition, "--to-offset", 5, "--execute")
        shown = operate(*mend)
        assert shown.code == 0
        assert "no longer halted: the handler committed" in shown.out
        assert f"halted: {topic}[{partition}] at offset " in shown.out
        assert "without effects" not in shown.out
    # The other partition, if it was not in that unit, was read by the consumer that named this one.
    assert read_to_end(make_consumer, topic) == [(p, o) for p in sorted(halted) for o in range(5, 10)]


def test_a_deleted_row_is_made_again_by_the_command_that_the_error_names(
    operate: Command, consumed: str, db: Db, name: str, make_consumer: MakeConsumer
) -> None:
    before = ledger(db, name)[0]
    db.execute("DELETE FROM exactly_once.ledger WHERE group_id = %s AND partition = 0", (name,))
    with pytest.raises(LedgerRowMissing) as refused:
        read_to_end(make_consumer, consumed)
    mend = [arg if arg != "N" else "7" for arg in suggested(str(refused.value))]
    assert "new row" in operate(*mend).out
    assert len(ledger(db, name)) == 1, "that was a dry run"
    assert operate(*mend, "--reason", "somebody slipped", "--execute").code == 0
    made = ledger(db, name)[0]
    assert made[:5] == before[:5], "the ids are those that Kafka has"
    assert offsets(db, name) == [7, 10]
    assert audit(db, name, "register")[-1] == (0, None, None, "somebody slipped")
    assert audit(db, name, "reset") == [(0, None, 7, "somebody slipped")]
    assert read_to_end(make_consumer, consumed) == [(0, 7), (0, 8), (0, 9)]


def test_rows_of_a_whole_topic_are_made_again_one_by_one(
    operate: Command, consumed: str, db: Db, name: str, make_consumer: MakeConsumer
) -> None:
    """What the error says about one must not move another."""
    db.execute("DELETE FROM exactly_once.ledger WHERE group_id = %s", (name,))
    with pytest.raises(LedgerRowMissing) as refused:
        read_to_end(make_consumer, consumed)
    mend = suggested(str(refused.value))
    for number, offset in ((0, 7), (1, 9)):
        mend[mend.index("--partition") + 1], mend[mend.index("--to-offset") + 1] = str(number), str(offset)
        assert operate(*mend, "--execute").code == 0
    assert offsets(db, name) == [7, 9]


def test_a_row_of_a_spark_job_is_released_by_the_command_that_the_error_names(
    operate: Command, consumed: str, db: Db, name: str, make_consumer: MakeConsumer
) -> None:
    db.execute(
        "UPDATE exactly_once.ledger SET owner_kind = 'spark', owner_token = gen_random_uuid() WHERE group_id = %s",
        (name,),
    )
    with pytest.raises(OwnedBySpark) as refused:
        read_to_end(make_consumer, consumed)
    mend = suggested(str(refused.value))
    assert mend[0] == "hand-over"
    assert operate(*mend, "--execute").code == 0
    assert operate("reset", "--topic", consumed, "--to-current", "--execute").code == 0
    assert read_to_end(make_consumer, consumed) == []


def test_an_offset_that_retention_has_passed_is_mended_by_the_command_that_the_error_names(
    operate: Command, topic: str, make_consumer: MakeConsumer, bootstrap_servers: str
) -> None:
    read_to_end(make_consumer, topic)
    assert operate("reset", "--topic", topic, "--to-offset", 3, "--execute").code == 0
    for partition in range(2):
        delete_records(bootstrap_servers, topic, 5, partition)
    with pytest.raises(OffsetBelowLogStart) as refused:
        read_to_end(make_consumer, topic)
    assert "below the log start 5; choose where to go on: exactly-once reset " in operate("status").out
    mend = [arg if arg != "N" else "5" for arg in suggested(str(refused.value))]
    assert "\nmessages: 2 that the log has lost are left out, too (" in operate(*mend, "--execute").out
    assert operate("reset", "--topic", topic, "--to-earliest", "--execute").code == 0
    assert read_to_end(make_consumer, topic) == [(p, o) for p in range(2) for o in range(5, 10)]


def test_a_new_group_is_given_its_start_before_it_first_runs(
    operate: Command, topic: str, db: Db, name: str, make_consumer: MakeConsumer
) -> None:
    refused = operate("reset", "--topic", topic, "--partition", 1, "--to-offset", 8, "--execute")
    assert refused.code == 1
    assert "leave out --partition" in refused.err
    assert ledger(db, name) == []
    assert operate("reset", "--topic", topic, "--to-offset", 8, "--execute").code == 0
    assert read_to_end(make_consumer, topic) == [(0, 8), (0, 9), (1, 8), (1, 9)]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--topic", "no-such-topic", "--to-earliest"], "no topic 'no-such-topic'"),
        (["--topic", "{topic}", "--partition", "2", "--to-earliest"], "the topic has 2 partitions"),
        (["--topic", "no-such-topic", "--to-current"], "no rows of topic"),
        (["--topic", "{topic}", "--partition", "7", "--to-current"], "no row of"),
    ],
)
def test_what_is_not_there_is_named(operate: Command, consumed: str, args: list[str], complaint: str) -> None:
    result = operate("reset", *(arg.format(topic=consumed) for arg in args), "--execute")
    assert result.code == 1
    assert complaint in result.err
    assert result.err.startswith("exactly-once: error: ")
    assert result.err.count("\n") == 1


def test_to_committed_makes_no_rows_for_half_a_topic(
    operate: Command, topic: str, db: Db, name: str, bootstrap_servers: str
) -> None:
    """A worker would read the other half from its start, or take its rows for deleted."""
    old = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": name, "enable.auto.commit": False})
    old.commit(offsets=[TopicPartition(topic, 1, 7)], asynchronous=False)
    old.close()
    result = operate("reset", "--topic", topic, "--to-committed", "--execute")
    assert result.code == 1
    assert f"no offset of {topic}[0]" in result.err
    assert offsets(db, name) == []


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_to_committed_goes_on_from_what_another_consumer_has_committed(
    protocol: str, operate: Command, consumed: str, db: Db, name: str, bootstrap_servers: str
) -> None:
    """Back to the old code and forward again. What this library told Kafka moves nothing."""
    result = operate("reset", "--topic", consumed, "--to-committed")
    assert result.code == 1
    assert "that another consumer has committed" in result.err
    settings = {"bootstrap.servers": bootstrap_servers, "group.id": name, "enable.auto.commit": False}
    old = Consumer({**settings, "group.protocol": protocol})
    old.commit(offsets=[TopicPartition(consumed, 1, 7)], asynchronous=False)
    result = operate("reset", "--topic", consumed, "--to-committed", "--json")
    assert [(p["partition"], p["old_offset"], p["new_offset"]) for p in result.partitions] == [(1, 10, 7)]
    left = "left alone, as no other consumer has committed an offset: partitions 0\n"
    assert left in operate("reset", "--topic", consumed, "--to-committed").out
    old.subscribe([consumed])
    until(lambda: old.poll(0.2) is None and old.assignment(), 30, "the old consumer's assignment")
    result = operate("reset", "--topic", consumed, "--to-committed", "--execute")
    assert result.code == 1
    assert "Stop every one of them first" in result.err
    old.close()
    assert operate("reset", "--topic", consumed, "--to-committed", "--execute").code == 0
    assert offsets(db, name) == [10, 7]
    old = Consumer(settings)
    old.commit(offsets=[TopicPartition(consumed, 1, 9)], asynchronous=False)
    result = operate("reset", "--topic", consumed, "--to-committed", "--execute")
    assert "messages: 2 are left out, which another consumer has committed (" in result.out


def test_what_was_done_is_told_where_the_output_cannot_be_written(
    conninfo: str, bootstrap_servers: str, consumed: str, name: str, db: Db
) -> None:
    """It exited with 1, as what is not done, over a full disk; and with 141 where the reader had left."""
    where = ("--conninfo", conninfo, "--bootstrap-servers", bootstrap_servers, "--group-id", name)
    words = [sys.executable, "-m", "exactly_once", "reset", "--topic", consumed, "--to-offset", "3", *where]
    for execute, full, gone in (
        ([], "error: [Errno 28] No space left on device\n", ""),
        (
            ["--execute"],
            "error: [Errno 28] No space left on device: the result is not written, but the change was made\n",
            "exactly-once: the change was made, and whoever read the output has left\n",
        ),
    ):
        with Path("/dev/full").open("w") as output:
            result = subprocess.run([*words, *execute], stdout=output, stderr=subprocess.PIPE, text=True, check=False)
        assert (result.returncode, result.stderr.removeprefix("exactly-once: ")) == (1, full)
        assert offsets(db, name) == ([3, 3] if execute else [10, 10])
        read, write = os.pipe()
        os.close(read)
        left = subprocess.run([*words, *execute], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
        os.close(write)
        assert (left.returncode, left.stderr) == (141, gone)


def test_a_command_that_an_error_names_is_about_the_same_group_and_ledger(
    command: Command, conninfo: str, bootstrap_servers: str, topic: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As printed it was about whatever group and schema the environment of its reader had, or no group at all."""
    group, schema = "group 'of' \"mine\"", f"{topic} Ledger"
    monkeypatch.setenv("EXACTLY_ONCE_CONNINFO", conninfo)
    monkeypatch.setenv("EXACTLY_ONCE_BOOTSTRAP_SERVERS", bootstrap_servers)
    monkeypatch.setenv("EXACTLY_ONCE_GROUP_ID", "another")
    where, rows = ("--group-id", group, "--schema", schema), sql.Identifier(schema, "ledger")
    broken = sql.SQL("UPDATE {} SET topic_id = 'older', halted = 'a bug'").format(rows)
    assert command("migrate", "--schema", schema).code == 0
    try:
        assert command("reset", "--topic", topic, "--to-earliest", *where, "--execute").code == 0
        db.execute(broken)
        (adopt,) = set(re.findall(r"exactly-once adopt .*", command("status", *where).out))
        assert command(*shlex.split(adopt)[1:-1], "--to-offset", 4, "--execute").code == 0  # in place of --to-earliest
        db.execute(broken)
        refused = command("hand-over", "--to", "spark", *where).err
        reset = shlex.split(refused[refused.index("exactly-once reset") :])[1:]
        db.execute(sql.SQL("UPDATE {} SET topic_id = NULL").format(rows))
        assert command(*reset[:-1], 5, "--execute").code == 0  # in place of N
        moved = db.execute(sql.SQL("SELECT group_id, next_offset FROM {} ORDER BY partition").format(rows)).fetchall()
        assert moved == [(group, 5), (group, 4)]
    finally:
        db.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
