"""``exactly-once hand-over``: what is in the way of the new side, releasing it, and where Spark starts."""

from __future__ import annotations

import json
import re
from typing import Any

import psycopg
import pytest

from exactly_once import Fenced, OwnedBySpark
from tests.cli.conftest import Command, audit, ledger, read_to_end, suggested
from tests.conftest import MakeConsumer
from tests.support.topics import add_partitions, create_topic

Db = psycopg.Connection[Any]


def acquire_as_spark(db: Db, name: str) -> None:
    """What the sink's acquisition leaves in the ledger."""
    db.execute(
        "UPDATE exactly_once.ledger SET owner_token = gen_random_uuid(), owner_kind = 'spark', "
        "owner_name = 'spark query q', owner_epoch = owner_epoch + 1 WHERE group_id = %s",
        (name,),
    )


def test_after_a_consumer_that_closed_nothing_is_changed_and_spark_is_told_where_to_start(
    operate: Command, consumed: str, db: Db, name: str
) -> None:
    before = ledger(db, name)
    result = operate("hand-over", "--to", "spark")
    assert (result.code, result.err) == (0, "")
    option = re.search(r"""\.option\("startingOffsets", '(.*)'\)""", result.out)
    assert option is not None
    assert json.loads(option[1]) == {consumed: {"0": 10, "1": 10}}
    assert operate("hand-over", "--to", "spark", "--json").json["starting_offsets"] == {consumed: {"0": 10, "1": 10}}
    assert ledger(db, name) == before


def test_an_owner_in_the_way_is_named_and_its_offsets_are_not_told_before_they_stand(
    operate: Command, topic: str, make_consumer: MakeConsumer, db: Db, name: str
) -> None:
    consumer = make_consumer()
    consumer.subscribe([topic])
    with next(consumer.units()):
        pass
    before = ledger(db, name)
    result = operate("hand-over", "--to", "spark")
    assert result.code == 0
    assert f"owned by consumer {name}-1" in result.out
    assert "dry run: nothing was changed" in result.out
    assert "startingOffsets" not in result.out
    assert ledger(db, name) == before


def test_execute_releases_writes_it_down_and_fences_an_owner_that_lives(
    operate: Command, topic: str, make_consumer: MakeConsumer, db: Db, name: str
) -> None:
    consumer = make_consumer(max_messages=4)
    consumer.subscribe([topic])
    units = consumer.units()
    with next(units) as unit:
        done = len(unit.messages)
    with pytest.raises(Fenced), next(units):  # noqa: PT012 - while the unit is open
        result = operate("hand-over", "--to", "spark", "--execute", "--reason", "a move")
        assert (result.code, result.err) == (0, "")
    starts = operate("hand-over", "--to", "spark", "--json").json["starting_offsets"][topic]
    assert sum(starts.values()) == done
    assert [(n, reason) for n, _, _, reason in audit(db, name, "hand-over")] == [(0, "a move"), (1, "a move")]
    # Twice is once.
    assert operate("hand-over", "--to", "spark", "--execute").code == 0
    assert len(audit(db, name, "hand-over")) == 2


def test_rows_of_spark_keep_a_consumer_out_until_they_are_handed_over(
    operate: Command, topic: str, make_consumer: MakeConsumer, db: Db, name: str
) -> None:
    read_to_end(make_consumer, topic)
    acquire_as_spark(db, name)
    with pytest.raises(OwnedBySpark, match="spark query q") as caught:
        read_to_end(make_consumer, topic)
    assert "owned by spark spark query q" in operate("hand-over", "--to", "consumer").out
    result = operate(*suggested(str(caught.value)), "--execute")
    assert "ready: start the consumer" in result.out
    assert read_to_end(make_consumer, topic) == []


def test_rows_of_spark_are_not_in_the_way_of_spark(operate: Command, consumed: str, db: Db, name: str) -> None:
    acquire_as_spark(db, name)
    before = ledger(db, name)
    result = operate("hand-over", "--to", "spark", "--execute", "--json")
    assert result.json["starting_offsets"] == {consumed: {"0": 10, "1": 10}}
    assert ledger(db, name) == before


def test_a_partition_without_an_offset_starts_at_its_beginning(
    operate: Command, consumed: str, bootstrap_servers: str
) -> None:
    """Spark refuses starting offsets that leave a partition out."""
    add_partitions(bootstrap_servers, consumed, 3)
    starts = operate("hand-over", "--to", "spark", "--json").json["starting_offsets"]
    assert starts == {consumed: {"0": 10, "1": 10, "2": -2}}


def test_of_several_topics_all_are_told_unless_some_are_named(
    operate: Command, consumed: str, make_consumer: MakeConsumer, bootstrap_servers: str
) -> None:
    other = create_topic(bootstrap_servers, 1)
    read_to_end(make_consumer, other)
    assert operate("hand-over", "--to", "spark", "--json").json["starting_offsets"] == {
        consumed: {"0": 10, "1": 10},
        other: {"0": 0},
    }
    named = operate("hand-over", "--to", "spark", "--topic", other, "--json")
    assert named.json["starting_offsets"] == {other: {"0": 0}}


