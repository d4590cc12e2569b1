"""Patches of the consumer: what a member knows of its partitions, what was fetched, whose fault an error is."""

from __future__ import annotations

from .mutant import each

OWNERSHIP = "tests/unit/test_ownership.py"
DELIVERY = "tests/unit/test_delivery.py"
OUTCOME = "tests/unit/test_outcome.py"

UNKNOWN = "tests/integration/test_commit_outcome.py"
CONTRACT = "tests/integration/test_handler_breaks_contract.py"
DEFER = "tests/integration/test_defer.py"
JOIN = "tests/integration/test_join.py"
ISOLATED = (
    "test_of_many_that_start_under_one_name_one_lives",
    "test_batches_of_many_processes_in_any_order_do_not_deadlock",
)
ODD = "tests/integration/test_odd_applications.py"
THREADS = "tests/integration/test_pools_of_threads.py"
SILENT = "tests/integration/test_silent_client.py"

CONSUMING = (
    *each(
        "exactly_once/consumer/partitions.py",
        (OWNERSHIP,),
        (
            "acquired-late",
            "a row that is acquired behind the revocation is never given back",
            "self.releases.append((row.partition, row.owner_token))\n                continue\n            state.p",
            "continue\n            state.p",
        ),
        (
            "started-later",
            "a start of an earlier acquisition is believed",
            "if state is None or state.token != row.owner_token or row.next_offset is None:",
            "if state is None or row.next_offset is None:",
        ),
        (
            "end-of-before",
            "the end of a log outlives the position it was met at: loses",
            "self.positioned, self.log_end, self.suspect = False, -1, None",
            "self.positioned, self.suspect = False, None",
        ),
        (
            "end-fetched",
            "a move to the end jumps over what was fetched meanwhile",
            "            if state.position == advance.expected:\n                state.next_offset =",
            "            if True:\n                state.next_offset =",
        ),
        (
            "end-lost",
            "a partition that is given back forgets its move to the end",
            "            if state.is_at_end:\n                self.last_ends",
            "            if False:\n                self.last_ends",
        ),
        (
            "end-damaged",
            "the ledger moves to the end of a log that cannot be read",
            "            and self.unreadable is None\n            and self.applied > self.next_offset",
            "            and self.applied > self.next_offset",
        ),
        (
            "halt-unseen",
            "a partition that was halted, or let go on, is not tried again",
            "row.topic_id, row.halted is not None)",
            "row.topic_id, False)",
        ),
        (
            "mirrors-lost",
            "offsets of rows that are lost are told to Kafka",
            "state.phase, state.token, state.is_to_mirror = Phase.FENCED, None, False",
            "state.phase, state.token = Phase.FENCED, None",
        ),
        (
            "resolved-elsewhere",
            "a row in doubt that moved elsewhere is not followed",
            "            elif row.next_offset == advance.expected:\n                state.in_flight_until",
            "            elif True:\n                state.in_flight_until",
        ),
        (
            "rotated-unknown",
            "who rotates its rows fences itself",
            "return {advance.partition: advance.generation + rotates for advance in advances}",
            "return {advance.partition: advance.generation for advance in advances}",
        ),
        (
            "rotated-alone",
            "of a unit's rows only some are known to be rotated",
            "return {advance.partition: advance.generation + rotates for advance in advances}",
            "return {advance.partition: advance.generation + advance.rotates for advance in advances}",
        ),
        (
            "owned-nowhere",
            "an interrupt leaves a partition owned without an offset: read from its end",
            "        self._go_to(state, row)\n        # Last:",
            "        state.phase = Phase.OWNED\n        self._go_to(state, row)\n        # Last:",
        ),
        (
            "left-starting",
            "a start that was cut short is never made again",
            "        self.not_started(list(self.states))\n",
            "",
        ),
        (
            "follows-forgotten",
            "an owner that a failover has forgotten goes on without acquiring",
            "if row.owner_token != state.token:",
            "if False:",
        ),
        (
            "classify-follows",
            "a reset under a unit fences in place of being followed",
            "elif conflict in (Conflict.AHEAD, Conflict.REWOUND) and row is not None:",
            "elif conflict is Conflict.AHEAD and row is not None:",
        ),
        (
            "own-move",
            "our own move to the end is taken for somebody's reset",
            "elif state.is_at_end and row.next_offset == state.applied:",
            "elif False:",
        ),
    ),
    *each(
        "exactly_once/consumer/buffer.py",
        (DELIVERY,),
        (
            "kept-stale",
            "what was kept of partitions that are gone is applied",
            "        if self._kept:\n            kept = {",
            "        if False:\n            kept = {",
        ),
        (
            "waiting-stale",
            "what waits of partitions that are gone is applied",
            "self._waiting, self._spans = self._current(self._waiting), None",
            "self._spans = None",
        ),
        (
            "attempts-forgotten",
            "a handler is told that each attempt is the first",
            "self._tried = [times + 1 for _, times",
            "self._tried = [times for _, times",
        ),
        (
            "gap-unknown",
            "a gap of the log wedges the partition",
            "                state.gaps[offset] = state.position\n",
            "",
        ),
        (
            "gap-inside",
            "a gap within a fetch is not seen",
            "if first == state.position and last - first == len(run) - 1:",
            "if first == state.position:",
        ),
        (
            "span-shrinks",
            "a partition's second run of a batch narrows its span",
            "begin = min(begin, known.begin)",
            "begin = max(begin, known.begin)",
        ),
        (
            "kept-order",
            "what is kept comes out from its end",
            "batch += run[: max_messages - len(batch)]",
            "batch += run[-(max_messages - len(batch)) :]",
        ),
        (
            "cut-first",
            "a message larger than the bound never comes",
            "if total > size and end:",
            "if total > size:",
        ),
    ),
    *each(
        "exactly_once/consumer/kafka_offsets.py",
        ("tests/unit/test_mirror.py",),
        (
            "mirrors-others",
            "offsets of partitions that are not ours are told to Kafka",
            "mine = {p: h for p, h in states.items() if h.phase is Phase.OWNED}",
            "mine = dict(states)",
        ),
        (
            "mirrors-nobody",
            "a client without a session commits as another process",
            "if not client.memberid():",
            "if False:",
        ),
        (
            "mirror-refused",
            "what Kafka has refused is told with the next message, or never",
            "self._refused |= {Partition(tp.topic, tp.partition) for tp in offsets if error or tp.error}",
            "pass",
        ),
    ),
    # Whose fault an error is.
    *each(
        "exactly_once/ledger/outcome.py",
        (OUTCOME,),
        (
            "conflict-is-poison",
            "a serialization failure becomes the fault of a message: dead letter",
            '_CONFLICTS = ("40", "55P03")',
            '_CONFLICTS = ("55P03",)',
        ),
        (
            "full-is-poison",
            "a full disk becomes the fault of a message: dead letter",
            '_ENVIRONMENT = ("08", "53", "57", "58", "25006", "26000", "HV00N")',
            '_ENVIRONMENT = ("08", "57", "58", "25006", "26000", "HV00N", "53400")',
        ),
        (
            "ours-is-poison",
            "an error of the protocol becomes the fault of a message",
            "if state[:2] in _STANDARD or state.startswith(_OURS) else Fault.HANDLER",
            "if state[:2] in _STANDARD else Fault.HANDLER",
        ),
        (
            "patience-shared",
            "failures of one batch count against the next",
            "        if batch != self._batch:\n            self.tries = self.by_statement = 0\n",
            "",
        ),
        (
            "patience-away",
            "the hours that a server was away end the patience",
            "min(now - self._last, _GAP_SECONDS)",
            "now - self._last",
        ),
        (
            "orig-unseen",
            "an error that a framework wraps is the handler's",
            "            orig if isinstance(orig, BaseException) else None,\n",
            "",
        ),
    ),
    *each(
        "exactly_once/consumer/outcomes.py",
        ("tests/unit/test_outcomes.py",),
        (
            "lost-is-aborted",
            "a transaction of which nobody knows counts as aborted: doubles",
            "(Sent.NOTHING, LOST, None): Decision.HALT_UNKNOWN",
            "(Sent.NOTHING, LOST, None): Decision.GIVE_BACK",
        ),
        (
            "prepared-resolved",
            "a prepared transaction is not waited for",
            '(Sent.ADVANCE, "prepared", None): Decision.WAIT',
            '(Sent.ADVANCE, "prepared", None): Decision.RESOLVE',
        ),
        (
            "joined-without",
            "a joined transaction that committed without its offsets goes on: doubles",
            '(Sent.JOINED, "committed", None): Decision.HALT_COMMITTED',
            '(Sent.JOINED, "committed", None): Decision.RESOLVE',
        ),
    ),
    # Which database told Kafka an offset.
    *each(
        "exactly_once/kafka/origin.py",
        ("tests/unit/test_origin.py",),
        (
            "origin-other",
            "another database of the group is not noticed",
            "if found.ledger_id != own.ledger_id:",
            "if False:",
        ),
        (
            "origin-copy",
            "a copy that has fallen behind its original goes on",
            "return Relation.COPY if is_behind else Relation.OURS",
            "return Relation.OURS",
        ),
        (
            "origin-primary",
            "an old primary goes on beside the new one",
            "found.timeline > own.timeline:",
            "found.timeline < own.timeline:",
        ),
        (
            "origin-edge",
            "the offset that the ledger has itself counts as lost",
            "is_behind = mirrored > (stored or 0)",
            "is_behind = mirrored >= (stored or 0)",
        ),
    ),
    # COMMIT, and what is known of it.
    *each(
        "exactly_once/ledger/transaction.py",
        (
            f"{UNKNOWN}::test_a_commit_whose_answer_was_lost_has_landed_and_nothing_is_raised",
            f"{CONTRACT}::test_a_swallowed_sql_error_is_told",
            f"{DEFER}::test_effects_offsets_and_commit_are_one_round_trip",
            f"{JOIN}::test_lost_commit_is_found_out",
        ),
        (
            "commit-unsent",
            "a COMMIT whose answer is lost counts as never sent",
            "        self.sent = Sent.COMMIT\n        is_refused",
            "        is_refused",
        ),
        (
            "commit-broken",
            "an error that the handler has swallowed is not told",
            "        if status is TransactionStatus.INERROR:\n            raise TransactionAborted(",
            "        if False:\n            raise TransactionAborted(",
        ),
        (
            "deferred-lost",
            "what was deferred is not sent with COMMIT: loses",
            "results = send_together(self.connection, [*deferred, *own])",
            "results = send_together(self.connection, own)",
        ),
        (
            "joined-unsent",
            "offsets that were moved in a joined transaction count as not moved",
            "        self.sent = Sent.ADVANCE\n",
            "",
        ),
    ),
    # Blocks of transaction() that are open at an edge of a unit.
    *each(
        "exactly_once/ledger/transaction.py",
        (
            f"{CONTRACT}::test_a_block_of_one_unit_that_ends_in_a_later_one_undoes_nothing_of_that",
            f"{CONTRACT}::test_a_block_that_crosses_the_edge_of_a_joined_one_is_refused",
        ),
        (
            "block-crosses",
            "a unit commits within a block whose end may undo it",
            "if open_blocks(connection) != self._blocks:",
            "if False:",
        ),
    ),
    *each(
        "exactly_once/ledger/transaction.py",
        (JOIN,),
        (
            "block-around",
            "a block around join() is refused",
            "Sent.JOINED, open_blocks(connection)",
            "Sent.JOINED, 0",
        ),
    ),
    *each(
        "exactly_once/ledger/session.py",
        (
            f"{CONTRACT}::test_a_block_of_one_unit_that_ends_in_a_later_one_undoes_nothing_of_that",
            f"{CONTRACT}::test_a_block_that_is_opened_between_units_ends_nothing",
        ),
        (
            "block-between",
            "a block that was opened between two units ends in the next one: loses",
            "if status == TransactionStatus.IDLE and not open_blocks(self._connection):",
            "if status == TransactionStatus.IDLE:",
        ),
        (
            "block-kept",
            "a block of a unit that failed ends in a later one: loses",
            "(TransactionStatus.UNKNOWN, TransactionStatus.ACTIVE) or open_blocks(self._connection):",
            "(TransactionStatus.UNKNOWN, TransactionStatus.ACTIVE):",
        ),
    ),
    # What a handler can do to its unit, and an application to its process, its role and its connections.
    *each(
        "exactly_once/consumer/unit.py",
        (f"{CONTRACT}::test_a_handler_cannot_change_how_far_its_unit_moves",),
        (
            "advances-emptied",
            "a handler that empties advances stores effects without offsets: doubles",
            "self._advances = tuple(advances)",
            "self._advances = advances",
        ),
    ),
    *each(
        "exactly_once/consumer/commit.py",
        (f"{THREADS}::test_what_a_thread_does_behind_its_failed_unit_gets_into_no_other",),
        (
            "threads-go-on",
            "a thread that goes on behind its failed unit gets into the next one: doubles",
            "unit.work.is_shared |= unit.is_lent if self._has_threads is None else self._has_threads",
            "pass",
        ),
    ),
    *each(
        "exactly_once/consumer/consumer.py",
        ("tests/integration/test_unit.py::test_a_unit_that_nobody_has_any_more_is_told_of_once_and_comes_again",),
        (
            "unit-lost",
            "a unit that was lost before it was entered lets no other one come",
            "if (unit := self._unit) is not None and unit.stage is Stage.NEW and unit.is_told:",
            "if (unit := self._unit) is not None and unit.stage is Stage.JOINED and unit.is_told:",
        ),
    ),
    *each(
        "exactly_once/consumer/unit.py",
        (f"{THREADS}::test_a_thread_that_comes_behind_the_block_is_told_of_and_ends_the_service",),
        (
            "used-late",
            "what a thread does behind the COMMIT of its unit is lost, and nothing tells of it",
            "if self.stage is Stage.DONE and self.is_used_late:",
            "if False:",
        ),
        (
            "used-at-commit",
            "what a thread does while its unit commits is lost, and nothing tells of it",
            "        if self.is_used_late:  #",
            "        if False:  #",
        ),
    ),
    *each(
        "exactly_once/consumer/commit.py",
        ("tests/integration/test_join.py::test_rollbacks_without_an_end_are_told_and_end_the_loop",),
        (
            "rollbacks-untold",
            "a joined transaction that is rolled back each time goes on for ever, and nothing tells of it",
            "elif self._resolve(pending) is Resolution.ABORTED and unit.work.is_joined:",
            "elif self._resolve(pending) is Resolution.COMMITTED and unit.work.is_joined:",
        ),
    ),
    *each(
        "exactly_once/ledger/transaction.py",
        (f"{THREADS}::test_a_thread_that_is_not_waited_for_is_the_handlers_mistake",),
        (
            "threads-not-waited",
            "a unit is committed while a thread of its handler is at work",
            "if self.is_shared and connection.lock.locked():",
            "if False:",
        ),
    ),
    *each(
        "exactly_once/consumer/rebalance.py",
        (f"{SILENT}::test_a_client_that_answers_nothing_is_replaced",),
        (
            "left-behind",
            "a client that was left behind takes the partitions of its successor",
            "if not is_recorded and joined is self._joined:",
            "if not is_recorded:",
        ),
    ),
    *each(
        "exactly_once/ledger/session.py",
        (
            "tests/integration/test_role_timeouts.py::test_a_session_that_is_ended_for_idling_is_opened_anew_without_a_word",
        ),
        (
            "idle-session",
            "a session that the server ended for idling is trouble",
            "except psycopg.errors.IdleSessionTimeout:",
            "except ZeroDivisionError:",
        ),
    ),
    *each(
        "exactly_once/consumer/unit.py",
        (f"{DEFER}::test_what_is_deferred_within_a_pipeline_of_somebody_else_keeps_its_place",),
        (
            "defer-overtaken",
            "what is deferred within somebody else's pipeline comes behind what follows it",
            "if self.is_lent or self.work.connection.pgconn.pipeline_status != PipelineStatus.OFF:",
            "if self.is_lent:",
        ),
    ),
    *each(
        "exactly_once/ledger/session.py",
        (f"{ODD}::test_adapters_that_were_registered_for_everybody_before_the_import_are_no_different",),
        (
            "adapters-shared",
            "adapters that an application has registered convert the library's own values",
            "ADAPTERS = adapt.AdaptersMap(types=TypesRegistry())",
            "ADAPTERS = adapt.AdaptersMap(psycopg.adapters)",
        ),
    ),
    *each(
        "exactly_once/ledger/session.py",
        (f"{ODD}::test_in_a_database_without_an_encoding_one_name_is_one_row",),
        (
            "unconverted-name",
            "in a database without an encoding one topic has two rows: doubles",
            ' or (is_unconverted and connection.info.encoding != "utf-8"):',
            ":",
        ),
    ),
    *each(
        "exactly_once/ledger/rows.py",
        (f"{ODD}::test_a_name_of_the_schema_is_spelt_as_the_connection_spells_it",),
        (
            "schema-utf8",
            "the schema is written in UTF-8 where the connection has another encoding",
            "(part.as_bytes(cursor_on(connection)) for part in parts)",
            "(part.as_bytes(None) for part in parts)",
        ),
    ),
    *each(
        "exactly_once/ledger/session.py",
        tuple(f"tests/publish/test_postgres_window.py::{name}" for name in ISOLATED),
        (
            "role-isolates",
            "the role's isolation holds for changes of the ledger",
            "                    connection.isolation_level = IsolationLevel.READ_COMMITTED\n",
            "",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/queries.sql",
        ("tests/integration/test_schema.py::test_eight_threads_migrate_at_once",),
        (
            "migrates-blind",
            "of processes that migrate at once the second does not see what the first has done",
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;\n",
            "",
        ),
    ),
    *each(
        "exactly_once/publish/store.py",
        tuple(f"tests/publish/test_postgres_window.py::{name}" for name in ISOLATED),
        (
            "marks-blind",
            "statements of a filter fail where the role's isolation shows them one snapshot",
            "if self._session.autocommits_safely:",
            "if True:",
        ),
    ),
    # Whose fault an error is.
    *each(
        "exactly_once/ledger/outcome.py",
        (f"{OUTCOME}::test_what_no_statement_of_a_message_brings_about_is_never_its_fault",),
        (
            "doubtful-nobodys",
            "one branch of the handler that the server refuses stops everything",
            ".startswith(_DOUBTFUL)",
            '.startswith("42")',
        ),
    ),
    *each(
        "exactly_once/ledger/outcome.py",
        ("tests/integration/test_handler_at_fault.py::test_a_sqlstate_of_bad_data_is_the_messages_fault",),
        (
            "data-doubtful",
            "a row that a handler's function does not find is not the message's fault",
            '"02", "09", ',
            '"09", ',
        ),
    ),
    *each(
        "exactly_once/ledger/outcome.py",
        (OUTCOME,),
        (
            "foreign-away",
            "a foreign server that is away is the message's fault",
            ', "HV00N")',
            ")",
        ),
    ),
    *each(
        "exactly_once/consumer/maintenance.py",
        ("tests/observe/test_health.py::test_a_group_that_keeps_a_member_waiting_is_told_of",),
        (
            "waits-silently",
            "a member that waits for its group logs nothing",
            "if not self.is_member and now >= due:",
            "if False:",
        ),
    ),
    *each(
        "exactly_once/consumer/consumer.py",
        ("tests/integration/test_never_assigned.py",),
        (
            "never-assigned",
            "a client to which Kafka assigns nothing is kept for ever",
            "elif self._maintenance.unassigned_seconds > patience:",
            "elif False:",
        ),
    ),
    # Offsets that the last owner could not mirror.
    *each(
        "exactly_once/consumer/maintenance.py",
        ("tests/integration/test_stopping.py::test_kafka_gets_the_offsets_of_an_owner_that_could_not_mirror_them",),
        (
            "never-mirrored",
            "Kafka never gets the offsets of an owner that was killed before it had mirrored any",
            "(partition in held or state.was_advanced)",
            "partition in held",
        ),
    ),
    *each(
        "exactly_once/consumer/consumer.py",
        (
            "tests/integration/test_start.py::test_a_topic_that_is_waited_for_is_read_from_its_beginning_whatever_start_says",
        ),
        (
            "waited-for-latest",
            'of a topic that is waited for, start="latest" skips what arrives before it is found',
            "named = set(topics).intersection(there) if waits else set(topics)",
            "named = set(topics)",
        ),
    ),
    *each(
        "exactly_once/ledger/outcome.py",
        ("tests/integration/test_handler_at_fault.py::test_a_doubtful_error_of_some_messages_is_their_fault",),
        (
            "internal-error",
            "a message by which alone the server has an internal error stops the service for ever",
            '    "XX000",\n',
            "",
        ),
    ),
)
