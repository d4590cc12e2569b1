"""Patches of the Spark sink."""

from __future__ import annotations

from .mutant import each

RANGES = "tests/spark/test_ranges.py"
FILTER = "tests/spark/test_offset_filter.py"
ATTEMPTS = "tests/spark/test_attempts.py"
OWNERS = "tests/spark/test_owners.py"
LOST = "tests/spark/test_lost_commits.py"
PUBLICATION = "tests/spark/test_publication.py"
DEFINE = "tests/spark/test_define.py"
MADE = "tests/spark/test_made_tables.py"
CLAIMS = "tests/spark/test_claims.py"
CAUGHT = "tests/spark/test_caught_errors.py"
NAMES = "tests/spark/test_names.py"

SPARK = (
    # What a batch covers against what the ledger says.
    *each(
        "spark_sink/ranges.py",
        (RANGES,),
        (
            "range-lost",
            "a batch goes on behind a ledger that was set back: loses",
            "if given.start is not None and next_offset < given.start:",
            "if False:",
        ),
        (
            "range-twice",
            "what the ledger has of a batch is written again: doubles",
            "todo.append(replace(given, start=next_offset))",
            "todo.append(given)",
        ),
        (
            "range-written",
            "a batch that the ledger has whole is written again",
            "if next_offset < given.end:",
            "if True:",
        ),
        (
            "range-back",
            "offsets of a topic that was made again count as written: loses",
            "if given.end < given.first:",
            "if False:",
        ),
        (
            "range-skipped",
            "what was lost below the mark passes for batches that were left out: loses",
            "written.get(r.partition, r.start) <= next_offsets[r.partition] < r.start",
            "next_offsets[r.partition] < r.start",
        ),
        (
            "rows-end",
            "the last row of a batch comes again: doubles",
            "ends[partition] = max(highest + 1, ends.get(partition, 0))",
            "ends[partition] = max(highest, ends.get(partition, 0))",
        ),
        (
            "rows-kept",
            "rows that a state has kept count as written: loses",
            "        if lowest < start:\n",
            "        if False:\n",
        ),
    ),
    *each(
        "spark_sink/ranges.py",
        (FILTER,),
        (
            "row-at-offset",
            "the first row above the ledger is dropped: loses",
            "pc.greater_equal(offsets, self._from[partition])",
            "pc.greater(offsets, self._from[partition])",
        ),
        (
            "row-at-end",
            "a row at the end of the batch passes",
            "if last >= covered.end:",
            "if last > covered.end:",
        ),
        (
            "row-before",
            "a row of an earlier batch is dropped in silence: loses",
            "if first < covered.first:",
            "if False:",
        ),
        (
            "rows-equal",
            "two rows of one message pass where a prefix is demanded",
            "pc.greater(offsets[1:], offsets[:-1])",
            "pc.greater_equal(offsets[1:], offsets[:-1])",
        ),
        (
            "rows-since",
            "a row again from before the last ones passes where a prefix is demanded",
            "first > self.last.get(partition, -1)",
            "first >= self.last.get(partition, -1)",
        ),
        (
            "row-nowhere",
            "a row without an offset passes",
            "if any(rows.column(name).null_count for name in PLACES):",
            "if False:",
        ),
        (
            "keys-alike",
            "rows of one message pass for an event that came before: loses",
            'if each[_KEY] not in (None, ""):',
            "if False:",
        ),
        (
            "keys-cut",
            "the same, where the edge of a COPY cuts the message: loses",
            "rows = pa.concat_tables([*self._edge, rows])",
            "rows = pa.concat_tables([rows])",
        ),
    ),
    # One try to write the rows of a batch.
    *each(
        "spark_sink/attempt.py",
        (f"{ATTEMPTS}::test_rows_that_cannot_be_replaced_are_not_doubled",),
        (
            "replace-left",
            "rows that a rule or a trigger keeps stay beside those that replace them: doubles",
            "== (True,):",
            "is None:",
        ),
        (
            "replace-policy",
            "rows that a policy hides stay beside those that replace them: doubles",
            "if table.has_row_security:",
            "if False:",
        ),
    ),
    *each(
        "spark_sink/attempt.py",
        ("tests/spark/test_batches.py::test_rows_that_an_explode_makes_of_a_message_stay_in_their_order",),
        (
            "explode-order",
            "of the rows that one message has for a key another one than the last wins",
            "sortWithinPartitions(*order, NUMBER)",
            "sortWithinPartitions(*order)",
        ),
    ),
    *each(
        "spark_sink/owners.py",
        (f"{PUBLICATION}::test_a_batch_job_that_counts_otherwise_than_the_one_before_is_refused",),
        (
            "job-counts",
            "a batch job that counts otherwise than the one before writes all again: doubles",
            'and not (is_job and options.mode == "replace")',
            "and not is_job",
        ),
    ),
    *each(
        "spark_sink/attempt.py",
        (ATTEMPTS,),
        (
            "mark-lacks",
            "input that ends early is taken for all of it: loses",
            "    if seen == 1:\n        return\n",
            "    return\n",
        ),
        (
            "mark-passed",
            "rows behind the end mark are written in disorder",
            "if (seen and table.num_rows) or pc.sum(rows.column(END)).as_py():",
            "if False:",
        ),
        (
            "twin-prefix",
            "a twin that landed a part passes for the whole: loses",
            "if any(landed[p] < end for p, (_, end) in moves.items()):",
            "if False:",
        ),
        (
            "commits-itself",
            "a function that commits by itself is not told of: doubles",
            'if self._may_have_committed and self.unit.outcome() == "committed":',
            "if False:",
        ),
        (
            "replace-adds",
            "a batch that replaces all rows is added to them",
            'if part.options.mode == "replace":',
            "if False:",
        ),
        (
            "prefix-end",
            "the last row of a prefix comes again: doubles",
            "(standing[p], offset + 1) for p, offset",
            "(standing[p], offset) for p, offset",
        ),
        (
            "prefix-disorder",
            "rows in disorder are committed part by part: loses",
            'strictly = work.options.transaction == "partition"',
            "strictly = False",
        ),
    ),
    # Rows of events that came before.
    *each(
        "spark_sink/attempt.py",
        (
            f"{CLAIMS}::test_a_dead_letter_has_claimed_nothing",
            f"{CLAIMS}::test_a_dead_letter_names_what_its_row_has_to_claim",
        ),
        (
            "claim-stays",
            "a row that is set aside has claimed its event: loses the next one of it",
            """\
                with self.unit.connection.transaction():  # what cannot be stored has claimed nothing
                    if part.options.claim is not None:
                        with naming(some):
                            kept = self._first(some, part.options.claim, number)
""",
            """\
                if part.options.claim is not None:
                    with naming(some):
                        kept = self._first(some, part.options.claim, number)
                with self.unit.connection.transaction():
""",
        ),
        (
            "claim-letter",
            "a dead letter does not name its event",
            "headers.append((CLAIM_HEADER, _claimed(table, key).encode()))",
            "pass",
        ),
    ),
    *each(
        "spark_sink/attempt.py",
        (
            f"{CLAIMS}::test_keys_are_those_of_the_sink_command",
            f"{CLAIMS}::test_text_is_text_and_a_number_a_number_for_both",
            f"{CLAIMS}::test_a_row_without_a_key_is_named",
            f"{CLAIMS}::test_what_an_attempt_finds_claimed_by_its_twin_is_dropped",
        ),
        (
            "claim-anywhere",
            "an event of one table is one of all: loses",
            'return f"{table} {json.dumps(key)}"',
            "return json.dumps(key)",
        ),
        (
            "claim-text",
            "a number is the text of it: loses",
            'return f"{table} {json.dumps(key)}"',
            'return f"{table} {key}"',
        ),
        (
            "claim-empty",
            "an empty id is one of all rows without: loses",
            'if key in (None, "")), None)',
            "if key is None), None)",
        ),
        (
            "claim-twin",
            "an attempt that was outrun does not count what it has found claimed",
            "self.result.dropped + self.result.rows + self.result.repeated",
            "self.result.dropped + self.result.rows",
        ),
    ),
    *each(
        "spark_sink/options.py",
        (f"{CLAIMS}::test_the_data_source_claims_in_the_order_of_offsets",),
        (
            "claim-order",
            "which row of an event is the first is left to a shuffle",
            'return self.mode != "append" or self.claim is not None',
            'return self.mode != "append"',
        ),
    ),
    *each(
        "spark_sink/owners.py",
        (OWNERS, LOST),
        (
            "row-behind",
            "a row below where its driver found it is written on: loses",
            "        if verdict is Conflict.REWOUND:\n",
            "        if False:\n",
        ),
        (
            "row-found",
            "a driver forgets where it has found a row: loses",
            "replace(self.held[partition], expected=found, generation=row.generation)",
            "replace(self.held[partition], generation=row.generation)",
        ),
        (
            "row-new",
            "a checkpoint goes on where the ledger knows nothing: loses",
            "if batch_id > 0 and given.start is not None:",
            "if False:",
        ),
        (
            "row-deleted",
            "a row that somebody deleted begins anew",
            "                if partition in ever_existed:\n",
            "                if False:\n",
        ),
        (
            "row-halted",
            "a row is begun beside one that is halted",
            "                    refuse_halted(group.group_id, group.schema, row)\n",
            "                    pass\n",
        ),
        (
            "finish-left",
            "a row that a failover has set back behind its tasks goes unnoticed: loses",
            "rows = checked_rows(ledger, list(wanted.values()))",
            "rows = checked_rows(ledger, [replace(each, expected=0) for each in wanted.values()])",
        ),
    ),
    *each(
        "spark_sink/owners.py",
        (f"{ATTEMPTS}::test_another_query_may_have_a_group_until_a_batch_was_counted",),
        (
            "query-another",
            "another query goes on with the batch ids of a group: loses",
            "if self._counts and taken[other].next_offset:",
            "if False:",
        ),
    ),
    # What tasks have staged, and the driver publishes.
    *each(
        "spark_sink/publication.py",
        (PUBLICATION,),
        (
            "published-again",
            "a publication whose answer was lost is made again",
            "if published is not None and (is_job or batch_id < published):",
            "if False:",
        ),
        (
            "chunk-nowhere",
            "rows without a place are put in order",
            "if any(None in (*partition, *ends) for chunk in chunks for partition, *ends in chunk.spans):",
            "if False:",
        ),
        (
            "run-unknown",
            "a run that the database has forgotten goes on",
            "        if self._query not in self._owners.held:\n",
            "        if False:\n",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/spark_stage.sql",
        (
            f"{PUBLICATION}::test_of_a_thousand_runs_the_latest_are_remembered",
            f"{PUBLICATION}::test_what_is_staged_for_a_later_batch_or_by_another_group_stays",
            f"{PUBLICATION}::test_leftovers_go_by_age_and_those_of_an_attempt_at_work_stay",
            f"{PUBLICATION}::test_a_later_run_knows_where_the_batch_before_its_own_has_ended",
        ),
        (
            "unstage-later",
            "what is staged for a later batch is deleted",
            " AND batch_id <= %(batch_id)s",
            "",
        ),
        (
            "reap-at-work",
            "what an attempt at work has staged long ago is deleted",
            "WHERE young.attempt = s.attempt AND young.staged_at",
            "WHERE young.attempt = s.attempt AND young.number = s.number AND young.staged_at",
        ),
        (
            "runs-oldest",
            "of a thousand runs the latest are forgotten",
            "ORDER BY registered_at DESC OFFSET 1000",
            "ORDER BY registered_at OFFSET 1000",
        ),
        (
            "ended-nowhere",
            "a run does not know where the one before it has ended: loses",
            " AND q.batch_id = %(batch_id)s - 1\n",
            " AND false\n",
        ),
        (
            "ended-any",
            "how far any earlier run has written counts as the batch before",
            " AND q.batch_id = %(batch_id)s - 1\n",
            "\n",
        ),
    ),
    # Tables that are made, and columns that are added.
    *each(
        "spark_sink/define.py",
        (DEFINE,),
        (
            "define-race",
            "of two drivers that make a table at once one fails",
            "contextlib.suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable)",
            "contextlib.nullcontext()",
        ),
        (
            "define-smaller",
            "what a table lacks that another driver makes at once is not added",
            "            table = read_table(connection, name)\n    if table",
            "            pass\n    if table",
        ),
        (
            "define-temporary",
            "rows go into a table that ends with its connection: loses",
            'if table is not None and table.schema.startswith("pg_temp_"):',
            "if False:",
        ),
        (
            "define-unasked",
            "columns are added though nobody has asked for it",
            "if table is not None and options.evolve is None:",
            "if False:",
        ),
        (
            "define-places",
            "columns that only tell where a row comes from are made",
            "not in known | left_out",
            "not in known",
        ),
        (
            "define-key",
            "the columns of the key are left out with those that tell where a row comes from",
            " - {*(options.key or ())}",
            "",
        ),
        (
            "define-case",
            "Amount is added beside amount",
            "other.lower() == name.lower()",
            "False",
        ),
        (
            "define-nested",
            "what is nested gets an array of what Postgres cannot nest",
            'element.endswith(("jsonb", "[]"))',
            "False",
        ),
        (
            "define-view",
            "a name that is none of a table is made one",
            "except TableMissing as error:",
            "except TableError as error:",
        ),
    ),
    *each(
        "exactly_once/writer/ddl.py",
        (DEFINE,),
        (
            "define-unique",
            "a table is made without its key: an upsert finds none",
            "    if key:\n",
            "    if False:\n",
        ),
    ),
    *each(
        "spark_sink/run.py",
        (
            f"{MADE}::test_what_is_refused_leaves_no_table_behind",
            f"{MADE}::test_an_attempt_that_stands_still_does_not_keep_the_table_from_its_columns",
        ),
        (
            "define-refused",
            "a frame that is refused leaves its table behind",
            "match(schema, table, target, key)",
            "pass",
        ),
        (
            "define-frozen",
            "an attempt that stands still keeps the table from its columns",
            "as (connection, pid), self._watcher.acquiring(pid, ()):",
            "as (connection, pid):",
        ),
        (
            "define-later",
            "a column that comes within a query is not added",
            "any(new_columns(each, *self._tables[name][::2])",
            "any({}",
        ),
    ),
    # A batch that failed, behind which Spark goes on.
    *each(
        "spark_sink/offset_log.py",
        (f"{RANGES}::test_a_failure_is_kept_until_its_batch_was_written",),
        (
            "failure-written",
            "a batch that is written hides one behind it that failed: loses",
            "if failure is not None and failure.batch_id <= batch_id:",
            "if failure is not None:",
        ),
        (
            "failure-last",
            "of several failures the last one is named",
            "first = min(other, this, key=lambda failure: failure.batch_id)",
            "first = this",
        ),
        (
            "failure-short",
            "what an earlier failure left out counts as written: loses",
            "together = {p: max(other.ends.get(p, 0), this.ends.get(p, 0)) for p in {*other.ends, *this.ends}}",
            "together = this.ends",
        ),
        (
            "failure-for-ever",
            "a failure is told of although the ledger has all of it",
            "._replace(failure=replace_by))",
            ")",
        ),
        (
            "failure-forgotten",
            "a failure is not in the file beside the checkpoint: loses",
            '"failure": failed}',
            '"failure": None}',
        ),
    ),
    *each(
        "spark_sink/offset_log.py",
        (f"{RANGES}::test_batches_of_files_are_told_apart_by_the_time",),
        (
            "files-alike",
            "other files under a number that was counted pass for a replay: loses",
            " if all(map(_kafka_offsets, ends)) else text",
            "",
        ),
    ),
    *each(
        "spark_sink/sink.py",
        (f"{CAUGHT}::test_a_database_that_cannot_be_reached_is_such_an_error",),
        (
            "failure-unnoted",
            "a batch whose error the user's function catches is lost",
            "            run.note_failure(batch_id, error, is_counted=_last.get(writes) == (batch_id, None))\n",
            "",
        ),
    ),
    *each(
        "spark_sink/run.py",
        (f"{CAUGHT}::test_a_ledger_that_was_set_back_is_not_laid_to_the_function",),
        (
            "set-back-blamed",
            "a database that was set back is laid to the user's function",
            "if failure is None or was_set_back:",
            "if failure is None:",
        ),
    ),
    *each(
        "spark_sink/run.py",
        (f"{CAUGHT}::test_a_failure_behind_one_that_was_left_out_is_named_itself",),
        (
            "failure-unsettled",
            "a failure that an operator has left out is told of in place of the next one",
            "            self._log.settle_failure(group_id)\n",
            "            pass\n",
        ),
    ),
    *each(
        "spark_sink/ranges.py",
        (f"{CAUGHT}::test_what_fails_before_the_ledger_has_a_row_is_refused_as_well[batch]",),
        (
            "resets-no-row",
            "the command that an error names is refused where the topic has no row",
            "absent = sorted({p.topic for p in offsets} - {p.topic for p in existing})",
            "absent = []",
        ),
    ),
    *each(
        "spark_sink/run.py",
        (f"{CAUGHT}::test_what_failed_under_another_kind_of_ledger_is_refused_as_well[batch-id-batch]",),
        (
            "failure-new",
            "a batch that failed is lost where the ledger counts otherwise by then",
            "if new := [r for r in new if failure is None or r.start is None]:",
            "if new:",
        ),
    ),
    *each(
        "spark_sink/ranges.py",
        (f"{NAMES}::test_the_key_to_claim[.a]",),
        (
            "key-as-path",
            "a key to claim whose name begins with a dot is read as a path",
            "kept.select([*PLACES, self._claim]).rename_columns([*PLACES, _KEY]), self._claim)",
            "kept.select([*PLACES, self._claim]).rename_columns([*PLACES, self._claim]), self._claim)",
        ),
    ),
    *each(
        "spark_sink/run.py",
        (f"{NAMES}::test_columns_that_are_there",),
        (
            "names-to-tasks",
            "columns with dots in their names do not reach the tasks",
            "numbered = frame.toDF(*map(str, range(len(frame.columns))))",
            "numbered = frame",
        ),
    ),
    *each(
        "spark_sink/attempt.py",
        (f"{ATTEMPTS}::test_also_cannot_change_how_far_the_ledger_moves",),
        (
            "moves-emptied",
            "a function that empties the offsets of its unit stores effects without them: doubles",
            "offsets=dict(moves)))",
            "offsets=moves))",
        ),
    ),
    # The table that a run writes.
    *each(
        "spark_sink/attempt.py",
        ("tests/spark/test_tables.py::test_a_run_writes_the_table_that_it_began_with",),
        (
            "task-table",
            "a task finds another table under the name: misplaces",
            "part.options.writer(part.table)",
            "part.options.writer()",
        ),
    ),
    *each(
        "spark_sink/owners.py",
        (f"{PUBLICATION}::test_a_table_that_was_emptied_is_told",),
        (
            "emptied-table",
            "nothing tells that the rows of earlier batches are gone",
            "if not has_written or each.mode",
            "if True or each.mode",
        ),
    ),
    *each(
        "spark_sink/options.py",
        (f"{CLAIMS}::test_a_bad_row_that_is_replaced_at_once_is_a_dead_letter",),
        (
            "spark-claim-unseen",
            "a bad row claims an event's key where another row replaces it at once: loses",
            "sends_each=self.claim is not None",
            "sends_each=False",
        ),
    ),
    *each(
        "spark_sink/run.py",
        ("tests/spark/test_connect.py::test_the_checkpoint_of_another_query_is_refused",),
        (
            "connect-checkpoint",
            "over Spark Connect the checkpoint of another query counts as the own one: loses",
            "if self.query_id not in possible:",
            "if query is not None and self.query_id not in possible:",
        ),
    ),
    *each(
        "spark_sink/offset_log.py",
        ("tests/spark/test_ranges.py::test_a_checkpoint_that_has_done_the_batch_is_another_querys",),
        (
            "connect-checkpoint-done",
            "a checkpoint that has done the batch counts as that of the query that writes it: loses",
            'if self._read(f"commits/{batch_id}") is not None:',
            "if False:",
        ),
    ),
    *each(
        "spark_sink/owners.py",
        (
            "tests/spark/test_owners.py::test_a_topic_that_is_made_again_while_a_run_has_it_is_refused_by_its_next_batch",
        ),
        (
            "recreated-while-running",
            "of a topic that is made again under a running query the beginning is lost",
            "                    self.starter.recheck(each.partition, each.topic_id,",
            "                    print(each.partition, each.topic_id,",
        ),
    ),
    *each(
        "spark_sink/attempt.py",
        ("tests/spark/test_bad_rows.py::test_what_is_no_json_is_refused_again_when_it_is_replayed",),
        (
            "no-json-as-text",
            "a dead letter's text that is no JSON is stored as a JSON string when it is replayed",
            'return f"no JSON: {text}"',
            "return text",
        ),
        (
            "no-json-as-it-is",
            "a dead letter's text that is no JSON brings fields of its own when it is replayed",
            'return f"no JSON: {text}"',
            "return found",
        ),
    ),
    *each(
        "spark_sink/frame.py",
        ("tests/spark/test_frame.py::test_what_goes_into_json_keeps_all_that_it_holds",),
        (
            "nan-as-text",
            "NaN within JSON is stored as text",
            "F.when(F.expr(odd), refused).otherwise(text) if odd else text",
            "text",
        ),
    ),
    # What may pick rows by looking at others, where each task commits by itself.
    *each(
        "spark_sink/stream_query.py",
        ("tests/spark/test_plans.py",),
        (
            "plan-operators",
            "an operator that picks rows of a group is taken: loses and doubles",
            "(name not in _BY_ROW and read)",
            "name in ('Deduplicate', 'Aggregate', 'GlobalLimit', 'Sample')",
        ),
        (
            "plan-itself",
            "a join of the batch with itself is taken: loses and doubles",
            "sum(batch in each for each in inputs) > 1",
            "False",
        ),
        (
            "plan-dimension",
            "a dimension that is joined twice is refused",
            "sum(batch in each for each in inputs) > 1",
            "sum(map(len, inputs)) > len(set().union(*inputs))",
        ),
        (
            "plan-named",
            "what a common table expression reads is not looked at: loses and doubles",
            "return defined[node.cteId()]",
            "return set()",
        ),
    ),
    *each(
        "spark_sink/publication.py",
        ("tests/spark/test_data_source.py::test_a_query_goes_on_behind_an_old_run_of_it_that_has_counted_last",),
        (
            "counted-by-old",
            "a query whose old run has counted last is refused for ever",
            "if not are_whole:",
            "if True:",
        ),
    ),
)