def test_offsets_that_the_log_does_not_have_are_refused(operate: Command, consumed: str, db: Db, name: str) -> None:
    db.execute("UPDATE exactly_once.ledger SET next_offset = 99 WHERE group_id = %s AND partition = 1", (name,))
    result = operate("hand-over", "--to", "spark")
    assert result.code == 1
    assert f"{consumed}[1] of group '{name}': beyond the log end" in result.err


def test_a_halted_partition_is_refused_with_the_command_that_mends_it(
    operate: Command, consumed: str, db: Db, name: str
) -> None:
    db.execute("UPDATE exactly_once.ledger SET halted = 'odd' WHERE group_id = %s AND partition = 1", (name,))
    result = operate("hand-over", "--to", "consumer")
    assert result.code == 1
    assert operate(*[arg if arg != "N" else "10" for arg in suggested(result.err)], "--execute").code == 0
    assert operate("hand-over", "--to", "consumer").code == 0


def test_an_unknown_group_or_topic_is_said(operate: Command, consumed: str, command: Command, conninfo: str) -> None:
    result = command("hand-over", "--to", "consumer", "--conninfo", conninfo, "--group-id", "nobody")
    assert result.code == 1
    assert "no offsets of group 'nobody'" in result.err
    assert "no rows of topic 'nothing'" in operate("hand-over", "--to", "consumer", "--topic", "nothing").err


def test_status_shows_what_spark_queries_wrote_last(operate: Command, consumed: str, db: Db, name: str) -> None:
    acquire_as_spark(db, name)
    db.execute(
        "INSERT INTO exactly_once.spark_query (group_id, query_id, run_id, batch_id, row_count, dropped) "
        "VALUES (%s, 'q', 'r', 7, 20, 1)",
        (name,),
    )
    (found,) = operate("status", "--json").json["queries"]
    assert (found["query_id"], found["run_id"], found["batch_id"], found["rows"]) == ("q", "r", 7, 20)
    text = operate("status").out.splitlines()
    assert all("  spark query q (Spark)  " in line for line in text[2:4])
    header = next(number for number, line in enumerate(text) if line.startswith("GROUP"))
    assert re.split(r"  +", text[header])[:6] == ["GROUP", "SPARK QUERY", "RUN", "BATCH", "ROWS", "DROPPED"]
    assert text[header + 1].split()[:6] == [name, "q", "r", "7", "20", "1"]


def test_status_shows_a_group_that_counts_batches_and_has_no_offsets(operate: Command, db: Db, name: str) -> None:
    insert = "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset) VALUES (%s, 'query:q', 0, 4)"
    db.execute(insert, (name,))
    assert operate("status", "--json").json["queries"][0]["counted_batch_id"] == 3
    assert "no rows" not in operate("status").out
    assert operate("status", "--check").code == 0


def test_a_query_that_is_halted_is_seen(operate: Command, db: Db, name: str) -> None:
    db.execute(
        "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset, halted) "
        "VALUES (%s, 'query:q', 0, 4, 'why')",
        (name,),
    )
    reset = f"exactly-once reset --group-id {name} --topic query:q --to-batch"
    halted = (
        f"group {name}, Spark query q halted: why. Look whether the rows of batch 4 are in the table. If they are "
        f"there and right: {reset} 4; if they are not, or once you have taken them out: {reset} 3\n"
    )
    assert operate("status").out.endswith(f"\n! {halted}")
    checked = operate("status", "--check")
    assert (checked.code, checked.out) == (1, halted)


def test_of_several_queries_one_is_named_to_reset_its_batches(
    operate: Command, consumed: str, db: Db, name: str
) -> None:
    """The rows are no partitions: Kafka is not asked for them, and nobody hands them over."""
    insert = "INSERT INTO exactly_once.ledger (group_id, topic, partition, next_offset) VALUES (%s, %s, 0, 4)"
    for query in ("a", "b"):
        db.execute(insert, (name, f"query:{query}"))
    assert operate("status", "--check").code == 0
    found = operate("status", "--json").json
    assert {row["topic"] for row in found["partitions"]} == {consumed}
    assert [(row["query_id"], row["counted_batch_id"]) for row in found["queries"]] == [("a", 3), ("b", 3)]
    handed = operate("hand-over", "--to", "consumer", "--json").json
    assert {row["topic"] for row in handed["partitions"]} == {consumed}
    refused = operate("reset", "--to-batch", "1", "--execute")
    assert (refused.code, "--topic query:a or --topic query:b" in refused.err) == (1, True)
    assert operate("reset", "--topic", "query:a", "--to-offset", "1").code == 2
    assert operate("reset", "--topic", "query:a", "--to-batch", "1", "--execute").code == 0
    look = "SELECT next_offset FROM exactly_once.ledger WHERE group_id = %s AND topic LIKE 'query:%%' ORDER BY topic"
    assert db.execute(look, (name,)).fetchall() == [(2,), (4,)]
