"""Patches of the table writer: conversions, changes of one key, COPY."""

from __future__ import annotations

from .mutant import each

CHANGES = "tests/writer/test_changes.py"
CODECS = "tests/writer/test_codecs.py"

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
            "unscaled-sign",
            "a negative decimal in base64 is a large positive one",
            "int.from_bytes(_bytes(raw), signed=True)",
            "int.from_bytes(_bytes(raw))",
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
            "                parts.append(part[at + 1 :])\n",
            "",
        ),
        (
            "sift-before",
            "what comes before a bad message is lost",
            "                    parts.append(part[:at])\n",
            "",
        ),
        (
            "sift-half",
            "a half of a bad message is stored",
            "                    made.pop()\n",
            "                    break\n",
        ),
        (
            "sift-order",
            "parts of a batch are stored from the last to the first",
            "for start in range(0, len(messages), _SIFTED)][::-1]",
            "for start in range(0, len(messages), _SIFTED)]",
        ),
    ),
    *each(
        "exactly_once/writer/logical.py",
        ("tests/writer/test_envelopes.py::test_a_value_of_a_logical_type_becomes_what_it_stands_for",),
        (
            "decimal-sign",
            "a negative decimal of Connect is a large positive one",
            '"big", signed=True)\n    digits',
            '"big")\n    digits',
        ),
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
            '" WHERE t.{0} IS NULL OR EXCLUDED.{0} {1} t.{0}"',
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
            "for lacking in (None, MISSING, UNAVAILABLE):",
            "for lacking in (UNAVAILABLE,):",
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
            "if self._conflict.add or (self._rules",
            "if (self._rules",
        ),
        (
            "too-old-field",
            "a field of a row that is too old comes in with a newer one",
            "(self._rules.keeps_missing and self._rules.newest_by is not None):",
            "(self._rules.keeps_missing and False):",
        ),
    ),
    *each(
        "exactly_once/writer/plan.py",
        (
            "tests/writer/test_table_writer.py::test_keys_that_postgres_finds_equal_are_one_key",
            "tests/writer/test_upsert.py::test_the_first_row_of_a_key_stays_whatever_fields_others_lack",
        ),
        (
            "key-nan",
            "two rows whose key is NaN are two",
            " or (isinstance(v, Decimal) and v.is_nan()) for v in values)",
            " for v in values)",
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
)
