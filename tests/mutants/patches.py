"""The patches: what is taken away, where, and which tests must notice."""

from __future__ import annotations

from dataclasses import dataclass

LEDGER = "exactly_once/ledger/sql/migrations/0001_ledger.sql"
QUERIES = "exactly_once/ledger/sql/queries.sql"
PUBLISH = "exactly_once/ledger/sql/migrations/0003_publish.sql"
LETTERS = "exactly_once/ledger/sql/dead_letters.sql"
CONFLICT = "exactly_once/ledger/conflict.py"

ROWS = "tests/integration/test_ledger.py"
GENERATIONS = "tests/integration/test_generations.py"
SHORT = "tests/integration/test_short_advance.py"
FROZEN = "tests/integration/test_frozen_owner.py"
RANGE = "tests/integration/test_out_of_range.py"
OWNERSHIP = "tests/unit/test_ownership.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One patch: `old` occurs in the file, and its occurrence number `nth` becomes `new`."""

    name: str
    what: str
    """What is wrong then, for the table."""
    file: str
    old: str
    new: str
    killers: tuple[str, ...]
    """What pytest is given: files, or tests of them; together they must fail."""
    nth: int = 1


def _advance(name: str, what: str, condition: str, *, nth: int, new: str = "true") -> Mutant:
    """One of the conditions of a fence, which is written for one partition and for several."""
    return Mutant(
        name, what, LEDGER, condition, new, (f"{ROWS}::test_one_wrong_partition_refuses_the_whole_advance",), nth
    )


