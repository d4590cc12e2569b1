"""``exactly-once dead-letters``: what was set aside is seen whole, and replayed or dropped once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from psycopg.conninfo import make_conninfo

from exactly_once import Unit
from tests.cli.conftest import Command, ledger
from tests.conftest import MakeConsumer
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
HANDLERS = "tests.cli.replay_handlers"
DEAD = [(0, 3), (0, 4), (1, 3), (1, 4)]
Db = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def _replayed(db: Db) -> Iterator[None]:
    db.execute('CREATE TABLE replayed (topic text, partition int, "offset" bigint, identity text)')
    yield
    db.execute("DROP TABLE replayed")


@dataclass(frozen=True)
class Dead:
    """The dead letters of this test's group: ids and the messages' identities by partition and offset."""

    topic: str
    conninfo: str
    db: Db
    ids: dict[tuple[int, int], int]
    identities: dict[tuple[int, int], str]

    def __getitem__(self, place: tuple[int, int]) -> int:
        return self.ids[place]

    def replayed(self) -> list[tuple[int, int]]:
        """The effects of replays."""
        rows = self.db.execute('SELECT partition, "offset" FROM replayed WHERE topic = %s', [self.topic])
        return sorted(rows.fetchall())

    def statuses(self) -> list[str]:
        """What became of the letters, in the order of the log."""
        query = "SELECT status FROM exactly_once.dead_letter WHERE topic = %s ORDER BY partition, message_offset"
        return [status for (status,) in self.db.execute(query, [self.topic])]


@pytest.fixture
def dead(topic: str, conninfo: str, make_consumer: MakeConsumer, db: Db) -> Dead:
    """A topic that the group has read, with four messages set aside."""
    identities: dict[tuple[int, int], str] = {}

    def refuse(unit: Unit) -> None:
        for message in unit.messages:
            place = (message.partition() or 0, message.offset() or 0)
            if place in DEAD:
                identities[place] = unit.identity(message).text
                raise ValueError(f"no payment: {message.value()!r} \x1b[31m")

    with make_consumer() as consumer:
        consumer.subscribe([topic])
        consumer.run(refuse, on_poison="dead-letter", until_end=True)
    rows = db.execute("SELECT partition, message_offset, id FROM exactly_once.dead_letter WHERE group_id = %s", [topic])
    found = {(partition, offset): number for partition, offset, number in rows}
    assert sorted(found) == DEAD
    return Dead(topic, conninfo, db, found, identities)


@pytest.fixture
def letters(operate: Command) -> Command:
    """Run a command of `exactly-once dead-letters` on this test's group."""

    def run(*args: object) -> Any:
        return operate("dead-letters", *args)

    return run


# Looking.


def test_list_shows_what_is_dead_in_the_order_of_the_log(letters: Command, dead: Dead) -> None:
    shown = letters("list")
    assert shown.code == 0
    header, *lines = shown.out.splitlines()
    assert header.split()[:5] == ["ID", "GROUP", "PARTITION", "OFFSET", "KEY"]
    found = [re.match(r"\s*(\d+)  \S+  \S+\[(\d+)\]\s+(\d+)  (\d+)  ", line) for line in lines]
    keys = [letter["key"] for letter in letters("list", "--json").json["dead_letters"]]
    assert [tuple(map(int, e.groups())) for e in found if e] == [
        (dead[p], *p, int(key)) for p, key in zip(DEAD, keys, strict=True)
    ]
    assert all("ValueError: no payment: b'" in line for line in lines)
    assert "\x1b" not in shown.out


def test_a_timestamp_that_is_no_date_is_shown_in_milliseconds(letters: Command, dead: Dead) -> None:
    """Brokers before 4.0 take any; the test's own would refuse it."""
    for number, place in zip((2**62, 253402300800000, -(2**62)), DEAD, strict=False):
        dead.db.execute("UPDATE exactly_once.dead_letter SET timestamp_ms = %s WHERE id = %s", (number, dead[place]))
    assert letters("list").code == 0
    stamps = [letter["timestamp"] for letter in letters("list", "--json").json["dead_letters"]]
    assert stamps[:3] == [2**62, 253402300800000, -(2**62)]
    assert datetime.fromisoformat(stamps[3]).tzinfo is not None
    assert str(2**62) in letters("show", dead[DEAD[0]]).out


