"""Ranges against the ledger, and the offset log that they are read from. No servers, no Spark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactly_once._model import Partition
from exactly_once.errors import ConfigurationError, TopicRecreated
from exactly_once.ledger.commands import DEFAULT_SCHEMA
from spark_sink import LedgerBehindCheckpoint, RowsOutOfOrder
from spark_sink.offset_log import Failure, Mark, OffsetLog, _Disk, parse_offsets
from spark_sink.ranges import Group, Range, looked_through, not_written, one_batch, over_skipped, remaining

P = Partition("orders", 0)
small = st.integers(0, 30)


@st.composite
def ranges_and_ledger(draw: st.DrawFn) -> tuple[list[Range], dict[Partition, int]]:
    ranges = []
    for number in range(draw(st.integers(1, 4))):
        start, length = draw(small), draw(small)
        known = draw(st.booleans())
        ranges.append(Range(partition=Partition("orders", number), start=start if known else None, end=start + length))
    return ranges, {r.partition: draw(small) for r in ranges}


@given(ranges_and_ledger())
def test_each_offset_of_a_batch_is_written_iff_the_ledger_lacks_it(
    drawn: tuple[list[Range], dict[Partition, int]],
) -> None:
    ranges, ledger = drawn
    lacking = [r for r in ranges if r.start is not None and ledger[r.partition] < r.start]
    if lacking:
        with pytest.raises(LedgerBehindCheckpoint):
            remaining(ranges, ledger, Group("g", DEFAULT_SCHEMA))
        return
    todo = {share.partition: share for share in remaining(ranges, ledger, Group("g", DEFAULT_SCHEMA))}
    for given_range in ranges:
        share = todo.get(given_range.partition)
        written = set(range(share.first, share.end)) if share else set()
        assert written == set(range(ledger[given_range.partition], given_range.end))
        assert written or share is None, "rows without offsets would be written for a range that has none left"


def test_a_ledger_behind_the_checkpoint_is_told_with_what_mends_it() -> None:
    """The command is one for a shell, whatever the group is called."""
    command = r"20 offsets.*reset --group-id 'the group' --topic orders --partition 0 --to-offset 30"
    with pytest.raises(LedgerBehindCheckpoint, match=command):
        remaining([Range(partition=P, start=30, end=40)], {P: 10}, Group("the group", DEFAULT_SCHEMA))
    row = Partition.of_query("q")
    with pytest.raises(LedgerBehindCheckpoint, match="reset --group-id 'the group' --to-batch 3"):
        remaining(one_batch(row, 4), {row: 2}, Group("the group", DEFAULT_SCHEMA))


def test_all_partitions_that_are_behind_are_told_at_once() -> None:
    """Else an operator runs one command, starts the query, and gets the next one."""
    lost = {Partition("orders", n): 30 + n for n in range(3)}
    ranges = [Range(partition=p, start=start, end=40) for p, start in lost.items()]
    with pytest.raises(LedgerBehindCheckpoint, match=r"and more in orders\[1\], orders\[2\]") as caught:
        remaining(ranges, dict.fromkeys(lost, 10), Group("g", DEFAULT_SCHEMA))
    for number in range(3):
        assert f"reset --group-id g --topic orders --partition {number} --to-offset {30 + number}" in str(caught.value)
    assert "that `exactly-once hand-over --group-id g --to spark` prints" in str(caught.value)


def test_what_mends_a_ledger_of_another_schema_names_it() -> None:
    """Else the command changes the ledger of the default schema, in which the group may be there as well."""
    of = Group("g", "Second")
    query, words = Partition.of_query("q"), "--group-id g --schema Second"
    with pytest.raises(LedgerBehindCheckpoint, match=f"reset {words} --topic orders"):
        remaining([Range(partition=P, start=30, end=40)], {P: 10}, of)
    with pytest.raises(LedgerBehindCheckpoint, match=f"reset {words} --to-batch 3"):
        remaining(one_batch(query, 4), {query: 2}, of)
    with pytest.raises(TopicRecreated, match=f"adopt {words} --topic orders --to-earliest$"):
        remaining([Range(partition=P, start=30, end=10)], {P: 30}, of)
    for partition, way in ((P, "--topic orders"), (query, "--to-batch 6")):
        failure = Failure(batch_id=6, ends={partition: 30}, error="it", is_counted=False)
        error = not_written(failure, 7, [Range(partition=partition, start=30, end=40)], {partition: 10}, {P}, group=of)
        assert f"reset {words} {way}" in str(error)


def test_offsets_that_go_back_are_another_topic() -> None:
    """With failOnDataLoss=false Spark goes on; the ledger would take all of it for written."""
    with pytest.raises(TopicRecreated):
        remaining([Range(partition=P, start=30, end=10)], {P: 30}, Group("g", DEFAULT_SCHEMA))


def test_rows_themselves_tell_ends_but_no_starts() -> None:
    assert looked_through([(P, 5, 9)], {}) == [Range(partition=P, start=None, end=10)]
    assert looked_through([(P, 5, 9)], {P: 4}) == [Range(partition=P, start=4, end=10)]
    assert looked_through([(P, 5, 9), (P, 2, 3)], {}) == [Range(partition=P, start=None, end=10)]
    with pytest.raises(RowsOutOfOrder, match="ended at 7"):
        looked_through([(P, 2, 3)], {P: 7})
    nowhere: Any = Partition("orders", None)  # type: ignore[arg-type]
    with pytest.raises(RowsOutOfOrder, match="no topic"):
        looked_through([(nowhere, 5, 9)], {})


def test_what_was_left_out_is_in_the_range_only_where_the_ledger_has_all_that_was_written() -> None:
    (given,) = ranges = [Range(partition=P, start=10, end=20)]
    for stands, written, start in [(6, {}, 10), (6, {P: 6}, 6), (6, {P: 7}, 10), (10, {P: 6}, 10), (12, {}, 10)]:
        assert over_skipped(ranges, {P: stands}, written) == [replace(given, start=start)]


def test_a_checkpoint_that_has_done_the_batch_is_another_querys() -> None:
    log = OffsetLog("/c", {**FILES, "commits/2": b"v1"}.get)
    log.refuse_done(3)
    with pytest.raises(ConfigurationError, match="'/c' is of another query: it has batch 2, which is being written"):
        log.refuse_done(2)


def test_a_mark_is_kept_beside_the_checkpoint() -> None:
    files = dict(FILES)
    log = OffsetLog("/c", files.get, files.__setitem__)
    other = Partition("a:b", 3)
    assert log.mark("g/1") == Mark()
    log.note("g/1", 4, {P: 7})
    log.note("g/1", 5, {other: 9})
    assert OffsetLog("/c", files.get).mark("g/1") == Mark(5, {P: 7, other: 9})
    assert OffsetLog("/c", files.get).mark("g") == Mark()


@pytest.mark.parametrize("group_id", [".", "..", "a.b", "g" * 300, "\u00e4" * 120, f"{'g' * 300}/2"])
def test_a_mark_has_a_file_whatever_the_group_is_called(tmp_path: Path, group_id: str) -> None:
    disk = _Disk(tmp_path)
    log = OffsetLog(str(tmp_path), disk, disk.write)
    for each in (group_id, f"{group_id}2"):
        assert log.mark(each) == Mark()
    log.note(group_id, 4, {P: 7})
    assert OffsetLog(str(tmp_path), disk).mark(group_id) == Mark(4, {P: 7})
    assert OffsetLog(str(tmp_path), disk).mark(f"{group_id}2") == Mark()
    assert [file.parent.name for file in tmp_path.rglob("*") if file.is_file()] == ["exactly_once"]


def test_a_failure_is_kept_until_its_batch_was_written() -> None:
    files, other = dict(FILES), Partition("orders", 1)
    log = OffsetLog("/c", files.get, files.__setitem__)

    def kept() -> Failure | None:
        """What the next driver finds."""
        assert OffsetLog("/c", files.get).mark("g") == log.mark("g")
        return log.mark("g").failure

    log.note("g", 3, {P: 5})
    log.note_failure("g", Failure(4, "the first", {P: 7, other: 9}))
    log.note_failure("g", Failure(5, "of the next batch", {P: 8}))
    log.note_failure("g", Failure(4, "again", {P: 7, other: 9}))
    assert kept() == Failure(4, "the first", {P: 8, other: 9})
    log.note("g", 3, {P: 5})
    assert kept() == Failure(4, "the first", {P: 8, other: 9}), "of an earlier batch"
    log.note("g", 4, {P: 7})
    assert log.mark("g") == Mark(4, {P: 7}, None)
    assert kept() is None
    log.note_failure("g", Failure(5, "of the next batch", {P: 8}))
    log.settle_failure("g")
    assert kept() is None
    assert log.mark("g") == Mark(4, {P: 7}, None), "written by nobody"


def batch(*sources: Any) -> bytes:
    lines = ["v1", json.dumps({"batchWatermarkMs": 0, "conf": {"a": {"b": 1}}})]
    return "\n".join([*lines, *(s if isinstance(s, str) else json.dumps(s) for s in sources)]).encode()


FILES: dict[str, bytes] = {
    "metadata": b'{"id":"4f8e3b1c"}',
    "sources/0/0": b'\0v1\n{"orders":{"0":3,"1":0}}',
    "offsets/0": batch({"orders": {"0": 10, "1": 20}}),
    "offsets/1": batch({"orders": {"0": 15, "1": 20, "2": 7}}),
}


def test_a_batch_covers_what_lies_between_its_ends_and_those_before() -> None:
    log = OffsetLog("/checkpoint", FILES.get)
    first = [Range(partition=P, start=3, end=10), Range(partition=Partition("orders", 1), start=0, end=20)]
    second = [
        Range(partition=P, start=10, end=15),
        Range(partition=Partition("orders", 1), start=20, end=20),
        Range(partition=Partition("orders", 2), start=None, end=7),
    ]
    assert log.ranges(0) == first
    assert log.ranges(1) == second
    assert OffsetLog("/checkpoint", FILES.get).ranges(1) == second
    assert log.query_id() == "4f8e3b1c"


def test_a_batch_that_is_not_in_the_log_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no offsets of batch 5"):
        OffsetLog("/checkpoint", FILES.get).ranges(5)
    with pytest.raises(ConfigurationError, match="no checkpoint"):
        OffsetLog("/elsewhere", dict[str, bytes]().get).query_id()


def test_two_topics_in_one_source_and_in_two_are_read() -> None:
    ends = {Partition("a", 0): 1, Partition("b", 3): 2}
    assert parse_offsets(batch({"a": {"0": 1}, "b": {"3": 2}}), "/c") == ends
    assert parse_offsets(batch({"a": {"0": 1}}, "-", {"b": {"3": 2}}), "/c") == ends


@pytest.mark.parametrize("line", [{"logOffset": 4}, "17", [1]])
def test_a_source_that_is_not_kafka_is_refused(line: Any) -> None:
    """Its rows have no offsets, and a batch that holds nothing else would pass for one that was written."""
    with pytest.raises(ConfigurationError, match="batch-id"):
        parse_offsets(batch({"a": {"0": 1}}, line), "/c")


def test_a_partition_that_two_sources_read_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="two sources"):
        parse_offsets(batch({"a": {"0": 1}}, {"a": {"0": 1}}), "/c")


def test_a_format_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="v9"):
        parse_offsets(b"v9\n{}\n{}", "/c")


def test_sources_with_names_are_read_as_those_with_numbers_are() -> None:
    """Format v2, of Spark 4.2: a line for each source, under its name, in any order."""
    numbered = OffsetLog("/c", FILES.get)
    files = {path.replace("sources/0", "sources/orders"): text for path, text in FILES.items()}
    for number in range(2):
        version, about, offsets = FILES[f"offsets/{number}"].decode().splitlines()
        files[f"offsets/{number}"] = "\n".join(["v2", about, f"orders:{offsets}", "payments:-"]).encode()
        assert version == "v1"
        assert OffsetLog("/c", files.get).ranges(number) == numbered.ranges(number)


def test_batches_of_files_are_told_apart_by_the_time() -> None:
    """Their offsets are numbers: another copy of the checkpoint has the same for other files."""
    files = {"offsets/0": batch({"logOffset": 0})}
    later = {"offsets/0": files["offsets/0"].replace(b'"batchWatermarkMs": 0', b'"batchWatermarkMs": 9')}
    one, again, two = (OffsetLog("/c", each.get).fingerprint(0) for each in (files, files, later))
    assert one == again != two


def test_fingerprints_are_of_offsets_and_not_of_the_time() -> None:
    later = FILES | {"offsets/0": FILES["offsets/0"].replace(b'"batchWatermarkMs": 0', b'"batchWatermarkMs": 9')}
    other = FILES | {"offsets/0": batch({"orders": {"0": 11, "1": 20}})}
    one, two, three = (OffsetLog("/c", files.get).fingerprint(0) for files in (FILES, later, other))
    assert one == two != three
    assert OffsetLog("/c", FILES.get).fingerprint(9) is None