MUTANTS = (
    # The fence: advance() of one partition, and of several.
    _advance("one-token", "one partition: a zombie's token passes", "l.owner_token = tokens[1]", nth=1),
    _advance("one-epoch", "one partition: an older epoch passes", "l.owner_epoch = epochs[1]", nth=1),
    _advance(
        "one-topic", "one partition: another topic of the name", "l.topic_id IS NOT DISTINCT FROM topic_ids[1]", nth=1
    ),
    _advance("one-offset", "one partition: the offset is not compared", "l.next_offset = expected[1]", nth=1),
    _advance("many-token", "several: a zombie's token passes", "l.owner_token = a.token", nth=1),
    _advance("many-epoch", "several: an older epoch passes", "l.owner_epoch = a.epoch", nth=1),
    _advance("many-topic", "several: another topic of the name", "l.topic_id IS NOT DISTINCT FROM a.topic_id", nth=1),
    _advance("many-offset", "several: the offset is not compared", "l.next_offset = a.expected", nth=1),
    Mutant(
        "short-count",
        "some of a unit's rows move, others do not",
        LEDGER,
        "moved <> cardinality(partitions)",
        "false",
        (ROWS, SHORT),
    ),
    Mutant(
        "foreign",
        "an advance in another transaction than the unit's",
        LEDGER,
        "pg_current_xact_id() <> unit_xid",
        "false",
        (ROWS,),
    ),
    Mutant(
        "same-generation",
        "a rotation leaves the number of the row",
        LEDGER,
        "g.generation + 1",
        "g.generation",
        (GENERATIONS,),
    ),
    Mutant(
        "rotate-halted",
        "a rotation forgets that a partition is halted",
        LEDGER,
        "g.application, g.halted,",
        "g.application, NULL,",
        (GENERATIONS,),
    ),
    # Locks.
    Mutant(
        "no-lock",
        "rows are read while somebody changes them",
        LEDGER,
        "        LIMIT 1\n        FOR UPDATE;",
        "        LIMIT 1;",
        (ROWS, GENERATIONS),
    ),
    Mutant(
        "missing-at-once",
        "a row that is being replaced counts as missing",
        LEDGER,
        "        EXIT WHEN NOT FOUND;",
        "        EXIT;",
        (GENERATIONS,),
    ),
    Mutant(
        "release-waits",
        "a release waits for rows that are being decided about",
        QUERIES,
        "FOR UPDATE SKIP LOCKED",
        "FOR UPDATE",
        (ROWS,),
    ),
    Mutant(
        "release-anybody",
        "a release of somebody else's row",
        QUERIES,
        "    WHERE l.owner_token = w.token)\nUPDATE",
        "    WHERE true)\nUPDATE",
        (ROWS,),
    ),
    # Acquisition.
    Mutant(
        "acquire-epoch",
        "an acquisition keeps the epoch",
        QUERIES,
        "SET owner_epoch = l.owner_epoch + 1, owner_token = %(token)s",
        "SET owner_epoch = l.owner_epoch, owner_token = %(token)s",
        (ROWS,),
    ),
    Mutant(
        "resolve-anybody",
        "resolving takes rows of another owner",
        QUERIES,
        "  AND l.owner_token = ANY(%(tokens)s::uuid[])\n",
        "",
        (ROWS,),
    ),
    Mutant(
        "resolve-same-token",
        "an attempt still on its way is not fenced",
        QUERIES,
        "SET owner_token = %(token)s\nFROM unnest",
        "SET owner_token = l.owner_token\nFROM unnest",
        (ROWS,),
    ),
    Mutant(
        "start-twice",
        "a start moves an offset that is there",
        QUERIES,
        "WHERE l.owner_token = s.token AND l.next_offset IS NULL",
        "WHERE l.owner_token = s.token",
        (ROWS,),
    ),
    Mutant(
        "start-anybody",
        "a start by who does not own the row",
        QUERIES,
        "WHERE l.owner_token = s.token AND l.next_offset IS NULL",
        "WHERE l.next_offset IS NULL",
        (ROWS,),
    ),
    Mutant(
        "correct-anybody",
        "a fenced owner moves an offset out of range",
        QUERIES,
        "AND l.generation = %(generation)s AND l.owner_token = %(token)s",
        "AND l.generation = %(generation)s",
        (ROWS, RANGE),
    ),
    Mutant(
        "correct-stale",
        "an offset that went on is moved back",
        QUERIES,
        "AND l.next_offset = %(old_offset)s\n",
        "\n",
        (ROWS, RANGE),
    ),
    Mutant(
        "halt-anybody",
        "a handler that committed halts the next owner's row",
        QUERIES,
        "coalesce(l.next_offset, 0) <= w.expected",
        "true",
        ("tests/integration/test_handler_breaks_contract.py",),
    ),
    Mutant(
        "halt-owner",
        "whoever owns a halted row goes on",
        QUERIES,
        "SET halted = %(reason)s, owner_epoch = l.owner_epoch + 1, owner_token = NULL",
        "SET halted = %(reason)s",
        ("tests/integration/test_handler_breaks_contract.py",),
    ),
    Mutant(
        "register-again",
        "registering makes a second row of a later generation",
        QUERIES,
        "    WHERE NOT EXISTS (\n        SELECT FROM {schema}.ledger l\n",
        "    WHERE true OR NOT EXISTS (\n        SELECT FROM {schema}.ledger l\n",
        (GENERATIONS,),
    ),
    # Who is ended.
    Mutant(
        "blockers-schema",
        "owners of another schema are ended",
        QUERIES,
        "        AND substr(a.application_name, 51, 8) = substr(%(tag)s, 51, 8)\n",
        "",
        (FROZEN,),
    ),
    Mutant(
        "blockers-role",
        "backends of another role are ended",
        QUERIES,
        "        AND a.usename = session_user) AS b",
        "        ) AS b",
        (FROZEN,),
    ),
    Mutant(
        "blockers-marker",
        "backends without our marker are ended",
        QUERIES,
        "a.application_name LIKE 'exactly\\_once:%%'",
        "true",
        (FROZEN,),
    ),
    Mutant(
        "blockers-later",
        "transactions begun after the row was taken are ended",
        QUERIES,
        " AND b.xact_start < l.acquired_at)",
        ")",
        (FROZEN,),
    ),
    Mutant(
        "blockers-alive",
        "who shows a sign of life is ended",
        QUERIES,
        "   OR NOT b.lives AND b.wait_event = 'ClientRead'",
        "   OR b.wait_event = 'ClientRead'",
        (FROZEN,),
    ),
    # What became of a transaction.
    Mutant(
        "incarnation",
        "an id of before a crash is believed",
        QUERIES,
        "WHEN {incarnation} <> %(incarnation)s THEN 'restarted'",
        "WHEN false THEN 'restarted'",
        ("tests/integration/test_incarnation.py",),
    ),
    Mutant(
        "end-anybody",
        "a transaction with the same id of another life is ended",
        QUERIES,
        "  AND {incarnation} = %(incarnation)s\n\n-- name: give_time",
        "\n-- name: give_time",
        ("tests/integration/test_incarnation.py",),
    ),
    # Dead letters.
    Mutant(
        "letter-twice",
        "a dead letter is settled twice",
        LETTERS,
        "WHERE id = %(id)s AND status = 'dead'",
        "WHERE id = %(id)s",
        ("tests/cli/test_dead_letters.py", "tests/integration/test_poison.py"),
    ),
    # Publishing.
    Mutant(
        "reserve-fenced",
        "a fenced owner reserves keys",
        PUBLISH,
        "PERFORM FROM {schema}.publish_owner o WHERE o.id = me AND o.token = my_token AND o.ended_at IS NULL;",
        "PERFORM FROM {schema}.publish_owner o WHERE o.id = me;",
        ("tests/publish/test_postgres_window.py",),
    ),
    Mutant(
        "reserve-young",
        "keys of the older generation are reserved again",
        PUBLISH,
        "    WHERE NOT EXISTS (\n        SELECT FROM {schema}.publish_key old",
        "    WHERE true OR NOT EXISTS (\n        SELECT FROM {schema}.publish_key old",
        ("tests/publish/test_postgres_window.py",),
    ),
    Mutant(
        "reserve-map",
        "an old map of shards reserves",
        PUBLISH,
        "IF my_map < latest THEN",
        "IF false THEN",
        ("tests/publish/test_shards.py",),
    ),
    # The rule in Python.
    Mutant(
        "check-grant",
        "the rule: somebody else's row",
        CONFLICT,
        "if (row.owner_token, row.owner_epoch) != grant:",
        "if False:",
        (OWNERSHIP,),
    ),
    Mutant(
        "check-topic",
        "the rule: a topic that was made again",
        CONFLICT,
        "if row.topic_id != topic_id:",
        "if False:",
        (OWNERSHIP,),
    ),
    Mutant(
        "check-behind",
        "the rule: commits that a failover lost",
        CONFLICT,
        "row.next_offset is None or row.next_offset < next_offset",
        "False",
        (OWNERSHIP,),
    ),
    Mutant(
        "check-ahead",
        "the rule: an offset that somebody moved on",
        CONFLICT,
        "row.next_offset > next_offset",
        "False",
        (OWNERSHIP,),
    ),
)