def test_list_fits_the_terminal(letters: Command, dead: Dead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = letters("list").out.splitlines()
    assert len(shown) == 1 + len(DEAD)
    assert max(map(len, shown)) <= 80


def test_list_can_be_narrowed(letters: Command, dead: Dead) -> None:
    def places(*args: object) -> list[tuple[int, int]]:
        found = letters("list", "--json", *args).json["dead_letters"]
        return [(letter["partition"], letter["message_offset"]) for letter in found]

    assert places() == DEAD
    assert places("--partition", 1) == [(1, 3), (1, 4)]
    assert places("--topic", "another") == []
    assert places("--topic", dead.topic, "--limit", 1) == [(0, 3)]
    assert places(dead[0, 4]) == [(0, 4)]
    letters("drop", dead[0, 3], "--execute")
    assert places() == DEAD[1:]
    assert places("--all") == DEAD


@pytest.mark.parametrize("which", ["by id", "by topic"])
def test_list_tells_that_there_are_more(which: str, letters: Command, dead: Dead) -> None:
    meant = sorted(dead.ids.values()) if which == "by id" else ["--topic", dead.topic]
    for limit, told in ((3, "there are more than these 3: --limit N shows more\n"), (4, "")):
        listed = letters("list", *meant, "--limit", limit)
        assert (listed.code, len(listed.out.splitlines()) - 1, listed.err) == (0, limit, told)
    refused = letters("list", "--limit", 0)
    assert refused.code == 2
    assert "0 must be a whole number above 0" in refused.err


def test_empty_list_says_so(letters: Command) -> None:
    assert letters("list").out == "there are no dead letters\n"
    assert letters("list", "--json").json == {"dead_letters": []}


def test_show_tells_everything(letters: Command, dead: Dead, name: str) -> None:
    (document,) = letters("show", dead[1, 3], "--json").json["dead_letters"]
    expected = {
        "id": dead[1, 3],
        "group_id": name,
        "topic": dead.topic,
        "partition": 1,
        "message_offset": 3,
        "key": "7",
        "value": "7",
        "headers": [],
        "error_class": "builtins.ValueError",
        "error": "no payment: b'7' \x1b[31m",
        "status": "dead",
        "settled_at": None,
        "timestamp_type": "CreateTime",
    }
    assert expected.items() <= document.items()
    assert datetime.fromisoformat(document["timestamp"]).tzinfo is not None, "the message's, in no zone but a named one"
    text = letters("show", dead[1, 3]).out
    assert "message_offset  3" in text
    assert "no payment: b'7'" in text
    assert "\x1b" not in text, "a terminal is left alone"


def test_bytes_that_are_no_text_are_shown_in_base64(
    letters: Command, topic: str, make_consumer: MakeConsumer, bootstrap_servers: str
) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    headers: list[tuple[str, str | bytes | None]] = [("h", b"\xff"), ("h", None)]
    producer.produce(topic, b"\xfe\x00", b"key", partition=1, headers=headers)
    producer.flush(60)
    with make_consumer() as consumer:
        consumer.subscribe([topic])
        for unit in consumer.units(until_end=True):
            with unit:
                for message in unit.messages:
                    if message.headers():
                        unit.dead_letter(message, "not now")
    (document,) = letters("list", "--json").json["dead_letters"]
    assert (document["key"], document["value"]) == ("key", "base64:/gA=")
    assert document["headers"] == [["h", "base64:/w=="], ["h", None]]


def test_show_wants_ids_or_a_topic_and_unknown_ids_are_named(letters: Command, dead: Dead) -> None:
    assert letters("show").code == 2
    shown = letters("show", "--topic", dead.topic, "--json").json["dead_letters"]
    assert [letter["id"] for letter in shown] == [dead.ids[place] for place in sorted(dead.ids)]
    assert letters("show", "--topic", "another", "--json").json["dead_letters"] == []
    refused = letters("show", dead[0, 3], 999_999_998, 999_999_999)
    assert refused.code == 1
    assert "no such dead letter: 999999998, 999999999;" in refused.err


def test_missing_schema_names_the_command_that_makes_it(letters: Command) -> None:
    refused = letters("list", "--schema", "never_made")
    assert refused.code == 1
    assert "exactly-once migrate" in refused.err


# Dropping.


def test_drop_is_a_dry_run_unless_told(letters: Command, dead: Dead) -> None:
    shown = letters("drop", "--topic", dead.topic)
    assert shown.code == 0
    assert "dry run: 4 would be dropped; --execute does it" in shown.err
    assert dead.statuses() == ["dead"] * 4
    assert letters("drop", dead[0, 3], dead[1, 4], "--execute").out == "2 of 2 dropped\n"
    assert dead.statuses() == ["dropped", "dead", "dead", "dropped"]
    query = "SELECT settled_by = session_user, settled_at IS NOT NULL FROM exactly_once.dead_letter WHERE id = %s"
    assert dead.db.execute(query, [dead[0, 3]]).fetchone() == (True, True)


def test_drop_of_everything_must_be_meant(letters: Command, dead: Dead) -> None:
    refused = letters("drop", "--execute")
    assert refused.code == 2
    assert "their ids, or --topic" in refused.err


def test_dropped_letter_is_not_dropped_or_replayed_again(letters: Command, dead: Dead) -> None:
    letters("drop", dead[0, 3], "--execute")
    for again in (["drop", dead[0, 3]], ["replay", dead[0, 3], "--handler", f"{HANDLERS}:apply"]):
        refused = letters(*again, "--execute")
        assert refused.code == 1
        assert f"some are dead no more: {dead[0, 3]} was dropped; leave them out" in refused.err
    assert "  dropped  " in letters("list", dead[0, 3]).out


@pytest.mark.parametrize("what", ["all is known", "brokers are away", "ids of letters are unknown"])
def test_reset_drops_the_letters_whose_messages_come_again(
    what: str, command: Command, dead: Dead, bootstrap_servers: str, conninfo: str
) -> None:
    """Else the log brings a message once, and a replay of its letter a second time."""
    where = ["--group-id", dead.topic, "--conninfo", conninfo]
    where += ["--force"] if what == "brokers are away" else ["--bootstrap-servers", bootstrap_servers]
    if what == "ids of letters are unknown":
        dead.db.execute("UPDATE exactly_once.dead_letter SET topic_id = NULL WHERE topic = %s", [dead.topic])
    reset = ["reset", "--topic", dead.topic, "--to-offset", 4, *where]
    planned = command(*reset)
    assert f"would be dropped for that: 2 ({dead.topic}[0] offset 4, {dead.topic}[1] offset 4)" in planned.out
    assert dead.statuses() == ["dead"] * 4
    done = command(*reset, "--execute", "--json")
    assert done.json["dead_letters"] == [dead[0, 4], dead[1, 4]]
    assert dead.statuses() == ["dead", "dropped"] * 2
    assert "dead letters" not in command("reset", "--topic", dead.topic, "--to-current", *where).out


def test_reset_leaves_the_letters_of_another_topic_of_the_name(command: Command, dead: Dead, conninfo: str) -> None:
    dead.db.execute("UPDATE exactly_once.dead_letter SET topic_id = 'former' WHERE topic = %s", [dead.topic])
    reset = ["reset", "--topic", dead.topic, "--to-offset", 0, "--group-id", dead.topic, "--conninfo", conninfo]
    assert command(*reset, "--force", "--execute", "--json").json["dead_letters"] == []
    assert dead.statuses() == ["dead"] * 4


def test_drop_as_json(letters: Command, dead: Dead) -> None:
    document = letters("drop", dead[0, 3], "--execute", "--json").json
    assert [(each["id"], each["status"]) for each in document["dead_letters"]] == [(dead[0, 3], "dropped")]


# Replaying.


def test_replay_applies_each_letter_once_and_leaves_the_ledger(letters: Command, dead: Dead) -> None:
    before = ledger(dead.db, dead.topic)
    dry = letters("replay", "--handler", f"{HANDLERS}:apply")
    assert (dry.code, dead.replayed()) == (0, [])
    assert f"dry run: 4 would be replayed by {HANDLERS}:apply" in dry.err
    done = letters("replay", "--handler", f"{HANDLERS}:apply", "--execute")
    assert (done.code, done.out.splitlines()[-1]) == (0, "4 of 4 replayed")
    assert f"{dead[0, 3]}  {dead.topic}[0] offset 3  replayed" in done.out
    assert dead.replayed() == DEAD
    assert dead.statuses() == ["replayed"] * 4
    assert ledger(dead.db, dead.topic) == before
    rows = dead.db.execute('SELECT partition, "offset", identity FROM replayed')
    # The key that an outside API was given when the message failed.
    assert {(partition, offset): identity for partition, offset, identity in rows} == dead.identities
    assert letters("replay", "--handler", f"{HANDLERS}:apply", "--execute").out == "0 of 0 replayed\n"


@pytest.mark.parametrize("isolation", [None, "REPEATABLE READ", "SERIALIZABLE"])
def test_replay_runs_at_the_isolation_of_the_consumer(isolation: str | None, letters: Command, dead: Dead) -> None:
    given = () if isolation is None else ("--isolation", isolation)
    assert letters("replay", "--handler", f"{HANDLERS}:tell_isolation", *given, "--execute").code == 0
    found = dead.db.execute("SELECT DISTINCT identity FROM replayed").fetchall()
    assert found == [((isolation or "READ COMMITTED").lower(),)]


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        ("refuse_odd", "ValueError: odd  [31m still"),
        ("refuse_odd_without_words", "_Unsayable"),
        ("ask_for_another_try_of_odd", "Redelivered: the API is away"),
        ("swallow_for_odd", "TransactionAborted: a SQL error was swallowed"),
        ("roll_back_for_odd", "TransactionEnded: the handler ended the transaction"),
        ("write_read_only_for_odd", "ReadOnlySqlTransaction"),
        ("miss_a_table_for_odd", "UndefinedTable"),
    ],
)
def test_replay_that_fails_again_leaves_the_letter_dead_and_goes_on(
    handler: str, why: str, letters: Command, dead: Dead
) -> None:
    done = letters("replay", "--handler", f"{HANDLERS}:{handler}", "--execute")
    assert done.code == 1
    assert f"{dead[0, 3]}  {dead.topic}[0] offset 3  failed again  {why}" in done.out
    assert done.out.splitlines()[-1] == "2 of 4 replayed"
    assert dead.replayed() == [(0, 4), (1, 4)]
    assert dead.statuses() == ["dead", "replayed"] * 2


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        ("meet_conflicts", "of the test"),
        ("lose_connection_at_4", "the database driver failed"),
        ("find_data_corrupted_at_4", "of the test"),
        ("be_cancelled_at_4", "of the test"),
    ],
)
def test_replay_ends_where_the_letter_is_not_at_fault(handler: str, why: str, letters: Command, dead: Dead) -> None:
    done = letters("replay", "--handler", f"{HANDLERS}:{handler}", "--execute")
    assert done.code == 1
    assert f"1 of 4 replayed; at {dead.topic}[0] offset 4 (dead letter {dead[0, 4]}) the server" in done.err
    assert why in done.err
    assert "failed again" not in done.out
    assert dead.replayed() == [(0, 3)]
    assert dead.statuses() == ["replayed", "dead", "dead", "dead"]
    assert letters("replay", "--handler", f"{HANDLERS}:apply", "--execute").out.endswith("3 of 3 replayed\n")
    assert dead.replayed() == DEAD


