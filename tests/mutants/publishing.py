"""Patches of the publish side: filters, sequences, chains, snapshots, recovery."""

from __future__ import annotations

from .mutant import each

PROPERTIES = "tests/publish/test_properties.py::test_any_series_of_changes_equals_the_model"
ON_SERVERS = "tests/publish/test_properties.py::test_any_series_of_changes_on_a_server_equals_the_model"
SEQUENCE = "tests/publish/test_sequence.py"
CRASHES = "tests/publish/test_sequence_crashes.py"
WINDOW = "tests/publish/test_postgres_window.py"
SHARDS = "tests/publish/test_shards.py"
CLAIMS = "tests/integration/test_claims.py"
OTHER_LOGS = "tests/publish/test_other_logs.py"
ON_BROKER = "tests/publish/test_sequences_on_broker.py"
LAGGING = "tests/publish/test_lagging_replica.py::test_a_restart_while_a_replica_lags_doubles_nothing"

PUBLISHING = (
    # The states of a key.
    *each(
        "exactly_once/publish/filter.py",
        (ON_SERVERS,),  # in memory what is confirmed is not looked up there
        (
            "failed-confirmed",
            "a failure behind the confirmation makes a key absent: doubles",
            "_RESENT: _UNKNOWN, _UNKNOWN: _ABSENT, _CONFIRMED: _CONFIRMED},",
            "_RESENT: _UNKNOWN, _UNKNOWN: _ABSENT, _CONFIRMED: _ABSENT},",
        ),
    ),
    *each(
        "exactly_once/publish/filter.py",
        (PROPERTIES,),
        (
            "forgets-doubt",
            "a second attempt that failed makes the key absent, which the first may have sent: doubles",
            "_RESENT: _UNKNOWN, _UNKNOWN: _ABSENT, _CONFIRMED: _CONFIRMED},",
            "_RESENT: _ABSENT, _UNKNOWN: _ABSENT, _CONFIRMED: _CONFIRMED},",
        ),
        (
            "doubt-is-absence",
            "a key that nobody knows anything of counts as absent: doubles",
            "(KeyState, _UNKNOWN), _ABSENT: _ABSENT,",
            "(KeyState, _UNKNOWN), _ABSENT: _ABSENT, _SENT: _ABSENT,",
        ),
        (
            "unknown-handed-twice",
            "an unknown key is handed to two callers",
            "_RESENT: _RESENT, _UNKNOWN: _RESENT, _CONFIRMED: _CONFIRMED},",
            "_RESENT: _RESENT, _UNKNOWN: _UNKNOWN, _CONFIRMED: _CONFIRMED},",
        ),
        (
            "open-disjoint",
            "a batch reserves keys that are in flight",
            "and (not self._open or self._open.keys().isdisjoint(fresh)):",
            "and True:",
        ),
    ),
    *each(
        "exactly_once/publish/publisher.py",
        ("tests/publish/test_producer.py::test_one_filter_that_is_given_for_two_topics_is_refused",),
        (
            "filter-two-topics",
            "a key of one topic is a duplicate on another: loses",
            "if made.topic not in (None, name):",
            "if False:",
        ),
    ),
    # Windows in memory.
    *each(
        "exactly_once/publish/window.py",
        ("tests/publish/test_window.py",),
        (
            "window-halved",
            "a turn drops the younger keys, too: doubles",
            "self.older, self.younger = self.younger, set()",
            "self.older, self.younger = set(), set()",
        ),
        (
            "window-stays",
            "keys stay when two windows have gone by: loses",
            "for _ in range(min(2, due)):",
            "for _ in range(min(1, due)):",
        ),
        (
            "window-early",
            "the window turns at half of its keys: doubles",
            "len(self.younger) >= self._full:",
            "2 * len(self.younger) >= self._full:",
        ),
        (
            "unknown-young",
            "an unknown key leaves with the first turn: doubles",
            "< self._epoch - 1:",
            "< self._epoch:",
        ),
    ),
    # The number up to which everything is in the log.
    *each(
        "exactly_once/publish/sequence.py",
        (SEQUENCE, CRASHES, f"{PROPERTIES}[sequence]"),
        (
            "sequence-again",
            "the last persisted number is new again: doubles",
            "{number for number in keys if number <= self._persisted",
            "{number for number in keys if number < self._persisted",
        ),
        (
            "sequence-flying",
            "a snapshot takes what is in flight for acknowledged: loses",
            "for number in sorted(self._confirmed)]",
            "for number in self._numbers[self._head :]]",
        ),
        (
            "sequence-run",
            "a run is confirmed without those behind it that are in the log: persisted lags",
            "is_run = bool(keys) and not self._confirmed and",
            "is_run = bool(keys) and",
        ),
        (
            "sequence-order",
            "a number behind a higher one counts as a run",
            "numbers[0] > last and all(map(lt, numbers, numbers[1:]))",
            "all(map(lt, numbers, numbers[1:]))",
        ),
        (
            "sequence-before",
            "a message names the wrong number as the one before it",
            "return self._numbers[place - 1] if place > self._head else self._persisted",
            "return self._persisted",
        ),
        (
            "sequence-bound",
            "outstanding numbers have no bound",
            "if fresh and fresh > self._max_outstanding - outstanding:",
            "if False:",
        ),
        (
            "give-up-unborn",
            "numbers that are still to come can be given up: loses",
            "if self._checked((number,))[0] > last:",
            "if False:",
        ),
        (
            "sequence-doubt",
            "a doubtful number is none while it is sent again, and snapshots pass it: doubles",
            "if self._numbers[n] in self._open), None)",
            "if self._numbers[n] in self._unknown), None)",
        ),
        (
            "sequence-settled",
            "a snapshot passes a number that is on its way",
            "return first is None or first > number",
            "return first is None or first >= number",
        ),
        (
            "sequence-anybody",
            "a second producer uses the numbers of the first: loses",
            "if before not in (None, (producer, topic)):",
            "if False:",
        ),
        (
            "sequence-falls",
            "persisted falls back when a confirmation is repeated behind an interruption: wedges",
            "and not self._confirmed and keys[0] > self._persisted",
            "and not self._confirmed",
        ),
    ),
    *each(
        "exactly_once/publish/recovery.py",
        (
            "tests/publish/test_sequences_on_broker.py::test_the_walk_along_a_log",
            f"{SEQUENCE}::test_a_snapshot_does_not_go_past_a_message_that_is_on_its_way",
            CRASHES,
        ),
        (
            "snapshot-passes",
            "a snapshot passes a message that is on its way: doubles",
            "or not self.sequences.is_settled(self._until):",
            "or False:",
        ),
        (
            "snapshot-waits",
            "a snapshot waits for none of the messages that are on their way: doubles",
            "self._until = self.sequences.last_pushed",
            "self._until = self.sequences.persisted",
        ),
        (
            "walk-gap",
            "recovery rises over a number that is not in the log: loses",
            "if sent.before <= self.persisted:",
            "if True:",
        ),
        (
            "walk-back",
            "recovery falls back to an older message: doubles",
            "self.persisted = max(self.persisted, number)",
            "self.persisted = number",
        ),
        (
            "walk-passed",
            "what recovery has risen over is told as missing a number before it",
            "if number > self.persisted}",
            "}",
        ),
    ),
    # Chains.
    *each(
        "exactly_once/publish/chain.py",
        ("tests/publish/test_conformance.py::test_a_bad_key_is_refused_and_marks_nothing",),
        (
            "chain-tuples",
            "a tuple that is no Link is sent, and what was sent of its topic is never confirmed",
            "if not isinstance(key, Link):",
            "if not isinstance(key, tuple):",
        ),
    ),
    *each(
        "exactly_once/publish/chain.py",
        ("tests/publish/test_chain.py",),
        (
            "chain-upper",
            "the message that a later one named counts as seen: loses",
            "number <= self.uppers[place] else -1",
            "number < self.uppers[place] else -1",
        ),
        (
            "chain-failed",
            "a message that failed is a duplicate behind a higher one: loses",
            "self.keeps_absent = not dense",
            "self.keeps_absent = False",
        ),
        (
            "chain-jumps",
            "a reference across something seen is believed",
            'return f"{self.lowers[place]} was seen in between" if previous < self.lowers[place] else None',
            "return None",
        ),
        (
            "chain-closes",
            "beyond the cap the lowest gap is closed: loses",
            'if self._on_full == "treat_as_seen":',
            "if True:",
        ),
        (
            "chain-flying",
            "what was in flight is no part of a snapshot: doubles",
            '["failed" if state is KeyState.ABSENT else "unknown"].append(number)',
            '["failed"].append(number)',
        ),
    ),
    # Keys, slots and snapshots.
    *each(
        "exactly_once/publish/keys.py",
        ("tests/publish/test_keys.py", "tests/publish/test_window.py"),
        (
            "key-types",
            "a text and its bytes are one key: loses",
            'return b"s" + key.encode(',
            'return b"b" + key.encode(',
        ),
        (
            "key-changes",
            "a key changes with the caller's bytearray",
            "key: object = bytes(given) if isinstance(given, (bytearray, memoryview)) else given",
            "key: object = given",
        ),
    ),
    *each(
        "exactly_once/publish/slots.py",
        ("tests/publish/test_slots.py",),
        (
            "slot-across",
            "a digest across two slots counts as seen: loses",
            "while at >= 0 and (at - start) % self._bytes:",
            "while False:",
        ),
    ),
    *each(
        "exactly_once/publish/snapshot.py",
        ("tests/publish/test_snapshot.py",),
        (
            "snapshot-altered",
            "a snapshot that was altered is loaded",
            "if _digest(body) != digest:",
            "if False:",
        ),
        (
            "snapshot-kind",
            "a snapshot of another filter is loaded",
            'if document["kind"] != kind:',
            "if False:",
        ),
        (
            "snapshot-torn",
            "a write that fails leaves the snapshot torn",
            'handle, name = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)',
            "name = str(self._path)\n        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)",
        ),
    ),
    # Keys in Postgres.
    *each(
        "exactly_once/ledger/sql/migrations/0003_publish.sql",
        (
            f"{WINDOW}::test_two_processes_share_what_they_know",
            f"{WINDOW}::test_a_second_attempt_that_failed_leaves_its_doubt_to_everybody",
            f"{WINDOW}::test_a_second_attempt_that_died_stays_unknown_even_if_it_is_not_in_the_log",
            f"{WINDOW}::test_reservations_do_not_leave_with_their_generation_and_unknown_keys_do",
        ),
        (
            "confirm-older",
            "a key of the older generation stays in flight for ever",
            "WHERE k.slot = (1 - young)::smallint AND k.scope = my_scope",
            "WHERE false AND k.scope = my_scope",
        ),
        (
            "reserve-flying",
            "a key that another holds is taken from him: doubles",
            "AND k.key = known.key AND k.state = 'u'\n",
            "AND k.key = known.key AND k.state IN ('u', 'f')\n",
        ),
        (
            "reserve-twice",
            "a key that another holds is new: doubles",
            "\n              AND mine.xmin = pg_current_xact_id()::xid)),",
            ")),",
        ),
        (
            "release-doubt",
            "a second attempt that failed leaves its key in flight for ever",
            "AND k.state = 't' AND k.owner = me AND is_held;",
            "AND false;",
        ),
        (
            "take-over-resent",
            "a second attempt that died makes its key absent: doubles",
            "AND k.owner = dead AND k.state = 'f';",
            "AND k.owner = dead AND k.state IN ('f', 't');",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/publish.sql",
        (f"{WINDOW}::test_another_length_of_the_window_is_refused",),
        (
            "window-anybody",
            "whoever comes changes the length of the window",
            "ELSE coalesce(seconds, %(seconds)s::float8) END",
            "ELSE %(seconds)s::float8 END",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/publish.sql",
        ("tests/publish/test_postgres_chain.py",),
        (
            "chain-forgets",
            "what a chain had seen is forgotten: doubles",
            "SET seen = c.seen + excluded.seen",
            "SET seen = excluded.seen",
        ),
        (
            "chain-order",
            "two batches with the same chains wait for each other",
            "GROUP BY chain ORDER BY chain\nON CONFLICT",
            "GROUP BY chain\nON CONFLICT",
        ),
    ),
    *each(
        "exactly_once/publish/postgres.py",
        (f"{WINDOW}::test_the_cache_has_no_key_for_longer_than_a_window",),
        (
            "cache-long",
            "a key is a duplicate here for longer than in the database: loses",
            "Generations((cache_keys + 1) // 2, seconds / 2)",
            "Generations((cache_keys + 1) // 2, seconds)",
        ),
    ),
    *each(
        "exactly_once/publish/store.py",
        ("tests/publish/test_owners.py::test_a_connection_in_an_open_transaction_is_refused",),
        (
            "store-open",
            "marks are made in a transaction that nobody commits: doubles",
            "if connection.info.transaction_status is not TransactionStatus.IDLE:",
            "if False:",
        ),
    ),
    *each(
        "exactly_once/publish/shards.py",
        (SHARDS,),
        (
            "shard-moved",
            "keys that a new map moves are new again: doubles",
            "        if not self._previous:\n            return\n",
            "        return\n",
        ),
        (
            "shard-unknown",
            "a key that was confirmed where another map had it is sent again: doubles",
            "if state in (NEW, UNKNOWN)]\n        found",
            "if state is NEW]\n        found",
        ),
        (
            "shard-releases",
            "a repeated release settles another process's doubt: doubles",
            "if given[n] not in again or window.holds(given[n])]",
            "]",
        ),
        (
            "shard-undone",
            "a batch that one shard refuses stays reserved in the others",
            "            for window, keys_of_it in done:\n                window.undo_many(keys_of_it)\n",
            "",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/migrations/0006_claims.sql",
        (
            f"{CLAIMS}::test_key_is_held_for_one_to_two_windows_and_leaves_with_its_table",
            f"{CLAIMS}::test_of_two_members_that_turn_at_once_one_does",
        ),
        (
            "claim-swaps",
            "a turn empties the table that it goes on with",
            "SET younger = held.older, older = held.younger, turns",
            "SET turns",
        ),
        (
            "claim-turns-twice",
            "of two members that turn at once both do: doubles",
            "    IF to_go > 0 THEN\n        RETURN to_go;\n    END IF;\n    EXECUTE",
            "    EXECUTE",
        ),
    ),
    # What an interrupt hides: whether the client has taken a message.
    *each(
        "exactly_once/publish/topic.py",
        (
            "tests/publish/test_interrupts.py::test_a_message_that_the_client_has_taken_is_not_sent_again",
            "tests/publish/test_interrupts.py::test_a_report_beside_a_message_in_doubt_is_settled",
        ),
        (
            "interrupted-absent",
            "a message that was interrupted in the client's produce is released: doubles",
            "if places and not isinstance(error, _REFUSALS):",
            "if False:",
        ),
        (
            "interrupted-alone",
            "the reports beside a message in doubt wait for its own",
            "        batch.is_watched = True\n        self.reported.append(batch)\n        self.doubts[",
            "        self.doubts[",
        ),
    ),
    *each(
        "exactly_once/publish/publisher.py",
        ("tests/publish/test_interrupts.py",),
        (
            "doubt-early",
            "a message in doubt is unknown while the client may still report it",
            "topic.settle(doubts if doubts and not len(self._client) else ())",
            "topic.settle(doubts)",
        ),
        (
            "doubt-for-ever",
            "a message that the client has not taken waits for a report for ever",
            "topic.settle(doubts if doubts and not len(self._client) else ())",
            "topic.settle()",
        ),
    ),
    # What an interrupt leaves at any other line.
    *each(
        "exactly_once/publish/topic.py",
        ("tests/publish/test_interrupts.py::test_a_poll_that_is_interrupted_at_any_line_leaves_nothing_pending",),
        (
            "interrupted-told",
            "what a message was to be told is forgotten behind an interrupt",
            "if not (self.reported or self._to_tell or any",
            "if not (self.reported or any",
        ),
        (
            "interrupted-match",
            "reports that an interrupt has left are taken for settled",
            "                    self._take(_DELIVERED, batch, rest)\n                    batch.told = None\n",
            "                    batch.told = None\n                    self._take(_DELIVERED, batch, rest)\n",
        ),
    ),
    *each(
        "exactly_once/publish/transactional.py",
        (
            "tests/publish/test_interrupts.py::test_a_transaction_that_is_interrupted_at_any_line_leaves_nothing_pending",
        ),
        (
            "interrupted-transaction",
            "messages of a transaction that was interrupted are in flight for ever",
            "                    if any(batch.outcome(place) is Outcome.PENDING for",
            "                    if any(False and batch.outcome(place) is Outcome.PENDING for",
        ),
    ),
    # The end of a producer.
    *each(
        "exactly_once/publish/publisher.py",
        ("tests/publish/test_closing.py",),
        (
            "close-first",
            "a callback's own error hides that messages failed",
            "(isinstance(e, Exception), not isinstance(e, PublishError))",
            "0",
        ),
        (
            "close-others-open",
            "the client of numbered messages stays open",
            "            self._close_others()\n",
            "            pass\n",
        ),
        (
            "close-opened",
            "a topic that another thread opens meanwhile stays open",
            "if self._closed:  # meanwhile",
            "if False:  # meanwhile",
        ),
        (
            "close-spins",
            "who waits for a message while another thread closes spins",
            "            self._ended.wait(seconds)\n",
            "            pass\n",
        ),
        (
            "close-untold",
            "what raised beside the gravest is told nowhere",
            'logger.error("closing producer %r: %s"',
            'logger.debug("closing producer %r: %s"',
        ),
    ),
    *each(
        "exactly_once/kafka/guard.py",
        ("tests/publish/test_forked.py::test_a_child_leaves_its_parents_producer_alone[numbers-free]",),
        (
            "child-frees",
            "a child frees its parent's client, and stands still",
            "            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))\n",
            "            pass\n",
        ),
    ),
    # Logs that cannot prove absence.
    *each(
        "exactly_once/publish/tail.py",
        (f"{OTHER_LOGS}::test_what_a_compacted_topic_does_not_hold_of_a_dead_owner_is_unknown",),
        (
            "compacted-absent",
            "what a compacted topic does not hold was not there: doubles",
            "        if self.is_compacted is not False:\n",
            "        if False:\n",
        ),
    ),
    *each(
        "exactly_once/publish/tail.py",
        ("tests/publish/test_rights.py",),
        (
            "policy-unread",
            "a topic of which nobody may tell whether it is compacted counts as one that is not: doubles",
            "None if policy is None else",
            "False if policy is None else",
        ),
        (
            "group-right",
            "who may not use the group that the client names reads nothing",
            "error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED",
            "False",
        ),
    ),
    *each(
        "exactly_once/publish/tail.py",
        (
            f"{OTHER_LOGS}::test_a_topic_that_was_made_anew_and_has_grown_is_read_from_its_beginning",
            f"{OTHER_LOGS}::test_a_topic_that_was_made_anew_and_is_short_leaves_no_key_stuck",
        ),
        (
            "another-topic-same",
            "a topic that was made anew is read from where the one before ended",
            "and topic_id != self.topic_id",
            "and False",
        ),
        (
            "rest-beyond",
            "a log that ends before its start is read from there",
            "is_there = low <= start <= high",
            "is_there = low <= start",
        ),
    ),
    *each(
        "exactly_once/publish/take_over.py",
        (f"{OTHER_LOGS}::test_a_topic_that_was_made_anew_and_has_grown_is_read_from_its_beginning",),
        (
            "positions-nameless",
            "positions do not tell of which topic they are",
            "{TOPIC_ID: id_of(kafka, topic)} | {",
            "{",
        ),
    ),
    *each(
        "exactly_once/publish/publisher.py",
        (
            f"{OTHER_LOGS}::test_resolve_leaves_unknown_what_a_topic_that_has_become_compacted_does_not_hold",
            f"{OTHER_LOGS}::test_resolve_leaves_unknown_what_a_topic_that_was_made_anew_does_not_hold",
        ),
        (
            "resolve-sure",
            "resolve() takes what such a log does not hold for absent: doubles",
            "is_sure=is_sure and why is None)",
            "is_sure=is_sure)",
        ),
    ),
    *each(
        "exactly_once/publish/recovery.py",
        (f"{OTHER_LOGS}::test_numbers_are_not_sent_on_where_nobody_can_tell_who_else_has_sent_some",),
        (
            "writer-unseen",
            "a log that shows no other writer has none: doubles",
            "if (why := describe(self.kafka, self.topic).why_unsure(self.topic_id)) is not None:",
            "if (why := None) is not None:",
        ),
    ),
    *each(
        "exactly_once/publish/transactional.py",
        (f"{OTHER_LOGS}::test_a_transaction_that_a_compacted_topic_does_not_show_is_unknown",),
        (
            "transaction-cleaned",
            "a transaction that a compacted topic does not show was aborted: doubles",
            "if (why := describe(self._kafka, topic).why_unsure()) is None:",
            "if (why := None) is None:",
        ),
    ),
    # Without transactions: what a killed life has sent may not be visible yet.
    *each(
        "exactly_once/publish/recovery.py",
        (f"{ON_BROKER}::test_without_transactions_recovery_waits_for_replicas_after_an_unclean_end",),
        (
            "lags-once",
            "a replica that lags may still be in sync when the topic is read: doubles",
            "_LAGS = 1.5",
            "_LAGS = 1.0",
        ),
        (
            "leaves-at-once",
            "the topic is read before the controller has written down who is in sync: doubles",
            "_LEAVE_SECONDS = 1.0",
            "_LEAVE_SECONDS = 0.0",
        ),
    ),
    *each(
        "exactly_once/publish/recovery.py",
        (f"{ON_BROKER}::test_transactions_after_a_life_without_them_wait_for_replicas_too",),
        (
            "fence-trusted",
            "what was sent without transactions counts as fenced: doubles",
            'self.is_fenced and content.get("transactions", True)',
            "self.is_fenced",
        ),
    ),
    *each(
        "exactly_once/publish/tail.py",
        (f"{LAGGING}[False-1]",),
        (
            "lag-of-anybody",
            "replica.lag.time.max.ms is asked of a broker that may be away",
            "str(leaders[0])",
            "str(min(found.brokers))",
        ),
    ),
)
