"""Patches of what an operator does, of starts, of dead letters, and of the SQL behind them."""

from __future__ import annotations

from .mutant import Mutant, each

ROWS = "tests/integration/test_ledger.py"
START = "tests/integration/test_start.py"
FROZEN = "tests/integration/test_frozen_owner.py"
POISON = "tests/integration/test_poison.py"
AT_FAULT = "tests/integration/test_handler_at_fault.py"
QUERIES = "exactly_once/ledger/sql/queries.sql"
LETTERS = "exactly_once/ledger/sql/dead_letters.sql"
FENCED = f"{ROWS}::test_an_operators_change_fences_the_live_owner_and_is_written_down"

OPERATING = (
    # What an operator moves.
    Mutant(
        "reset-owner",
        "a reset leaves the owner its row",
        QUERIES,
        "owner_epoch = l.owner_epoch + 1, owner_token = NULL, moved_at = clock_timestamp()",
        "moved_at = clock_timestamp()",
        (FENCED,),
        1,
    ),
    Mutant(
        "adopt-owner",
        "an adoption leaves the owner its row",
        QUERIES,
        "owner_epoch = l.owner_epoch + 1, owner_token = NULL, moved_at = clock_timestamp()",
        "moved_at = clock_timestamp()",
        (FENCED,),
        2,
    ),
    Mutant(
        "reset-forgets",
        "a reset that keeps the offset empties it",
        QUERIES,
        "SET next_offset = coalesce(before.new_offset, before.next_offset), halted = NULL,",
        "SET next_offset = before.new_offset, halted = NULL,",
        (f"{ROWS}::test_an_operators_change_that_keeps_an_offset_keeps_it_and_lets_the_row_go_on",),
    ),
    Mutant(
        "reset-halted",
        "a reset leaves the row halted",
        QUERIES,
        "SET next_offset = coalesce(before.new_offset, before.next_offset), halted = NULL,",
        "SET next_offset = coalesce(before.new_offset, before.next_offset),",
        (f"{ROWS}::test_an_operators_change_that_keeps_an_offset_keeps_it_and_lets_the_row_go_on",),
    ),
    Mutant(
        "reset-leader",
        "an offset that was moved keeps the leader epoch of the one before",
        QUERIES,
        "leader_epoch = CASE WHEN before.new_offset IS NULL THEN l.leader_epoch END,",
        "leader_epoch = l.leader_epoch,",
        (f"{ROWS}::test_an_offset_that_an_operator_moves_has_no_leader_epoch",),
    ),
    Mutant(
        "adopt-leader",
        "an adopted topic keeps the leader epoch of the one before",
        QUERIES,
        "leader_epoch = NULL, halted = NULL,\n        topic_id",
        "halted = NULL,\n        topic_id",
        (f"{ROWS}::test_an_offset_that_an_operator_moves_has_no_leader_epoch",),
    ),
    *each(
        QUERIES,
        ("tests/cli/test_forget.py::test_a_row_that_is_taken_meanwhile_stays",),
        (
            "forget-taken",
            "a row that was acquired meanwhile is forgotten",
            "      AND l.owner_epoch = f.owner_epoch\n",
            "",
        ),
    ),
    *each(
        QUERIES,
        (f"{ROWS}::test_a_hand_over_fences_owners_of_the_other_kind_only",),
        (
            "hand-over-own",
            "a hand-over fences an owner of the wanted kind",
            " AND before.owner_kind IS DISTINCT FROM %(owner_kind)s",
            "",
        ),
        (
            "hand-over-free",
            "a hand-over changes rows that nobody holds",
            "AND before.owner_token IS NOT NULL AND before.owner_kind",
            "AND before.owner_kind",
        ),
    ),
    # Rows, and who may have them.
    *each(
        QUERIES,
        (f"{ROWS}::test_ids_that_are_known_stay_and_those_of_others_too",),
        (
            "identify-known",
            "an id that is known is overwritten: another topic's offsets are taken for its own",
            " AND l.owner_token = i.token AND l.topic_id IS NULL",
            " AND l.owner_token = i.token",
        ),
        (
            "identify-anybody",
            "a fenced owner writes the id of a topic",
            " AND l.owner_token = i.token AND l.topic_id IS NULL",
            " AND l.topic_id IS NULL",
        ),
    ),
    *each(
        QUERIES,
        (f"{ROWS}::test_what_somebody_forgot_on_purpose_was_never_there",),
        (
            "known-first",
            "a row that was forgotten on purpose counts as lost: wedge",
            "ORDER BY topic, partition, id DESC) AS latest",
            "ORDER BY topic, partition, id) AS latest",
        ),
        (
            "known-forgets",
            "a row that somebody deleted counts as never made: it begins anew",
            "WHERE action = 'register'\n",
            "WHERE false\n",
        ),
    ),
    *each(
        QUERIES,
        (f"{ROWS}::test_an_operators_move_counts_until_the_next_advance",),
        (
            "moved-for-ever",
            "an offset that was moved once is never compared with Kafka again",
            "coalesce(moved_at > coalesce(advanced_at, '-infinity'), false)",
            "coalesce(moved_at IS NOT NULL, false)",
        ),
        (
            "moved-unadvanced",
            "a move of a row that was never advanced is overlooked",
            "moved_at > coalesce(advanced_at, '-infinity')",
            "moved_at > advanced_at",
        ),
    ),
    *each(
        QUERIES,
        ("tests/unit/test_sql.py::test_rows_are_locked_in_the_order_of_topic_and_partition",),
        (
            "read-order",
            "rows are locked in the order in which they are asked for: deadlock",
            "\n      ORDER BY w.topic, w.partition) AS w\nCROSS JOIN LATERAL {schema}.lock_row",
            ") AS w\nCROSS JOIN LATERAL {schema}.lock_row",
        ),
    ),
    Mutant(
        "halt-topic",
        "a late halt stops the row of another topic of the name",
        QUERIES,
        "coalesce(l.next_offset, 0) <= w.expected AND (l.topic_id = w.topic_id) IS NOT false)",
        "coalesce(l.next_offset, 0) <= w.expected)",
        (f"{ROWS}::test_a_late_halt_leaves_the_row_of_another_topic_of_that_name_alone",),
    ),
    *each(
        "exactly_once/ledger/rows.py",
        (ROWS,),
        (
            "acquire-any",
            "a consumer takes rows that a Spark job holds",
            "row.owner_kind == self._owner_kind or self._take_over",
            "True",
        ),
        (
            "acquire-released",
            "a row that was released stays with its kind",
            "if row.owner_token is None or row.owner_kind == self._owner_kind",
            "if row.owner_kind == self._owner_kind",
        ),
        (
            "previous-released",
            "who has released a row is taken for one that holds it",
            "old.owner_instance if old.owner_token is not None else None",
            "old.owner_instance",
        ),
        (
            "resolve-one-try",
            "a resolution that got no answer cannot be repeated",
            "keys, token=tokens[-1], tokens=tokens)",
            "keys, token=tokens[-1], tokens=tokens[:1])",
        ),
    ),
    # Who is ended.
    *each(
        QUERIES,
        (f"{FROZEN}::test_what_owns_no_rows_by_nature_is_not_fenced",),
        (
            "blockers-nature",
            "who owns no rows by nature is ended as fenced",
            "OR b.may_take <> '-'\n      AND NOT EXISTS",
            "OR NOT EXISTS",
        ),
    ),
    *each(
        QUERIES,
        (f"{FROZEN}::test_a_healthy_peer_is_left_alone_for_the_time_that_its_own_unit_may_take",),
        (
            "blockers-bound",
            "a peer is ended before the time that its unit may take",
            "AND b.age > coalesce(b.bound, %(unbounded)s)",
            "AND b.age > 0",
        ),
    ),
    # The first offset.
    *each(
        "exactly_once/ledger/start.py",
        (f"{START}::test_offsets_in_kafka_are_adopted_also_of_a_topic_that_a_pattern_finds_later",),
        (
            "adopted-later",
            "a topic that a pattern finds later is read from its start although the group has committed in it: doubles",
            "if is_new and (is_adopted or self.first_topics",
            "if is_new and (self.first_topics",
        ),
    ),
    *each(
        "exactly_once/ledger/start.py",
        (f"{START}::test_offsets_that_were_not_adopted_stay_so_without_start",),
        (
            "not-adopted-later",
            "rows that a refused start has made are read from their start although the group has committed: doubles",
            "        if self._start is None:\n",
            "        if False:\n",
        ),
        (
            "adopted-beside",
            "offsets are adopted although an old member still applies: doubles",
            '        if self._start == "committed" and existing:\n',
            "        if False:\n",
        ),
    ),
    *each(
        "exactly_once/ledger/start.py",
        ("tests/unit/test_start_range.py",),
        (
            "range-low",
            "the first offset of a log is out of its range",
            "if offset < low:",
            "if offset <= low:",
        ),
        (
            "range-high",
            "the end of a log is out of its range",
            "elif offset > high:",
            "elif offset >= high:",
        ),
        (
            "range-truncated",
            "a log that was rewritten below the offset is read on",
            "elif truncated:",
            "elif False:",
        ),
        (
            "range-policy",
            "on_out_of_range='earliest' goes to the end: loses",
            'offset = low if self._on_out_of_range == "earliest" else high',
            'offset = high if self._on_out_of_range == "earliest" else low',
        ),
        (
            "range-fails",
            "on_out_of_range='fail' moves the offset",
            'if self._on_out_of_range == "fail":',
            "if False:",
        ),
        (
            "range-believed",
            "a correction that was refused is believed",
            "if not self._ledger.correct(row, offset, reason=str(error)):",
            "if not self._ledger.correct(row, offset, reason=str(error)) and False:",
        ),
        (
            "range-epoch",
            "an offset that was corrected keeps its leader epoch: found rewritten for ever",
            "return replace(row, next_offset=offset, leader_epoch=None)",
            "return replace(row, next_offset=offset)",
        ),
    ),
    # Dead letters.
    *each(
        LETTERS,
        (
            f"{POISON}::test_a_message_is_one_dead_letter_however_often_it_is_set_aside",
            f"{POISON}::test_another_message_at_the_offset_of_a_dead_letter_is_none_the_less_one",
        ),
        (
            "letter-again",
            "a message that is set aside again is two dead letters",
            "WHERE NOT (%(once)s AND EXISTS (",
            "WHERE NOT (false AND %(once)s AND EXISTS (",
        ),
        (
            "letter-replaced",
            "another value at the offset of a dead letter is lost",
            "\n      AND d.value IS NOT DISTINCT FROM %(value)s::bytea))",
            "))",
        ),
        (
            "letter-key",
            "another key at the offset of a dead letter is lost",
            " AND d.key IS NOT DISTINCT FROM %(key)s::bytea\n",
            "\n",
        ),
    ),
    *each(
        LETTERS,
        ("tests/integration/test_same_letters.py",),
        (
            "letter-settled",
            "a message that dies behind its replay is lost",
            "AND d.status = 'dead' AND d.topic_id IS NOT DISTINCT FROM %(topic_id)s\n      --",
            "AND d.topic_id IS NOT DISTINCT FROM %(topic_id)s\n      --",
        ),
        (
            "letter-topic",
            "a message of another topic of the name is lost",
            "AND d.status = 'dead' AND d.topic_id IS NOT DISTINCT FROM %(topic_id)s\n      --",
            "AND d.status = 'dead'\n      --",
        ),
    ),
    *each(
        LETTERS,
        (
            f"{POISON}::test_too_many_in_a_row_stop_and_the_last_is_not_stored",
            f"{POISON}::test_too_many_in_the_window_stop",
        ),
        (
            "letters-in-a-row",
            "however many messages in a row die, none stops",
            "SELECT (SELECT coalesce(max(length), 0) FROM run),",
            "SELECT (SELECT coalesce(min(length), 0) FROM run),",
        ),
        (
            "letters-window",
            "however many messages die, none stops",
            "dead_at > clock_timestamp() - make_interval(secs => least(%(window_seconds)s, 1e9))",
            "dead_at < clock_timestamp() - make_interval(secs => least(%(window_seconds)s, 1e9))",
        ),
    ),
    *each(
        LETTERS,
        (f"{AT_FAULT}::test_dead_letters_in_a_row_are_counted_across_a_restart_at_the_end_of_the_log",),
        (
            "letters-behind-markers",
            "a restart behind a commit marker begins to count dead letters anew",
            "IN (before.message_offset + 1, before.moved_to))",
            "= before.message_offset + 1)",
        ),
        (
            "letters-applied-between",
            "a move behind an applied message joins the dead letters before and behind it",
            "  AND moved.expected IN (d.message_offset + 1, d.moved_to)\n",
            "",
        ),
    ),
    *each(
        LETTERS,
        (
            "tests/cli/test_dead_letters.py::test_list_shows_what_is_dead_in_the_order_of_the_log",
            "tests/cli/test_dead_letters.py::test_list_can_be_narrowed",
        ),
        (
            "letters-order",
            "letters are replayed in another order than their log's",
            "ORDER BY group_id, topic, partition, message_offset, id\n",
            "ORDER BY group_id, topic, partition, message_offset DESC, id\n",
        ),
        (
            "letters-partition",
            "letters of all partitions are dropped where one was named",
            "  AND (%(partition)s::int IS NULL OR partition = %(partition)s)\n",
            "",
        ),
    ),
    *each(
        "exactly_once/consumer/replay.py",
        (
            f"{POISON}::test_a_replay_that_sets_its_message_aside_again_has_failed",
            "tests/cli/test_dead_letters.py::test_letters_settled_by_somebody_else_meanwhile_are_left_alone",
            "tests/cli/test_dead_letters.py::test_handler_that_commits_is_told_and_its_letter_is_marked",
        ),
        (
            "replay-aside",
            "a letter that is set aside again counts as replayed: loses",
            "            if unit.letters:\n",
            "            if False:\n",
        ),
        (
            "replay-settled",
            "a letter that somebody else has settled is applied again: doubles",
            "        if found is None:\n            self.work.roll_back()\n",
            "        if False:\n            self.work.roll_back()\n",
        ),
        (
            "replay-committed",
            "a handler that commits by itself is not told of",
            'if not self.work.is_unknown and self._outcome() == "committed":',
            "if False:",
        ),
    ),
    *each(
        "exactly_once/consumer/replay.py",
        ("tests/cli/test_dead_letters.py",),
        (
            "replay-servers",
            "letters are applied before one that the server alone has failed",
            "return fault in (Fault.CONFLICT, Fault.DURATION) or (",
            "return False and (",
        ),
        (
            "replay-lost",
            "a lost connection passes for the letter's failure",
            "self.is_lost = self.work.is_lost",
            "",
        ),
        (
            "replay-begin",
            "a server that takes no writes fails one letter after the other",
            "return isinstance(error, psycopg.Error)",
            "return False",
        ),
    ),
    # What a reset says and drops.
    *each(
        "exactly_once/cli/plan.py",
        ("tests/unit/test_moves.py",),
        (
            "again-edge",
            "a dead letter at the new offset stays, and its message comes again: doubles",
            "self.result <= letter.message_offset <",
            "self.result < letter.message_offset <",
        ),
        (
            "again-end",
            "a dead letter whose message does not come again is dropped: loses",
            "letter.message_offset < self.old_offset",
            "letter.message_offset <= self.old_offset",
        ),
        (
            "outside-end",
            "the end of a log is outside of it",
            "not self.log.start <= self.result <= self.log.end",
            "not self.log.start <= self.result < self.log.end",
        ),
        (
            "left-out-new",
            "a new group is not told what it leaves out",
            "start = self.log.start if self.log and self.old_offset is None else self.old_offset",
            "start = self.old_offset",
        ),
    ),
    # Numbers on a command line.
    *each(
        "exactly_once/cli/options.py",
        ("tests/cli/test_options.py::test_no_option_takes_a_number_that_is_none_or_has_no_bounds",),
        (
            "number-nan",
            "nan is within any bounds",
            "if least <= (value := kind(text)) <= most:",
            "if not ((value := kind(text)) < least or value > most):",
        ),
        (
            "number-long",
            "a number may be as large as it likes",
            "if least <= (value := kind(text)) <= most:",
            "if least <= (value := kind(text)):",
        ),
    ),
    # Runs that show nothing.
    *each(
        "exactly_once/cli/sink_worker.py",
        ("tests/cli/test_sink.py::test_a_member_that_ends_while_others_are_waited_for_leaves_none_behind",),
        (
            "member-left",
            "a sink that ends while it joins stays a member, and its partitions wait for it",
            "while not client.memberid() and",
            "while False and",
        ),
    ),
    *each(
        "exactly_once/cli/soak.py",
        ("tests/cli/test_soak.py::test_a_soak_without_a_fault_shows_nothing",),
        (
            "soak-anomaly",
            "a soak that has found an anomaly counts as one that was cut short",
            '    if verdict["anomalies"]:\n        return 1\n',
            "",
        ),
        (
            "soak-calm",
            "a soak in which no fault struck shows that all is well",
            'return 0 if verdict["ok"] else CUT_SHORT',
            "return 0",
        ),
    ),
    *each(
        "exactly_once/cli/verify.py",
        ("tests/cli/test_verify.py::test_without_a_fault_nothing_is_shown",),
        (
            "verify-calm",
            "a pipeline at which no fault struck is exact",
            "else 0 if verdict.is_shown else CUT_SHORT",
            "else 0",
        ),
    ),
    *each(
        "exactly_once/cli/__init__.py",
        ("tests/cli/test_verify.py::test_a_server_that_is_away_is_named",),
        (
            "verify-error",
            "a run that ended by an error counts as one that found something",
            "code = CUT_SHORT if named in _RUNS else 1",
            "code = 1",
        ),
    ),
    *each(
        "exactly_once/cli/verify.py",
        ("tests/cli/test_verify.py::test_what_cannot_be_verified_is_refused_before_anything_begins",),
        (
            "verify-program",
            "a program that cannot be run is found out by its silence",
            "if not words or shutil.which(words[0]) is None:",
            "if not words:",
        ),
        (
            "verify-columns",
            "a query of other columns than number and count is begun with",
            "if len(columns) != 2 or",
            "if False and",
        ),
        (
            "verify-before",
            "effects of before count as those of messages",
            "if old := counted(cursor.fetchall()):",
            "if old := {}:",
        ),
        (
            "verify-leaves",
            "what --setup has made stays where a refusal follows",
            "            with session.connection.transaction():\n",
            "            with contextlib.nullcontext():\n",
        ),
    ),
    *each(
        "exactly_once/cli/status.py",
        ("tests/cli/test_status.py::test_a_partition_that_no_worker_could_start_is_a_problem",),
        (
            "never-started",
            "a check is passed by a partition that no worker can start",
            "elif row.next_offset is None and not row.owned and log.start < log.end and",
            "elif False and",
        ),
    ),
    *each(
        "exactly_once/ledger/migrate.py",
        ("tests/cli/test_migrate.py::test_a_schema_that_was_renamed_is_refused_with_the_way_back",),
        (
            "renamed-schema",
            "in a schema that was renamed functions work on another one, and nobody hears of it",
            "if made_as not in (None, quoted := ",
            "if made_as not in (None, made_as, quoted := ",
        ),
    ),
    *each(
        "exactly_once/cli/__init__.py",
        ("tests/cli/test_command_line.py::test_a_result_that_a_closed_output_has_lost_is_told_of",),
        (
            "closed-output",
            "a result that nobody could read ends as if it were written",
            "if isinstance(sys.stdout, _Nowhere) and sys.stdout.has_lost:",
            "if False:",
        ),
    ),
    *each(
        "exactly_once/cli/migrate.py",
        ("tests/cli/test_migrate.py::test_what_may_not_be_granted_is_an_error",),
        (
            "not-granted",
            "a role that was granted nothing may consume, says the command",
            "if notice.sqlstate == _NOT_GRANTED:",
            "if notice.sqlstate == _ROLE:",
        ),
        (
            "not-warned",
            "where the role hears no warnings it seems to have granted everything",
            "SET LOCAL client_min_messages = warning",
            "SET LOCAL client_min_messages = error",
        ),
    ),
)