def test_replay_ends_before_a_handler_if_the_server_takes_no_writes(
    letters: Command, dead: Dead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_read_only=on")
    done = letters("replay", "--handler", f"{HANDLERS}:apply", "--execute")
    assert (done.code, done.out) == (1, "")
    assert "0 of 4 replayed; at" in done.err
    assert "default_transaction_read_only is on" in done.err
    assert dead.statuses() == ["dead"] * 4


def test_replay_as_json(letters: Command, dead: Dead) -> None:
    done = letters("replay", "--handler", f"{HANDLERS}:refuse_odd", "--partition", 0, "--execute", "--json")
    assert done.code == 1
    assert done.json["dead_letters"] == [
        {
            "id": dead[0, 3],
            "place": f"{dead.topic}[0] offset 3",
            "outcome": "failed again",
            "error": "ValueError: odd \x1b[31m still",
        },
        {"id": dead[0, 4], "place": f"{dead.topic}[0] offset 4", "outcome": "replayed"},
    ]


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        ("apply", "write it as package.module:function"),
        (":apply", "write it as package.module:function"),
        ("no_such_module:apply", "No module named 'no_such_module'"),
        (f"{HANDLERS}:never", "has no function never"),
        (f"{HANDLERS}:NO_HANDLER", "has no function NO_HANDLER"),
    ],
)
def test_wrong_handler_is_refused_before_anything_happens(handler: str, why: str, letters: Command, dead: Dead) -> None:
    refused = letters("replay", "--handler", handler, "--execute")
    assert refused.code == 2
    assert why in refused.err
    assert dead.statuses() == ["dead"] * 4


