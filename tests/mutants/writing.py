"""Patches of the table writer: conversions, changes of one key, COPY."""

from __future__ import annotations

from .mutant import each

CHANGES = "tests/writer/test_changes.py"
CODECS = "tests/writer/test_codecs.py"
TABLE_WRITER = "tests/writer/test_table_writer.py"
FORMATS = "tests/writer/test_formats.py"
ENVELOPES = "tests/writer/test_envelopes.py"
SHAPING = "tests/writer/test_shaping.py"
TYPES = "tests/writer/test_types.py"
NEW_TABLES = "tests/cli/test_sink_new_tables.py"

WRITING = (
    # Several changes of one key.
    *each(
        "exactly_once/writer/changes.py",
        (CHANGES,),
        (
            "newest-tie",
            "of two rows that are equally new the earlier one stays",
            "new >= old)",
            "new > old)",
        ),
        (
            "delete-missed",
            "a delete behind the row that it deletes counts as one that found none",
            "            if not fate.is_delete_first:\n",
            "            if False:\n",
        ),
        (
            "newest-null",
            "a row without a version overwrites one that has it",
            "return old is None or (new is not None and new >= old)",
            "return old is None or new is None or new >= old",
        ),
        (
            "newest-null-stays",
            "a row without a version is never overwritten",
            "return old is None or (new is not None and new >= old)",
            "return old is not None and new is not None and new >= old",
        ),
        (
            "insert-column",
            "a column that only an insert fills is overwritten",
            "if position in rules.inserted_only or is_missing:",
            "if is_missing:",
        ),
        (
            "missing-overwrites",
            "a field that a message lacks empties the column",
            "if position in rules.inserted_only or is_missing:",
            "if position in rules.inserted_only:",
        ),
        (
            "outlives-tombstone",
            "columns outlive the tombstone before their row",
            "if fate.deleted is not None and (fate.row is None or not rules.replaces_all):",
            "if fate.deleted is not None and fate.row is None:",
        ),
        (
            "rounds-one",
            "two additions to one row in one statement",
            "        if number == len(result):\n            result.append([])\n        result[number].append(index)",
            "        result = result or [[]]\n        result[0].append(index)",
        ),
    ),
    # Numbers.
    *each(
        "exactly_once/writer/numbers.py",
        (CODECS, "tests/writer/test_from_json.py"),
        (
            "real-zero",
            "a number too small for real becomes 0",
            "if value and not kept:",
            "if False:",
        ),
        (
            "integer-cut",
            "an integer loses its fraction",
            "if value != value // 1:",
            "if False:",
        ),
        (
            "double-digits",
            "an integer loses digits in a double",
            "if isinstance(value, int) and result != value:",
            "if False:",
        ),
        (
            "double-infinite",
            "a number too large for a double becomes infinity",
            "if math.isinf(result) and value not in (math.inf, -math.inf):",
            "if False:",
        ),
        (
            "boolean-one",
            "true becomes the number 1",
            "    def coerce(value: Any) -> Any:\n        if isinstance(value, bool):\n",
            "    def coerce(value: Any) -> Any:\n        if False:\n",
        ),
        (
            "numeric-digits",
            "digits beyond the scale are rounded away",
            "if exponent < -scale and any(digits[max(0, len(digits) + exponent + scale) :]):",
            "if False:",
        ),
        (
            "numeric-precision",
            "a number with one digit too many passes",
            "if value and value.adjusted() >= precision - scale:",
            "if value and value.adjusted() > precision - scale:",
        ),
        (
            "numeric-nan",
            "a NaN that Postgres does not hold passes",
            'if value.is_nan() and str(value) != "NaN":\n            raise',
            "if False:\n            raise",
        ),
        (
            "numeric-float",
            "a float brings digits that nobody wrote",
            "return Decimal(float.__repr__(value))",
            "return Decimal(value)",
        ),
        (
            "unscaled-sign",
            "a negative decimal in base64 is a large positive one",
            "int.from_bytes(data, signed=True)",
            "int.from_bytes(data)",
        ),
        (
            "oid-octal",
            "an oid with leading zeros is another number",
            "if _OCTAL_TEXT.match(text):",
            "if False:",
        ),
    ),
    # Times.
    *each(
        "exactly_once/writer/times.py",
        (CODECS, "tests/writer/test_from_json.py"),
        (
            "zone-unseen",
            "a column full of times without a zone passes for one with",
            "return all(zones) if is_zoned else not any(zones)",
            "return True",
        ),
        (
            "zone-dropped",
            "a time zone that the column cannot hold is dropped",
            "value.astimezone(UTC).replace(tzinfo=None)",
            "value.replace(tzinfo=None)",
        ),
        (
            "fraction-zero",
            "timestamp(0) rounds a fraction",
            "if 0 <= typmod < 6 and",
            "if 0 < typmod < 6 and",
        ),
        (
            "end-of-day",
            "24:00 is the midnight before",
            "timedelta(days=midnights, microseconds=microseconds)",
            "timedelta(microseconds=microseconds)",
        ),
        (
            "fraction-cut",
            "digits below the microsecond are cut and not rounded",
            'round(float(f"0.{found[1]}") * _SECOND)',
            'int(float(f"0.{found[1]}") * _SECOND)',
        ),
        (
            "nanoseconds",
            "nanoseconds are cut off",
            'if getattr(value, "nanosecond", 0):',
            "if False:",
        ),
        (
            "date-of-moment",
            "a date column takes a moment and drops its time",
            "if isinstance(value, datetime) or not isinstance(value, (date, str)):",
            "if not isinstance(value, (date, str)):",
        ),
        (
            "christ-zone",
            "a moment before Christ without a zone is read in the server's",
            'and (before_christ["zone"] is not None) is is_zoned:\n        return text',
            "and True:\n        return text",
        ),
    ),
    # What JSON says.
    *each(
        "exactly_once/writer/json_values.py",
        ("tests/writer/test_from_json.py",),
        (
            "epoch-cut",
            "digits of a moment below the microsecond are cut and not rounded",
            "rounding=ROUND_HALF_EVEN",
            'rounding="ROUND_DOWN"',
        ),
        (
            "epoch-day",
            "a date column takes a number with a time and drops it",
            "if microseconds % _DAY:",
            "if False:",
        ),
        (
            "parts-nanosecond",
            "nanoseconds of a time in parts are cut off",
            "if nanosecond % 1000:",
            "if False:",
        ),
        (
            "double-zero",
            "-0 loses its sign",
            "re.ASCII) and int(text) else text",
            "re.ASCII) else text",
        ),
    ),
    *each(
        "exactly_once/writer/sink.py",
        ("tests/writer/test_sifting.py",),
        (
            "sift-behind",
            "what comes behind a bad message is lost",
            "parts += [part[at + 1 :], part[:at]]",
            "parts += [part[:at]]",
        ),
        (
            "sift-before",
            "what comes before a bad message is lost",
            "parts += [part[at + 1 :], part[:at]]",
            "parts += [part[at + 1 :]]",
        ),
        (
            "sift-order",
            "parts of a batch are stored from the last to the first",
            "for start in range(0, len(messages), _SIFTED)][::-1]",
            "for start in range(0, len(messages), _SIFTED)]",
        ),
    ),
    *each(
        "exactly_once/writer/numbers.py",
        ("tests/writer/test_envelopes.py::test_a_value_of_a_logical_type_becomes_what_it_stands_for",),
        (
            "decimal-sign",
            "a negative decimal of Connect is a large positive one",
            "int.from_bytes(data, signed=True)",
            "int.from_bytes(data)",
        ),
    ),
    *each(
        "exactly_once/writer/logical.py",
        ("tests/writer/test_envelopes.py::test_a_value_of_a_logical_type_becomes_what_it_stands_for",),
        (
            "bits-order",
            "bits are read from the other end",
            'validate=True), "little")',
            'validate=True), "big")',
        ),
        (
            "instant-zone",
            "an instant loses its zone",
            'or (kind == "instant" and of_column != "timestamp")',
            "or False",
        ),
    ),
    # Texts, and the form in which rows go.
    *each(
        "exactly_once/writer/texts.py",
        (CODECS, "tests/writer/test_from_json.py"),
        (
            "name-bytes",
            "a name of many bytes is cut by Postgres",
            "len(value.encode()) <= NAME_BYTES",
            "len(value) <= NAME_BYTES",
        ),
        (
            "varchar-long",
            "blanks beyond the length are cut by Postgres",
            "len(value) <= length, f",
            "len(value.rstrip()) <= length, f",
        ),
    ),
    *each(
        "exactly_once/writer/plan.py",
        (CODECS,),
        (
            "copy-tab",
            "a tab in a text begins the next column",
            '"\\t": "\\\\t", ',
            "",
        ),
        (
            "copy-backslash",
            "a backslash in a text begins an escape",
            '"\\\\": "\\\\\\\\", ',
            "",
        ),
    ),
    # Statements, and what of changes becomes one.
    *each(
        "exactly_once/writer/statements.py",
        ("tests/writer/test_table_writer.py::test_a_row_that_is_older_is_ignored",),
        (
            "stored-null",
            "a stored row without a version is never overwritten",
            '" WHERE t.{0} IS NOT DISTINCT FROM NULL OR EXCLUDED.{0} {1} t.{0}"',
            '" WHERE EXCLUDED.{0} {1} t.{0}"',
        ),
        (
            "stored-tie",
            "a stored row stays where the new one is equally new",
            '_operator(">=", newest)',
            '_operator(">", newest)',
        ),
    ),
    *each(
        "exactly_once/writer/statements.py",
        (
            "tests/writer/test_table_writer.py::test_a_change_touches_only_the_columns_that_were_named",
            "tests/writer/test_table_writer.py::test_rows_are_locked_in_the_order_of_the_key",
            "tests/writer/test_table_writer.py::test_the_sum_of_a_number_and_nothing_is_the_number",
        ),
        (
            "stored-all",
            "columns that were not named are changed",
            "if n not in conflict.key and n in allowed]",
            "if n not in conflict.key]",
        ),
        (
            "doomed-order",
            "rows are deleted in the order in which they come: deadlock",
            'sql.SQL("ORDER BY {} FOR UPDATE OF t").format(_list(columns))',
            'sql.SQL("FOR UPDATE OF t")',
        ),
        (
            "sum-null",
            "the sum with nothing is nothing",
            '"{0} = coalesce(t.{0} + EXCLUDED.{0}, EXCLUDED.{0}, t.{0})"',
            '"{0} = t.{0} + EXCLUDED.{0}"',
        ),
    ),
    *each(
        "exactly_once/writer/statements.py",
        ("tests/writer/test_upsert.py::test_the_fields_of_an_interval_say_what_a_number_means",),
        (
            "interval-cast",
            "a number for an interval of months is read as seconds, and stored as 0",
            "read if c.is_interval_of_fields else cast",
            "cast",
        ),
    ),
    *each(
        "exactly_once/writer/sink.py",
        (
            "tests/writer/test_from_json.py::test_a_decoder_that_makes_null_of_a_missing_field_is_refused_where_that_is_not_null",
        ),
        (
            "keep-null",
            "a decoder makes null of what the table is to keep: loses",
            'if says not in (None, "apart"):',
            "if False:",
        ),
    ),
    *each(
        "exactly_once/writer/statements.py",
        ("tests/writer/test_shaping.py::test_a_partial_update_keeps_what_the_rest_has",),
        (
            "rest-replaced",
            "a partial update empties the column for the rest: loses",
            "both if n in conflict.merge else",
            "both if False else",
        ),
    ),
    *each(
        "exactly_once/writer/upsert.py",
        (
            "tests/writer/test_table_writer.py::test_a_row_after_a_tombstone_inherits_nothing",
            "tests/writer/test_table_writer.py::test_a_key_without_a_value_is_refused",
            "tests/writer/test_upsert.py::test_a_key_is_stored_as_it_was_written_first_however_changes_are_cut",
            "tests/writer/test_upsert.py::test_the_change_that_lacks_a_value_of_no_row_is_named",
            "tests/writer/test_upsert.py::test_a_field_of_a_row_that_is_too_old_does_not_come_in_with_a_newer_one",
            "tests/writer/test_upsert.py::test_a_trigger_sees_each_change_of_a_batch",
        ),
        (
            "trigger-passed-by",
            "a trigger of the table sees the last change of each key only: loses",
            "if self._plan.table.keeps_order or self._sends_each:",
            "if False:",
        ),
        (
            "tombstone-inherited",
            "a row inherits columns that the rows do not have from the one that was deleted",
            "            replaces_all=says_all\n            and not (",
            "            replaces_all=not (",
        ),
        (
            "key-form",
            "a key is stored as the last change of a batch writes it",
            "inserted_only=inserted_only + changing,",
            "inserted_only=inserted_only,",
        ),
        (
            "key-missing",
            "a row without a key is stored, and comes again as another one",
            "_NO_KEY = (None, MISSING, UNAVAILABLE)",
            "_NO_KEY = (UNAVAILABLE,)",
        ),
        (
            "value-unkept",
            "a value that only a row could keep becomes a default",
            "                    if index not in there:\n",
            "                    if False:\n",
        ),
        (
            "sums-collapse",
            "of several additions to a row the last one counts",
            "elif self._conflict.add or (self._rules",
            "elif (self._rules",
        ),
        (
            "too-old-field",
            "a field of a row that is too old comes in with a newer one",
            "(self._rules.keeps_missing and newest_by is not None)",
            "(self._rules.keeps_missing and False)",
        ),
    ),
    *each(
        "exactly_once/writer/plan.py",
        (
            "tests/writer/test_table_writer.py::test_keys_that_postgres_finds_equal_are_one_key",
            "tests/writer/test_upsert.py::test_the_first_row_of_a_key_stays_whatever_fields_others_lack",
            "tests/writer/test_upsert.py::test_the_hour_that_comes_twice_in_a_time_zone_is_two",
        ),
        (
            "key-nan",
            "two rows whose key is NaN are two",
            " or (isinstance(value, Decimal) and value.is_nan())",
            "",
        ),
        (
            "key-hour-twice",
            "the hour that comes twice when clocks are set back is one key",
            "return value.tzinfo is not None and value.tzinfo.utcoffset(None) is None",
            "return False",
        ),
        (
            "first-overtaken",
            "a later row of a key overtakes the first one",
            "number += keeps_order and present != before",
            "number += 0",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/writer.sql",
        (
            "tests/writer/test_table_writer.py::test_a_partial_or_expression_index_is_no_key",
            "tests/writer/test_table_writer.py::test_an_upsert_needs_a_key_that_is_unique",
            "tests/writer/test_table_writer.py::test_an_index_with_further_columns_included_is_a_key",
            "tests/writer/test_table_writer.py::test_an_identity_column_can_be_filled_when_it_is_named",
            "tests/writer/test_table_writer.py::test_a_primary_key_without_overlaps_is_no_key_of_on_conflict",
        ),
        (
            "key-overlaps",
            "an exclusion constraint, which a primary key WITHOUT OVERLAPS is, counts as a key",
            "  AND NOT i.indisexclusion\n",
            "",
        ),
        (
            "key-partial",
            "a partial index counts as a key",
            "  AND i.indpred IS NULL AND i.indexprs IS NULL\n",
            "  AND i.indexprs IS NULL\n",
        ),
        (
            "key-deferred",
            "a key that is checked at COMMIT counts",
            " AND i.indisvalid AND i.indimmediate\n",
            " AND i.indisvalid\n",
        ),
        (
            "key-included",
            "a column that an index only carries counts as one of its key",
            "i.indkey[0:i.indnkeyatts - 1]::int2[]",
            "i.indkey::int2[]",
        ),
        (
            "identity-drawn",
            "an identity that is named is drawn anew",
            "({columns}) OVERRIDING SYSTEM VALUE SELECT",
            "({columns}) OVERRIDING USER VALUE SELECT",
        ),
    ),
    # What the next batch notices of a table.
    *each(
        "exactly_once/ledger/sql/writer.sql",
        (f"{TABLE_WRITER}::test_what_was_altered_about_a_table_is_known_in_the_next_batch",),
        (
            "shape-keys",
            "a unique index that comes or goes is not noticed",
            "CASE WHEN c.relhasindex THEN ARRAY",
            "CASE WHEN false THEN ARRAY",
        ),
        (
            "shape-primary",
            "a primary key that comes is not noticed",
            "concat(indexrelid, indisprimary, indisvalid)",
            "concat(indexrelid)",
        ),
        (
            "shape-defaults",
            "another default is not noticed",
            "CASE WHEN a.atthasdef THEN",
            "CASE WHEN false THEN",
        ),
        (
            "shape-rules",
            "a rule that comes is not noticed",
            "CASE WHEN c.relhasrules THEN ARRAY",
            "CASE WHEN false THEN ARRAY",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/writer.sql",
        (f"{TABLE_WRITER}::test_what_is_made_to_notice_deletes_notices_those_of_the_next_batch",),
        (
            "shape-triggers",
            "a trigger or a foreign key that comes misses a delete",
            "CASE WHEN c.relhastriggers OR",
            "CASE WHEN false OR",
        ),
        (
            "shape-partitions",
            "a trigger that comes to a partition misses a delete",
            "pg_partition_tree(CASE c.relkind WHEN 'p'",
            "pg_partition_tree(CASE c.relkind WHEN '-'",
        ),
        (
            "trigger-of-partition",
            "a trigger of a partition misses deletes",
            "AND t.tgrelid IN (SELECT oid FROM tree)",
            "AND t.tgrelid = c.oid",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/writer.sql",
        (
            "tests/writer/test_upsert.py::test_changes_of_several_keys_are_made_in_their_order_where_rows_have_to_do_with_each_other",
            "tests/writer/test_upsert.py::test_a_row_that_a_policy_keeps_from_being_deleted_has_what_was_stored_before",
        ),
        (
            "ring-passed-by",
            "rows that a deleted row would have taken with it survive, as they are stored behind the delete: doubles",
            "row_security_active(c.oid) OR EXISTS (SELECT FROM follows WHERE oid IN (SELECT oid FROM tree))",
            "row_security_active(c.oid)",
        ),
        (
            "child-passed-by",
            "what triggers of other tables do to rows, behind a delete here, they do to those that come later: loses",
            " UNION SELECT oid FROM follows",
            "",
        ),
        (
            "policy-passed-by",
            "what was stored before a delete that a policy or a rule prevents is left out: loses",
            "row_security_active(c.oid) OR EXISTS",
            "EXISTS",
        ),
    ),
    *each(
        "exactly_once/writer/statements.py",
        (
            "tests/writer/test_upsert.py::test_changes_of_several_keys_are_made_in_their_order_where_rows_have_to_do_with_each_other",
            "tests/writer/test_upsert.py::test_a_rule_for_deletes_does_what_it_says",
        ),
        (
            "order-by-key",
            "of two rows that a trigger makes one, the first by key is stored, and not the first of the topic: loses",
            "[ordinal] if plan.table.keeps_order else",
            "[ordinal] if False else",
        ),
        (
            "delete-ruled",
            "a delete that a rule rewrites fails, and its message is taken for a bad one",
            "if not key.table.has_delete_rules:",
            "if True:",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/writer.sql",
        (f"{TABLE_WRITER}::test_policies_that_come_to_hold_are_known_in_the_next_batch",),
        (
            "shape-policies",
            "policies that come to hold are not noticed, and COPY is refused",
            "    row_security_active(c.oid),\n",
            "",
        ),
    ),
    *each(
        "exactly_once/writer/writer.py",
        (f"{TABLE_WRITER}::test_a_row_that_a_policy_refuses_is_no_sign_of_an_altered_table",),
        (
            "policy-stale",
            "a row that a policy refuses passes for a missing grant: wedges",
            "if is_kept_out(error):",
            "if False:",
        ),
    ),
    # Values of MySQL as Canal sends them.
    *each(
        "exactly_once/writer/mysql.py",
        (f"{FORMATS}::test_values_of_canal_are_read_by_the_types_of_mysql",),
        (
            "enum-next",
            "an enum is the label behind its own",
            "else [number - 1]",
            "else [number]",
        ),
        (
            "enum-quote",
            "a quote in a label is two",
            r"""re.sub(r"''|""",
            're.sub(r"',
        ),
        (
            "set-single",
            "a set is one label",
            'if base == "set" else',
            "if False else",
        ),
        (
            "bits-decimal",
            "the digits of a number are bits",
            'if base == "bit" and name in ("bit", "varbit"):',
            "if False:",
        ),
        (
            "bytes-utf8",
            "bytes are those of UTF-8",
            '.encode("latin-1")',
            ".encode()",
        ),
        (
            "bytes-of-geometry",
            "a table that is made has text for a geometry",
            "binary|blob|geom|^(multi)",
            "binary|blob|^(multi)",
        ),
    ),
    *each(
        "exactly_once/writer/mysql.py",
        (f"{FORMATS}::test_values_of_canal_that_a_column_would_take_for_others_are_refused",),
        (
            "text-as-bytes",
            "a text goes into a column of bytes as its base64",
            '    if name == "bytea":\n',
            "    if False:\n",
        ),
        (
            "label-unknown",
            "a number without a label is another error than one of the message",
            "if number and chosen[-1] >= len(labels):",
            "if False:",
        ),
        (
            "bytes-replaced",
            "bytes that are no text become replacement characters",
            "else value.decode())",
            'else value.decode(errors="replace"))',
        ),
    ),
    # Parts of keys and headers.
    *each(
        "exactly_once/writer/logical.py",
        (f"{SHAPING}::test_a_part_of_a_key_is_read_as_a_value_is",),
        (
            "key-wrapped",
            "a part of a key with a schema is not found",
            "    if not found.payload:\n        return None, text\n",
            "    return None, text\n",
        ),
    ),
    *each(
        "exactly_once/writer/logical.py",
        (f"{ENVELOPES}::test_a_delete_finds_the_row_of_a_key_that_looks_like_another",),
        (
            "key-schema",
            "a part of a key is not what its schema says: the base64 of a number is another number",
            "if columns is not None and schema is not None:",
            "if False:",
        ),
    ),
    *each(
        "exactly_once/writer/logical.py",
        (f"{ENVELOPES}::test_text_for_bytes_is_refused_where_it_may_be_hexadecimal_or_base64",),
        (
            "hex-base64",
            "hexadecimal is taken for base64 where it happens to be that, too",
            '            raise BadRow(f"{what}: {how}", column=column.name)\n',
            "            pass\n",
        ),
    ),
    *each(
        "exactly_once/writer/plan.py",
        ("tests/writer/test_upsert.py::test_zones_of_16_hours_and_more_are_stored_in_each_way",),
        (
            "far-zone",
            "the driver writes the zones of moments as text",
            ' and name_of(column.type_oid) != "timestamptz"',
            "",
        ),
    ),
    *each(
        "exactly_once/writer/envelopes.py",
        (f"{ENVELOPES}::test_a_delete_finds_the_row_of_a_key_that_looks_like_another",),
        (
            "bare-schema",
            "a key that is one value is not what its schema says: another row is deleted",
            "schema and holding(schema, name)",
            "None",
        ),
    ),
    *each(
        "exactly_once/writer/decoding.py",
        (f"{SHAPING}::test_options_of_a_column_hold_for_a_part_of_a_key_and_a_header",),
        (
            "header-plain",
            "options of a column do not hold for a header",
            'kind == "header" and (reading is None or not reading.is_special(column)):',
            'kind == "header":',
        ),
        (
            "part-plain",
            "options of a column do not hold for a part of a key",
            "            read = json_values.checked(column, known)\n",
            "            read = json_values.checked(column, json_values.Reading())\n",
        ),
    ),
    *each(
        "exactly_once/writer/from_json.py",
        (f"{SHAPING}::test_headers_and_parts_of_keys_that_never_came_are_columns_that_nothing_fills",),
        (
            "unfilled-envelope",
            "a header that never comes is not told",
            "{*self._paths, *self.envelope.sources}",
            "{*self._paths}",
        ),
    ),
    # Names with dots.
    *each(
        "exactly_once/writer/json_shape.py",
        (f"{SHAPING}::test_names_with_dots_are_found_by_filters_and_dropped_within_objects",),
        (
            "dots-whole",
            "a filter finds a name with dots only where all of it is one name, or none: loses",
            "for length in range(len(path), 0, -1):",
            "for length in {len(path): 0, 1: 0}:",
        ),
    ),
    *each(
        "exactly_once/writer/from_json.py",
        (f"{SHAPING}::test_names_with_dots_are_found_by_filters_and_dropped_within_objects",),
        (
            "dots-dropped",
            "a field with dots within an object is not dropped",
            "for names in _readings(path_of(path)))]",
            "for names in (path_of(path), (path,)))]",
        ),
    ),
    *each(
        "exactly_once/writer/envelopes.py",
        (f"{SHAPING}::test_a_field_that_is_dropped_may_be_left_out_by_the_source",),
        (
            "dropped-asked",
            "a row is refused for a value that goes nowhere",
            "if text == UNAVAILABLE and n not in self._drop), None)",
            "if text == UNAVAILABLE), None)",
        ),
    ),
    # MessagePack.
    *each(
        "exactly_once/writer/formats.py",
        (f"{FORMATS}::test_timestamps_of_messagepack_keep_their_nanoseconds",),
        (
            "msgpack-microseconds",
            "timestamps lose their nanoseconds",
            "if any(hint in value for hint in _FINE_TIMES) else",
            "if False else",
        ),
        (
            "msgpack-1970",
            "a timestamp before 1970 is one of the far future",
            'int.from_bytes(data[4:], "big", signed=True)',
            'int.from_bytes(data[4:], "big")',
        ),
    ),
    *each(
        "exactly_once/writer/formats.py",
        (f"{FORMATS}::test_extensions_of_messagepack_are_json_and_hold_up_nothing_where_no_column_takes_them",),
        (
            "msgpack-extension",
            "an extension holds up its partition",
            "if isinstance(value, msgspec.msgpack.Ext):",
            "if False:",
        ),
    ),
    # Numbers that may be base64, and bits.
    *each(
        "exactly_once/writer/envelopes.py",
        (f"{ENVELOPES}::test_a_text_that_may_be_a_number_or_its_base64_is_refused_where_no_schema_tells",),
        (
            "number-or-base64",
            "the base64 of a number is stored as another number",
            "if _NUMBER_OR_BASE64.fullmatch(row[name]):",
            "if False:",
        ),
        (
            "number-with-schema",
            "a number is refused although a schema tells what it is",
            "for name in self._unsure & row.keys() if schema is None else ():",
            "for name in self._unsure & row.keys():",
        ),
        (
            "number-decided",
            "a number is refused although an option tells what it is",
            "in NUMBERS and c.name not in self._decimal)",
            "in NUMBERS)",
        ),
    ),
    *each(
        "exactly_once/writer/logical.py",
        (f"{ENVELOPES}::test_a_value_of_a_logical_type_becomes_what_it_stands_for",),
        (
            "bit-boolean",
            "a single bit is refused by a column of bits",
            'if schema.type == "boolean":',
            "if False:",
        ),
    ),
    *each(
        "exactly_once/writer/registry.py",
        ("tests/writer/test_registry.py::test_values_may_be_plain_json_where_keys_are_in_avro",),
        (
            "unframed-believed",
            "a value that is not in the wire format is read as JSON though no key of the topic is",
            "if key is message.key():",
            "if False:",
        ),
    ),
    *each(
        "exactly_once/writer/registry.py",
        ("tests/writer/test_registry.py::test_a_field_that_a_schema_of_protobuf_lacks_is_not_dropped",),
        (
            "protobuf-unknown",
            "fields that a schema of Protobuf lacks are dropped without a word",
            "if found.ByteSize() != size:",
            "if False:",
        ),
    ),
    *each(
        "exactly_once/writer/registry.py",
        (
            "tests/writer/test_registry.py::test_a_text_of_proto2_that_is_not_utf_8_is_bad",
            "tests/writer/test_registry.py::test_an_index_of_protobuf_that_is_negative_is_bad",
        ),
        (
            "protobuf-text",
            "a text of proto2 that is not UTF-8 is stored as Python shows its bytes",
            "if is_odd and json_format.Parse(told, kind(), descriptor_pool=pool) != found:",
            "if False:",
        ),
        (
            "protobuf-index",
            "a negative index takes the last message of a file",
            "        if value & 1:\n",
            "        if False:\n",
        ),
    ),
    *each(
        "exactly_once/writer/logical.py",
        ("tests/writer/test_registry.py::test_bytes_of_a_schema_are_no_text_to_which_an_option_applies",),
        (
            "hex-told",
            "bytes of a schema are stored as others, as their base64 looks like hexadecimal",
            '        if form == "hex":\n            conversions',
            "        if False:\n            conversions",
        ),
    ),
    *each(
        "exactly_once/writer/logical.py",
        ("tests/writer/test_registry.py::test_bytes_of_a_schema_are_no_value_that_their_base64_looks_like",),
        (
            "bytes-as-number",
            "bytes of a schema are stored as the number, time or truth that their base64 looks like",
            "elif form is None and _type(column) in _WITHOUT_BYTES",
            "elif form is not None and _type(column) in _WITHOUT_BYTES",
        ),
    ),
    *each(
        "exactly_once/writer/plan.py",
        ("tests/writer/test_table_writer.py::test_a_nul_is_bad_whatever_the_mode",),
        (
            "nul-within",
            "a NUL within an array or JSON, which the driver refuses, is found in no row: nothing goes on",
            'if "\\0" in text or (',
            'if (isinstance(converted, str) and "\\0" in converted) or (',
        ),
    ),
    *each(
        "exactly_once/writer/times.py",
        (f"{TYPES}::test_the_text_of_an_interval_is_the_same_in_every_style",),
        (
            "interval-style",
            "the sign of an interval is that of all its numbers in a session of another style",
            "if _ONE_SIGN.fullmatch(text) else text",
            "if False else text",
        ),
    ),
    *each(
        "exactly_once/writer/table.py",
        (
            f"{TYPES}::test_parts_of_parts_are_looked_at",
            f"{TYPES}::test_a_session_that_reads_null_in_arrays_as_text_is_refused",
        ),
        (
            "part-unread",
            "the bounds of a range are read by the session's time zone",
            'typmod=row["typmod"]) if part else [None]',
            'typmod=row["typmod"]) if False else [None]',
        ),
        (
            "null-text",
            "a null in an array is stored as text",
            "if not reads_nulls:",
            "if False:",
        ),
    ),
    # Topics that show no columns yet.
    *each(
        "exactly_once/cli/sink_run.py",
        (f"{NEW_TABLES}::test_topics_that_show_no_columns_yet_do_not_hold_up_the_others",),
        (
            "columns-held-up",
            "a topic without messages keeps the others from being read",
            "                    waiting.append(flow)\n",
            "                    raise\n",
        ),
    ),
    *each(
        "exactly_once/cli/sink_worker.py",
        (f"{NEW_TABLES}::test_what_would_be_refused_is_refused_where_there_is_no_table_yet",),
        (
            "late-unchecked",
            "what a table would refuse counts as applied while there is none: loses",
            "                check_without_table(flow, messages)\n",
            "",
        ),
    ),
    *each(
        "exactly_once/cli/sink_worker.py",
        (f"{NEW_TABLES}::test_topics_that_show_no_columns_yet_do_not_hold_up_the_others",),
        (
            "late-untold",
            "that a table is not made is not told at the end",
            "            if flow.topics not in self._sinks:\n                text",
            "            if False:\n                text",
        ),
    ),
    # Keys that a collation finds equal, a server's other languages, bytes that are no text.
    *each(
        "exactly_once/writer/statements.py",
        (f"{TABLE_WRITER}::test_insert_ignore_keeps_the_first_of_keys_that_a_collation_finds_equal",),
        (
            "equal-spelling",
            "of keys that a collation finds equal the first by another order is stored",
            "return value if column.collation is None else sql",
            "return value if True else sql",
        ),
    ),
    *each(
        "exactly_once/writer/statements.py",
        ("tests/writer/test_statements.py",),
        (
            "language-column",
            "an error of a server with other words names no row",
            "^(?:COPY )?(?:{relations})",
            "^COPY (?:{relations})",
        ),
    ),
    *each(
        "exactly_once/writer/errors.py",
        ("tests/writer/test_statements.py",),
        (
            "language-name",
            "a right on a sequence passes for one on its table",
            '(?:$|[ ",:])',
            "",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/writer.sql",
        (f"{TABLE_WRITER}::test_an_index_of_another_collation_does_not_make_a_key",),
        (
            "index-collation",
            "an index of another collation than the column's makes a key",
            "WHERE a.attcollation <> k.collation_oid",
            "WHERE false",
        ),
    ),
    *each(
        "exactly_once/writer/texts.py",
        (f"{TABLE_WRITER}::test_bytes_that_are_no_text_are_bad_whatever_the_mode",),
        (
            "json-bytes",
            "bytes that are no text fail a batch without their message",
            "_decoded(text := bytes(value))",
            "text = bytes(value)",
        ),
    ),
    *each(
        "exactly_once/writer/registry.py",
        ("tests/writer/test_registry.py::test_a_registry_that_is_away_or_refuses_is_not_the_messages_fault",),
        (
            "registry-answer",
            "a gateway's answer for the registry makes good messages bad",
            'isinstance(found.get("schema"), str)',
            "True",
        ),
    ),
    *each(
        "exactly_once/writer/times.py",
        (f"{TYPES}::test_what_an_interval_of_fields_keeps_of_a_timedelta_is_what_postgres_keeps",),
        (
            "interval-fields",
            "of a second before nothing a day is stored",
            "(-1 if length < timedelta() else 1)",
            "1",
        ),
    ),
    *each(
        "exactly_once/writer/from_json.py",
        (f"{SHAPING}::test_a_field_that_is_dropped_and_never_comes_is_told",),
        (
            "undropped",
            "of a misspelt field that was to be dropped nobody hears",
            "            unmet=self._unmet.keys(),\n",
            "",
        ),
        (
            "undropped-escaped",
            "a field whose name JSON escapes is said never to have come",
            "if _PLAIN_NAME(path[-1]) and ",
            "if ",
        ),
    ),
    *each(
        "exactly_once/writer/formats.py",
        (f"{SHAPING}::test_of_objects_that_become_their_fields_the_same_is_told",),
        (
            "undropped-flat",
            "of objects that become their fields all that is dropped is said never to have come",
            "self.unmet -= {dotted}",
            "pass",
        ),
    ),
    *each(
        "exactly_once/writer/writer.py",
        (f"{TABLE_WRITER}::test_only_the_primary_key_is_a_key_that_nobody_has_named",),
        (
            "unnamed-key",
            "an upsert without a primary key replaces rows by another unique column: loses",
            "self._key or table.primary_key",
            "self._key or next(iter(table.keys), ())",
        ),
    ),
    *each(
        "exactly_once/writer/sink.py",
        ("tests/cli/test_sink_claim.py::test_a_bad_row_that_is_replaced_at_once_claims_nothing",),
        (
            "claim-unseen",
            "a bad row claims an event's key where another row replaces it at once: loses",
            '"sends_each": claim is not None',
            '"sends_each": False',
        ),
    ),
    *each(
        "exactly_once/writer/writer.py",
        (
            f"{TABLE_WRITER}::test_a_row_that_no_page_holds_is_not_the_one_that_copy_read_last",
            "tests/spark/test_bad_rows.py::test_a_row_that_no_page_holds_is_found",
        ),
        (
            "copy-line",
            "a row that no page holds is taken for the last one that COPY has read: wedges",
            "line = copied if is_exact and ",
            "line = copied if ",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/writer.sql",
        (f"{TABLE_WRITER}::test_a_sink_warns_of_a_foreign_table",),
        (
            "foreign-partition",
            "of a partition of another server, where a crash can double rows, nobody hears",
            "WHERE p.relkind = 'f' AND p.oid IN (SELECT oid FROM tree)",
            "WHERE p.relkind = 'f' AND p.oid = c.oid",
        ),
        (
            "foreign-partition-later",
            "a partition of another server that is attached meanwhile is not noticed",
            "count(*) FILTER (WHERE p.relkind = 'f')",
            "0",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/writer.sql",
        ("tests/writer/test_real_topics.py::test_what_was_altered_about_a_type_is_known_in_the_next_batch",),
        (
            "shape-attributes",
            "attributes of a composite type that are renamed meanwhile take each other's values",
            "SELECT string_agg(concat_ws(' ', attname, atttypid, atttypmod), ' '",
            "SELECT string_agg(concat_ws(' ', attrelid), ' '",
        ),
        (
            "shape-arrays-of-composites",
            "attributes of an array's elements that are altered meanwhile are not noticed",
            "SELECT unnest(ARRAY[t.typelem, t.typbasetype])",
            "SELECT t.typbasetype",
        ),
        (
            "shape-domains-of-composites",
            "attributes of what is within a domain that are altered meanwhile are not noticed",
            "SELECT unnest(ARRAY[t.typelem, t.typbasetype])",
            "SELECT t.typelem",
        ),
        (
            "shape-nested-composites",
            "attributes of an attribute that are altered meanwhile are not noticed",
            "WHERE attrelid = nullif(t.typrelid, 0) AND attnum > 0) AS i (inner_oid)",
            "WHERE false) AS i (inner_oid)",
        ),
    ),
    *each(
        "exactly_once/ledger/sql/writer.sql",
        ("tests/writer/test_real_topics.py::test_an_attribute_that_is_added_to_the_bounds_of_a_range_is_known",),
        (
            "shape-ranges-of-composites",
            "attributes of a range's bounds that are altered meanwhile are not noticed",
            "WHERE t.oid IN (rngtypid, (to_jsonb(r) ->> 'rngmultitypid')::oid)",
            "WHERE t.oid = (to_jsonb(r) ->> 'rngmultitypid')::oid",
        ),
    ),
    *each(
        "exactly_once/writer/writer.py",
        (f"{TABLE_WRITER}::test_what_has_no_order_has_no_newest",),
        (
            "newest-by-blamed",
            "a column that has no order is taken for a table that was altered",
            "if (self._add or self._newest_by) and state in _NO_OPERATOR",
            "if self._add and state in _NO_OPERATOR",
        ),
        (
            "add-blamed",
            "where newest_by has no order, add is blamed",
            'is_sum = self._add and ("+" in reason or self._newest_by is None)',
            "is_sum = self._add",
        ),
    ),
    *each(
        "exactly_once/writer/writer.py",
        (
            f"{TABLE_WRITER}::test_an_internal_error_of_a_types_reader_is_about_the_row",
            f"{TABLE_WRITER}::test_another_primary_key_is_told_where_no_key_was_given",
        ),
        (
            "reader-internal",
            "a value that a type's reader refuses by an internal error stops the worker: wedges",
            '_OF_READERS = ("42", "0A", "08P01", "XX000")',
            '_OF_READERS = ("42", "0A", "08P01")',
        ),
        (
            "key-changed",
            "an upsert goes on by another key, and nobody hears of it",
            "if before and before != self._conflict.key:",
            "if before and not before:",
        ),
    ),
    *each(
        "exactly_once/writer/json_values.py",
        ("tests/writer/test_real_topics.py::test_an_error_shows_value_place_and_remedy",),
        (
            "epoch-guessed",
            "the error of a number advises a unit with which it is another time",
            "if _FROM / size <= number < _TO / size:",
            'if unit == "ms":',
        ),
    ),
    *each(
        "exactly_once/writer/plan.py",
        ("tests/writer/test_table_writer.py",),
        (
            "refused-by-type",
            "of two columns of one enum the wrong one is named",
            "for found in (both, by_type, by_value)",
            "for found in (by_type[:1],)",
        ),
    ),
)
