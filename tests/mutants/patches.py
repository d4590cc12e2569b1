"""The patches: what is taken away, where, and which tests must notice."""

from __future__ import annotations

from .consuming import CONSUMING
from .mutant import Mutant, each
from .operating import OPERATING
from .publishing import PUBLISHING
from .spark import SPARK
from .writing import WRITING

LEDGER = "exactly_once/ledger/sql/migrations/0001_ledger.sql"
QUERIES = "exactly_once/ledger/sql/queries.sql"
PUBLISH = "exactly_once/ledger/sql/migrations/0003_publish.sql"
LETTERS = "exactly_once/ledger/sql/dead_letters.sql"
CONFLICT = "exactly_once/ledger/conflict.py"

ROWS = "tests/integration/test_ledger.py"
GENERATIONS = "tests/integration/test_generations.py"
SHORT = "tests/integration/test_short_advance.py"
FROZEN = "tests/integration/test_frozen_owner.py"
CONTRACT = "tests/integration/test_handler_breaks_contract.py"
OWNERSHIP = "tests/unit/test_ownership.py"
DELIVERY = "tests/unit/test_delivery.py"
CLAIMS = "tests/integration/test_claims.py"
WINDOW = "tests/publish/test_postgres_window.py"


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
        (f"{ROWS}::test_an_offset_out_of_range_is_corrected_only_by_its_owner_and_from_where_it_stands",),
    ),
    Mutant(
        "correct-stale",
        "an offset that went on is moved back",
        QUERIES,
        "AND l.next_offset = %(old_offset)s\n",
        "\n",
        (f"{ROWS}::test_an_offset_out_of_range_is_corrected_only_by_its_owner_and_from_where_it_stands",),
    ),
    Mutant(
        "halt-anybody",
        "a handler that committed halts the next owner's row",
        QUERIES,
        "coalesce(l.next_offset, 0) <= w.expected",
        "true",
        (f"{CONTRACT}::test_a_late_halt_leaves_alone_what_has_moved_on_and_says_so",),
    ),
    Mutant(
        "halt-owner",
        "whoever owns a halted row goes on",
        QUERIES,
        "SET halted = %(reason)s, owner_epoch = l.owner_epoch + 1, owner_token = NULL",
        "SET halted = %(reason)s",
        (f"{CONTRACT}::test_a_commit_of_the_handler_behind_a_fence_halts_whoever_owns_the_partition",),
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
        (f"{FROZEN}::test_a_marked_backend_of_another_schema_is_left_alone",),
    ),
    Mutant(
        "blockers-role",
        "backends of another role are ended",
        QUERIES,
        "        AND a.usename = session_user) AS b",
        "        ) AS b",
        (f"{FROZEN}::test_a_marked_backend_of_another_role_is_left_alone",),
    ),
    Mutant(
        "blockers-standby",
        "a backend that waits for its synchronous standby is ended: what no other server has is seen",
        QUERIES,
        "        AND a.wait_event IS DISTINCT FROM 'SyncRep'\n",
        "",
        ("tests/integration/test_held_up.py::test_a_backend_that_waits_for_its_standby_is_not_ended",),
    ),
    Mutant(
        "blockers-marker",
        "backends without our marker are ended",
        QUERIES,
        # One of the two alone would do: nobody else has the schema's checksum at its place.
        "a.application_name LIKE 'exactly\\_once:%%'\n"
        "        AND substr(a.application_name, 51, 8) = substr(%(tag)s, 51, 8)\n",
        "true\n",
        (f"{FROZEN}::test_a_backend_without_our_marker_is_left_alone",),
    ),
    Mutant(
        "blockers-later",
        "transactions begun after the row was taken are ended",
        QUERIES,
        " AND b.xact_start < l.acquired_at)",
        ")",
        (f"{FROZEN}::test_what_a_previous_owner_began_after_we_took_a_row_of_it_is_left_alone",),
    ),
    Mutant(
        "blockers-alive",
        "who shows a sign of life is ended",
        QUERIES,
        "   OR NOT b.lives AND b.wait_event = 'ClientRead'",
        "   OR b.wait_event = 'ClientRead'",
        (f"{FROZEN}::test_a_sign_of_life_is_respected_however_long_it_takes",),
    ),
    # What became of a transaction.
    Mutant(
        "incarnation",
        "an id of before a crash is believed",
        QUERIES,
        "WHEN {incarnation} <> %(begun_in)s THEN 'restarted'",
        "WHEN false THEN 'restarted'",
        ("tests/integration/test_incarnation.py",),
    ),
    Mutant(
        "end-anybody",
        "a transaction with the same id of another life is ended",
        QUERIES,
        "  AND {incarnation} = %(begun_in)s\n\n-- name: give_time",
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
        ("tests/cli/test_dead_letters.py::test_letters_settled_by_somebody_else_meanwhile_are_left_alone",),
    ),
    # Publishing.
    Mutant(
        "reserve-fenced",
        "a fenced owner reserves keys",
        PUBLISH,
        "PERFORM FROM {schema}.publish_owner o WHERE o.id = me AND o.ended_at IS NULL;",
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
        "check-forgotten",
        "the rule: an acquisition that a failover lost",
        CONFLICT,
        "is_below and row.owner_epoch < grant.epoch",
        "False",
        (OWNERSHIP,),
    ),
    Mutant(
        "check-ahead",
        "the rule: an offset that somebody moved on",
        CONFLICT,
        "row.next_offset == next_offset",
        "True",
        (OWNERSHIP,),
    ),
    # What a member knows of its partitions.
    *each(
        "exactly_once/consumer/partitions.py",
        (OWNERSHIP, DELIVERY),
        (
            "unit-unaccounted",
            "a unit that was not accounted for does not stop the next",
            "if state.in_flight_until != state.next_offset or not is_next:",
            "if not is_next:",
        ),
        (
            "unit-skips",
            "a unit begins behind messages that were not applied",
            "is_next = state.gaps.get(begin, begin) <= state.next_offset <= begin < end",
            "is_next = True",
        ),
        (
            "unit-later",
            "the outcome of a unit moves a later acquisition",
            "if state is not None and state.token == advance.token:",
            "if state is not None:",
        ),
        (
            "unit-aborted",
            "what an aborted unit was given is not taken back",
            "            state.in_flight_until = state.next_offset\n\n    def resolved",
            "            pass\n\n    def resolved",
        ),
        (
            "resolved-later",
            "resolving a unit touches a later acquisition",
            "if state is not None and state.token not in tokens:",
            "if False:",
        ),
        (
            "resolved-landed",
            "a unit that never landed counts as applied",
            "landed = row.next_offset == advance.next_offset",
            "landed = True",
        ),
        (
            "delivers-anywhere",
            "messages are delivered although the position is not trusted",
            "state.phase is Phase.OWNED and state.positioned else None",
            "state.phase is Phase.OWNED else None",
        ),
        (
            "end-unapplied",
            "the ledger moves to the end of the log over messages that wait",
            "return max(self.next_offset, self.log_end) if self.next_offset == self.position else self.next_offset",
            "return max(self.next_offset, self.log_end)",
        ),
        (
            "seen-offset",
            "a reset between units is not seen",
            "_compare(state, row) is Conflict.OK",
            "_compare(state, row) not in (Conflict.FENCED, Conflict.MISSING)",
        ),
        (
            "seen-epoch",
            "another owner with the same token is not seen between units",
            "return check(row, Grant(state.token, state.epoch),",
            "return check(row, Grant(state.token, state.epoch if row is None else row.owner_epoch),",
        ),
        (
            "fenced-at-once",
            "who was fenced acquires again without asking Kafka",
            "state.phase, state.token, state.is_to_mirror = Phase.FENCED, None, False",
            "state.phase, state.token, state.is_to_mirror = Phase.PENDING, None, False",
        ),
        (
            "never-released",
            "rows of partitions that are gone are not released",
            (
                "                self.last_ends.append(_advance(partition, state, state.applied, None))\n"
                "            self.releases.append((partition, state.token))"
            ),
            "                self.last_ends.append(_advance(partition, state, state.applied, None))",
        ),
        (
            "never-rotates",
            "rows are never rotated: dead versions make each advance slower",
            "rotates=state.advances >= ROTATE_EVERY,\n        after",
            "rotates=False,\n        after",
        ),
        (
            # The offset alone would do no harm: positions are set again when the client is told where to read.
            "goes-nowhere",
            "a row that moved elsewhere is not followed",
            "        self.has_changed = True\n        state.invalidate()\n        if row.next_offset is None:",
            "        self.has_changed = True\n        if row.next_offset is None:",
        ),
    ),
    # What was fetched, and becomes batches.
    *each(
        "exactly_once/consumer/buffer.py",
        (DELIVERY,),
        (
            "fetched-unreadable",
            "what comes behind an error of its partition is taken",
            "is_taken = state is not None and state.unreadable is None",
            "is_taken = state is not None",
        ),
        (
            "fetched-twice",
            "a message that is fetched twice is applied twice",
            "            if offset < state.position:\n                continue\n",
            "",
        ),
        (
            "requeued-behind",
            "what comes again comes behind what follows it",
            "[*zip(messages, self._tried or repeat(1), strict=False), *self._again]",
            "[*self._again, *zip(messages, self._tried or repeat(1), strict=False)]",
        ),
        (
            "span-of-all",
            "a part of a fetch moves the offset over all of it: loses",
            "spans = None if self._waiting else self._spans",
            "spans = self._spans",
        ),
        (
            "span-of-last",
            "the span of one fetch is taken for that of two",
            "self._spans = None if self._waiting else spans",
            "self._spans = spans",
        ),
        (
            "stale-again",
            "messages of before a reset come again",
            "return state is not None and state.next_offset <= _offset(run[0]) <= _offset(run[-1]) < state.position",
            "return state is not None",
        ),
        (
            "cut-loses",
            "the message behind a batch is lost",
            "return messages[:end], messages[end:]",
            "return messages[:end], messages[end + 1 :]",
        ),
    ),
    # What becomes of a unit.
    *each(
        "exactly_once/consumer/outcomes.py",
        ("tests/unit/test_outcomes.py",),
        (
            "handler-committed",
            "effects that a handler committed come again",
            '(Sent.NOTHING, "committed", None): Decision.HALT_COMMITTED',
            '(Sent.NOTHING, "committed", None): Decision.GIVE_BACK',
        ),
        (
            "unknown-failed",
            "a COMMIT without an answer counts as failed",
            "(Sent.COMMIT, None, None): Decision.RESOLVE",
            "(Sent.COMMIT, None, None): Decision.GIVE_BACK",
        ),
        (
            "joined-stayed",
            "a joined transaction that committed without the advance goes on",
            '(Sent.ADVANCE, "committed", "stayed"): Decision.HALT_COMMITTED',
            '(Sent.ADVANCE, "committed", "stayed"): Decision.RESOLVE',
        ),
    ),
    *each(
        "exactly_once/ledger/outcome.py",
        ("tests/unit/test_outcome.py",),
        (
            "lost-is-poison",
            "a lost connection becomes the fault of a message: dead letter",
            "    if connection_lost:\n        return Fault.ENVIRONMENT\n",
            "",
        ),
        (
            "lost-counts",
            "a lost connection counts against a statement",
            "return not connection_lost and (sqlstate_of(error)",
            "return (sqlstate_of(error)",
        ),
    ),
    # Whether Kafka still counts us.
    *each(
        "exactly_once/consumer/kafka_offsets.py",
        ("tests/unit/test_mirror.py", "tests/integration/test_membership_proof.py"),
        (
            "proof-refused",
            "a refused commit proves membership",
            "return set() if check.error else check.partitions",
            "return check.partitions",
        ),
        (
            "proof-partial",
            "an error of one partition only is overlooked",
            "for e in (error, *(tp.error for tp in offsets)) if e is not None]",
            "for e in (error,) if e is not None]",
        ),
        (
            "proof-any",
            "the answer to any commit proves membership",
            "if check is not None and any(tp.metadata == check.metadata for tp in offsets):",
            "if check is not None:",
        ),
        (
            "proof-at-once",
            "membership is proved before anybody has answered",
            "        if check.error is None and not check.answered:\n            return None\n",
            "",
        ),
    ),
    # Keys that were published.
    *each(
        PUBLISH,
        (WINDOW,),
        (
            "take-over-living",
            "what a living sender has in flight is settled",
            "WHERE o.id = dead AND o.ended_at IS NOT NULL;",
            "WHERE o.id = dead;",
        ),
        (
            "take-over-sure",
            "keys that may be in the log become absent: doubles",
            "    IF is_sure THEN\n",
            "    IF true THEN\n",
        ),
        (
            "release-others",
            "a key that another sender holds becomes absent: doubles",
            "CASE WHEN is_held THEN k.state = 'f' AND k.owner = me ELSE",
            "CASE WHEN is_held THEN k.state = 'f' ELSE",
        ),
        (
            "mark-others",
            "a key that another sender holds becomes unknown",
            "AND k.state IN ('f', 't') AND k.owner = me;\nEND\n$mark$",
            "AND k.state IN ('f', 't');\nEND\n$mark$",
        ),
        (
            "turn-drops",
            "reservations leave with their generation: doubles",
            "        INSERT INTO {schema}.publish_key SELECT * FROM unnest(kept);\n",
            "",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/publish.sql",
        (WINDOW,),
        (
            "renew-dead",
            "a sender that was fenced lives on",
            "WHERE id = %(owner)s AND ended_at IS NULL\nRETURNING id",
            "WHERE id = %(owner)s\nRETURNING id",
        ),
        (
            "fence-living",
            "a sender is fenced before its lease is over",
            "AND ended_at IS NULL AND lease_until < clock_timestamp()",
            "AND ended_at IS NULL",
        ),
    ),
    # Keys that were claimed.
    *each(
        "exactly_once/ledger/sql/migrations/0006_claims.sql",
        (
            f"{CLAIMS}::test_key_is_held_for_one_to_two_windows_and_leaves_with_its_table",
            f"{CLAIMS}::test_turn_waits_for_units_that_have_claimed",
            f"{CLAIMS}::test_snapshot_older_than_the_last_turn_does_not_claim",
        ),
        (
            "claim-older",
            "keys of the older window are claimed again: doubles",
            "WHERE NOT EXISTS (SELECT FROM %s AS old WHERE old.key = given.key OFFSET 0)",
            "WHERE true OR NOT EXISTS (SELECT FROM %s AS old WHERE old.key = given.key OFFSET 0)",
        ),
        (
            "claim-turned",
            "a turn comes between a claim and its COMMIT",
            "    PERFORM pg_advisory_xact_lock_shared(hashtext('exactly_once.claim'), hashtext(my_group));\n",
            "",
        ),
        (
            "claim-snapshot",
            "a snapshot of before a turn claims again",
            "IF current_setting('transaction_isolation') <> 'read committed' THEN",
            "IF false THEN",
        ),
    ),
    # Changes of one key, and numbers of one producer.
    *each(
        "exactly_once/writer/changes.py",
        ("tests/writer/test_changes.py",),
        (
            "older-wins",
            "an older change overwrites a newer one",
            "elif rules.newest_by is None or is_not_older(age, fate.age):",
            "elif True:",
        ),
        (
            "tombstone-lost",
            "a row that a tombstone deletes stays",
            "fate.row, fate.deleted = None, change",
            "fate.row = None",
        ),
    ),
    *each(
        "exactly_once/publish/sequence.py",
        ("tests/publish/test_sequence.py", "tests/publish/test_sequence_crashes.py"),
        (
            "sequence-gap",
            "the persisted number rises over one that a crash lost: loses",
            "if first not in self._confirmed or self._predecessors.get(first, -1) > self._persisted:",
            "if first not in self._confirmed:",
        ),
        (
            "sequence-failed",
            "the persisted number rises over one that failed: loses",
            "if first not in self._confirmed or self._predecessors.get(first, -1) > self._persisted:",
            "if self._predecessors.get(first, -1) > self._persisted:",
        ),
    ),
    *CONSUMING,
    *OPERATING,
    *WRITING,
    *PUBLISHING,
    *SPARK,
)