def test_a_program_that_ends_when_it_is_imported_is_no_replay_that_is_done(
    letters: Command, dead: Dead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program_without_a_guard.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    refused = letters("replay", "--handler", "program_without_a_guard:apply", "--execute")
    assert refused.code == 2
    assert "program_without_a_guard is a program, which ended when it was imported" in refused.err
    assert dead.statuses() == ["dead"] * 4


def test_replay_of_several_groups_with_one_handler_is_refused(command: Command, conninfo: str, dead: Dead) -> None:
    dead.db.execute("UPDATE exactly_once.dead_letter SET group_id = 'another' WHERE id = %s", [dead[0, 3]])
    where = ("--conninfo", conninfo, "--topic", dead.topic)
    refused = command("dead-letters", "replay", "--handler", f"{HANDLERS}:apply", "--execute", *where)
    assert refused.code == 2
    assert f"several groups, and have one handler each: another, {dead.topic}" in refused.err
    assert dead.statuses() == ["dead"] * 4
    assert len(command("dead-letters", "list", "--json", *where).json["dead_letters"]) == 4


def test_handler_that_commits_is_told_and_its_letter_is_marked(letters: Command, dead: Dead) -> None:
    """The effect is durable, so another replay would double it; the rest is not begun."""
    refused = letters("replay", "--handler", f"{HANDLERS}:commit_and_fail", "--execute")
    assert refused.code == 1
    assert f"dead letter {dead[0, 3]} ({dead.topic}[0] offset 3)" in refused.err
    assert "the handler committed" in refused.err
    assert dead.replayed() == [(0, 3)]
    assert dead.statuses() == ["replayed", "dead", "dead", "dead"]


def test_handler_that_leaves_the_process_undoes_its_replay(letters: Command, dead: Dead) -> None:
    left = letters("replay", "--handler", f"{HANDLERS}:leave", "--execute")
    assert (left.code, f"the handler ended the command at {dead.topic}[0] offset 3; 0 of 4" in left.err) == (7, True)
    assert (dead.replayed(), dead.statuses()) == ([], ["dead"] * 4)


def test_handler_that_leaves_as_if_all_was_done_has_failed_again(letters: Command, dead: Dead) -> None:
    done = letters("replay", "--handler", f"{HANDLERS}:leave_well", "--execute")
    assert (done.code, done.out.splitlines()[-1]) == (1, "0 of 4 replayed")
    assert done.out.count("failed again  SystemExit: 0") == 4
    assert (dead.replayed(), dead.statuses()) == ([], ["dead"] * 4)


@pytest.mark.parametrize("style", ["German", "SQL,DMY", "Postgres"])
def test_no_date_style_of_a_database_stops_a_command(
    command: Command, dead: Dead, bootstrap_servers: str, style: str
) -> None:
    replayed, dropped, *_ = dead.ids.values()
    there = make_conninfo(dead.conninfo, options=f"-c datestyle={style}")
    where = ("--conninfo", there, "--bootstrap-servers", bootstrap_servers, "--group-id", dead.topic)
    for words in (
        ("status",),
        ("status", "--check"),
        ("publish", "status"),
        ("reset", "--topic", dead.topic, "--to-current", "--execute"),
        ("hand-over", "--to", "spark", "--execute"),
        ("dead-letters", "list"),
        ("dead-letters", "show", dropped),
        ("dead-letters", "replay", replayed, "--handler", f"{HANDLERS}:apply", "--execute"),
        ("dead-letters", "drop", dropped, "--execute"),
    ):
        done = command(*words, *where)
        assert done.code == 0, (words, done)
    assert sorted(dead.statuses()) == ["dead", "dead", "dropped", "replayed"]
    (letter,) = command("dead-letters", "show", dropped, *where, "--json").json["dead_letters"]
    assert abs((datetime.now(UTC) - datetime.fromisoformat(letter["settled_at"])).total_seconds()) < 300


def test_letters_settled_by_somebody_else_meanwhile_are_left_alone(letters: Command, dead: Dead) -> None:
    done = letters("replay", "--handler", f"{HANDLERS}:drop_the_others", "--execute")
    assert done.code == 0
    assert done.out.count("was settled by somebody else meanwhile") == 3
    assert done.out.splitlines()[-1] == "1 of 4 replayed"
    assert dead.replayed() == [(0, 3)]
    assert dead.statuses() == ["replayed", "dropped", "dropped", "dropped"]


@pytest.mark.parametrize(
    ("action", "ends", "outcome"),
    [
        ("replay", "COMMIT", "0 of 1 replayed"),
        ("replay", "ROLLBACK", "1 of 1 replayed"),
        ("drop", "COMMIT", "0 of 1 dropped"),
        ("drop", "ROLLBACK", "1 of 1 dropped"),
    ],
)
def test_letter_that_somebody_else_is_settling_waits_for_how_that_ends(
    action: str, ends: str, outcome: str, letters: Command, dead: Dead
) -> None:
    number = dead[0, 3]
    with psycopg.connect(dead.conninfo, autocommit=True) as other:
        other.execute("BEGIN")
        other.execute("UPDATE exactly_once.dead_letter SET status = 'dropped' WHERE id = %s", [number])

        def end() -> None:
            waiting = "SELECT 1 FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
            until(lambda: dead.db.execute(waiting, [other.info.backend_pid]).fetchall(), 20, "the command to wait")
            other.execute(ends.encode())

        thread = threading.Thread(target=end)
        thread.start()
        how = ["--handler", f"{HANDLERS}:apply"] if action == "replay" else []
        done = letters(action, number, *how, "--execute")
        thread.join()
    assert (done.code, done.out.splitlines()[-1]) == (0, outcome)
    assert dead.statuses()[0] == ("replayed" if outcome == "1 of 1 replayed" else "dropped")


@pytest.mark.parametrize("failpoint", ["begun", "handled", "guarded", "advanced", "committed"])
def test_killed_in_the_middle_of_a_replay_it_ends_exact(failpoint: str, letters: Command, dead: Dead) -> None:
    """At the second letter: each is dead without its effect, or replayed with it; the next replay finishes."""
    arguments = ["dead-letters", "replay", "--group-id", dead.topic, "--handler", f"{HANDLERS}:apply", "--execute"]
    environment = {**os.environ, "CRASH_AT": failpoint, "EXACTLY_ONCE_CONNINFO": dead.conninfo}
    command = [sys.executable, "-m", "exactly_once", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    first = {"committed": DEAD[:2]}.get(failpoint, DEAD[:1])
    _until_rolled_back(dead.db)
    assert dead.replayed() == first
    assert dead.statuses() == ["replayed"] * len(first) + ["dead"] * (4 - len(first))
    assert letters("replay", "--handler", f"{HANDLERS}:apply", "--execute").code == 0
    assert dead.replayed() == DEAD
    assert dead.statuses() == ["replayed"] * 4


def _until_rolled_back(db: Db) -> None:
    """Wait until the server has noticed the end of the killed process."""
    query = "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'exactly_once:%' AND xact_start < now()"
    until(lambda: not db.execute(query).fetchall(), 20, "the transaction of the killed process to end")
