"""Start: from which offset a partition is read, and the checks before the first fetch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from exactly_once import errors
from exactly_once._log import about
from exactly_once._model import Partition, RangePolicy, Row, StartPolicy
from exactly_once.kafka.admin import Cluster, Topic
from exactly_once.kafka.origin import Origin, Relation, relate

from .commands import after_halt, command, reset_command
from .rows import row_missing
from .session import address
from .store import LedgerStore

logger = logging.getLogger(__name__)

Range = tuple[int, int]

# What is wrong with one partition and says nothing about the others of the member.
_OF_ONE_PARTITION = (errors.LedgerRowMissing, errors.PartitionHalted, errors.OffsetOutOfRange, errors.TopicRecreated)


_FOREIGN = {
    Relation.OTHER: "another database: the messages of one group go to two, and each lacks what the other has",
    Relation.COPY: "a copy of this database that went on: this one lacks what was applied there",
    Relation.OUTLIVED: "this database after a failover: the server here is the old primary",
}


class Checked(NamedTuple):
    """What came of acquired rows; those in none were taken by somebody else meanwhile."""

    ready: list[Row]
    bad: dict[Partition, errors.StartError]
    postponed: list[Partition]
    """Those whose logs no leader tells of now."""
    trouble: errors.BrokerUnreachable | None
    """Why that is so."""


class StartOffsets:
    """Registers topics, and turns acquired rows into rows that may be read from."""

    def __init__(
        self, ledger: LedgerStore, cluster: Cluster, *, start: StartPolicy | None, on_out_of_range: RangePolicy
    ) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._group_id = ledger.group_id
        self._start = start
        self._on_out_of_range = on_out_of_range
        # By name, as they were described last; maintenance writes what it finds when it asks for their ids again.
        self.topics: dict[str, Topic] = {}
        # The topics that ``start`` is about, or None for all; others were found later, and are read from the start.
        self.first_topics: frozenset[str] | None = None
        # Programs that were told of as applying messages of this group, too.
        self._told: set[str] = set()

    def close(self) -> None:
        """End the connections to Kafka."""
        self._cluster.close()

    def describe(self, topics: Iterable[str]) -> dict[str, errors.UnknownTopic]:
        """Learn identity and size of topics, which are used until the next call; return those that are unknown."""
        self._cluster.identify()
        unknown: dict[str, errors.UnknownTopic] = {}
        for name, answer in self._cluster.ask(topics).items():
            try:
                self.topics[name] = self._cluster.described(name, answer)
            except errors.UnknownTopic as error:
                unknown[name] = error
        return unknown

    def register(self, partitions: Sequence[Partition]) -> dict[Partition, errors.StartError]:
        """Make the rows that are missing, for whole topics at once; return the partitions whose row was lost.

        :raises OffsetsNotAdopted: when Kafka holds offsets for a topic that the ledger does not know, and
            ``start`` was not given, or they are our own.
        """
        existing = self._ledger.existing(partitions)
        if self._start == "committed" and existing:
            # Of rows that an earlier start has made, and that was refused for another reason.
            stored_offsets = self._ledger.offsets({p.topic for p in existing})
            for topic in sorted({p.topic for p in existing if stored_offsets.get(p, (0, False))[0] is None}):
                self._refuse_foreign_members(topic)
        wanted = set(partitions) - existing
        if not wanted:
            return {}
        topics = {p.topic for p in wanted}
        have, had = self._ledger.known(topics)
        made: dict[Partition, int | None] = {}
        bad: dict[Partition, errors.StartError] = {}
        stored = self._ledger.topic_ids({p.topic for p in have})
        for partition in wanted:
            # Some look as if they had been added, and belong to a topic that was made again.
            found, known = self.topics[partition.topic].topic_id, stored.get(partition.topic, set())
            if found is not None and known and found not in known:
                bad[partition] = self._recreated(partition, min(known), found)
        for topic in sorted(topics - {p.topic for p in bad}):
            rows = {p for p in have if p.topic == topic}
            numbers = range(max(self.topics[topic].partitions, *(p.number + 1 for p in wanted if p.topic == topic)))
            missing = {Partition(topic, n) for n in numbers} - rows
            # All rows of a topic are made at once: one that lacks below the highest number was there.
            lost = {p for p in missing if p in had or (p in wanted and p.number < len(rows))}
            bad |= {p: row_missing(self._group_id, self._ledger.session.schema, p) for p in lost & wanted}
            new = sorted(missing - lost)
            is_new = not rows and not lost
            # Also where a topic was found later: what the group has done in it is not done again.
            is_adopted = is_new and self._is_adopted(topic)
            if is_new and (is_adopted or self.first_topics is None or topic in self.first_topics):
                made |= dict.fromkeys(new)  # whoever acquires them first chooses
            elif new:
                # Added or found later: whatever arrived before somebody was assigned to it must not be missed.
                made |= {p: low for p, (low, _) in self._cluster.ranges(new).items()}
        if made:
            ids = {topic: found.topic_id for topic, found in self.topics.items()}
            self._ledger.register(made, cluster_id=self._cluster.cluster_id, topic_ids=ids)
        return bad

    def require(self, partitions: Sequence[Partition]) -> None:
        """Describe and register for an owner that needs all of its partitions.

        :raises UnknownTopic: or what else :meth:`describe` and :meth:`register` find out.
        """
        for unknown in self.describe({p.topic for p in partitions}).values():
            raise unknown
        for error in self.register(partitions).values():
            raise error

    def validate(self, rows: Sequence[Row]) -> Checked:
        """Check acquired rows and choose offsets for new ones.

        :raises StartError: for what is wrong with the group, and not with one partition alone.
        """
        # Programs that applied messages of this group before us are told of once for each.
        others: dict[str, list[Partition]] = {}
        for row in rows:
            if row.previous_application not in (None, row.application, *self._told):
                others.setdefault(str(row.previous_application), []).append(row.partition)
        for other, partitions in others.items():
            self._told.add(other)
            logger.warning(
                "rows of group %r (%s) were applied by the program %r before, now %r applies them: if both run, each "
                "lacks messages, and needs a group.id of its own. If it was renamed, application= keeps a name",
                self._group_id,
                ", ".join(map(str, partitions)),
                other,
                rows[0].application,
                extra=about("group_collision", group=self._group_id, several=partitions),
            )
        checked: list[Row] = []
        bad: dict[Partition, errors.StartError] = {}
        for row in rows:
            try:
                checked.append(self.identified(row))
            except _OF_ONE_PARTITION as error:
                bad[row.partition] = error
        ranges, trouble = self._cluster.available_ranges(row.partition for row in checked)
        postponed = [row.partition for row in checked if row.partition not in ranges]
        checked = [row for row in checked if row.partition in ranges]
        new = [row for row in checked if row.next_offset is None]
        ready: list[Row] = []
        for row in [row for row in checked if row.next_offset is not None] + self._choose(new, ranges):
            try:
                moved = self.in_range(row, ranges[row.partition])
            except errors.OffsetOutOfRange as error:
                bad[row.partition] = error
            else:
                ready += [] if moved is None else [moved]
        return Checked(ready, bad, postponed, trouble)

    def in_range(self, row: Row, log: Range, *, truncated: bool = False) -> Row | None:
        """Check one row against its log; move it if ``on_out_of_range`` says so.

        Return None when the row turned out to be somebody else's, or elsewhere, by then.

        :raises OffsetOutOfRange: when the policy is ``fail``.
        """
        offset, (low, high) = row.next_offset, log
        assert offset is not None
        place = f"{row.partition} of group {self._group_id!r}: the ledger stands at offset {offset}"
        mend = f"Choose where to go on: {self._reset(row.partition)}, or set on_out_of_range="
        error: errors.OffsetOutOfRange
        if offset < low:
            error = errors.OffsetBelowLogStart(
                f"{place}, the log starts at {low}: retention removed {low - offset} offsets "
                f"before they were applied. {mend}"
            )
        elif offset > high:
            error = errors.OffsetBeyondLogEnd(
                f"{place}, the log ends at {high}: it was truncated, recreated or belongs elsewhere. {mend}"
            )
        elif truncated:
            error = errors.LogTruncated(
                f"{place} (leader epoch {row.leader_epoch}), but the log was rewritten below it after an unclean "
                f"leader election; effects of messages that are gone stay. {mend}"
            )
        else:
            return row
        if self._on_out_of_range == "fail":
            raise error
        offset = low if self._on_out_of_range == "earliest" else high
        if not self._ledger.correct(row, offset, reason=str(error)):
            extra = about("not_corrected", group=self._group_id, partition=row.partition, offset=row.next_offset)
            logger.warning("%s; it was not moved: its row was changed meanwhile", error, extra=extra)
            return None
        extra = about(
            "corrected", group=self._group_id, partition=row.partition, offset=offset, owner_epoch=row.owner_epoch
        )
        logger.error("%s; on_out_of_range=%r has moved it to %s", error, self._on_out_of_range, offset, extra=extra)
        return replace(row, next_offset=offset, leader_epoch=None)

    def compare(
        self, partitions: Iterable[Partition], held: Mapping[Partition, tuple[int, Origin | None]], own: Origin
    ) -> set[Partition]:
        """Compare what Kafka holds, read before, with the ledger; return those of ``partitions`` that lost commits.

        :raises OffsetsNotAdopted: when another database, a copy or a later incarnation of this one, has committed an
            offset of the topics to Kafka, and no operator has decided since.
        """
        stored = self._ledger.offsets({p.topic for p in held})
        rewound = set()
        for partition, (offset, origin) in sorted(held.items()):
            next_offset, is_moved = stored.get(partition, (None, False))
            relation = relate(own, origin, mirrored=offset, stored=next_offset)
            if is_moved or partition not in stored or relation is Relation.OURS:
                continue
            if relation is not Relation.REWOUND:
                assert origin is not None
                here = f"{address(self._ledger.session.connection)} (ledger {own.ledger_id}, server {own.server}"
                there = f"ledger {origin.ledger_id}, server {origin.server}, timeline {origin.timeline}"
                raise errors.OffsetsNotAdopted(
                    f"{partition} of group {self._group_id!r}: the ledger in {here}, timeline {own.timeline}) is at "
                    f"offset {next_offset}; Kafka holds offset {offset}, committed by {_FOREIGN[relation]} ({there}). "
                    "Look at the connection string and the schema, and stop the workers of one of the two or give them "
                    "another group.id. If this database is to go on from its own offsets: "
                    + self._command("reset", partition.topic, "--to-current", "--execute")
                )
            rewound.add(partition)
        return rewound.intersection(partitions)

    def recheck(self, partition: Partition, topic_id: str | None, found: Topic, *, stands_at: int = 0) -> None:
        """Compare the id of a partition's topic, asked for again, with the one that it was started with.

        Without ``stands_at``, the ledger's offset, the caller tells what may have been applied of another topic.

        :raises TopicRecreated: when it is another topic by now.
        """
        if None not in (found.topic_id, topic_id) and topic_id != found.topic_id:
            raise self._recreated(partition, topic_id, found.topic_id, stands_at=stands_at)

    def _is_adopted(self, topic: str) -> bool:
        """Tell whether the offsets that Kafka holds are where to go on from; refuse them where nobody has said so."""
        committed = self._cluster.committed(self._group_id, topic, self.topics[topic].partitions)
        mirrored = any(found.is_mirrored for found in committed.values())
        # Asked again, because a member that started a moment ago mirrors its offsets to Kafka.
        if not committed or self._ledger.known([topic])[0]:
            return False
        if not mirrored and self._start is not None:
            if self._start == "committed":
                self._refuse_foreign_members(topic)
            return self._start == "committed"
        if mirrored:
            origins = {found.origin.ledger_id for found in committed.values() if found.origin is not None}
            own, here = self._ledger.origin().ledger_id, address(self._ledger.session.connection)
            if origins == {own}:
                why = f"they were deleted, or a failover lost them (ledger {own} in {here})"
            else:
                theirs = ", ".join(sorted(origins)) or "of an unknown id"
                why = (
                    "they were lost, or this is another database or schema (here is ledger "
                    f"{own} in {here}, Kafka's are of ledger {theirs})"
                )
            raise errors.OffsetsNotAdopted(
                f"Kafka holds offsets that this library mirrored for group {self._group_id!r} and topic {topic!r}, but "
                f"the ledger has no rows: {why}. Find out which messages took effect here, then: "
                f"{self._command('reset', topic, '--to-earliest')} (or --to-latest, --to-time). If the group began "
                "elsewhere, stop its workers before, and give each partition its offset behind that, by --partition P "
                "--to-offset N; the worker that began has logged it as 'reading ... from offset N'"
            )
        raise self._not_adopted(topic, len(committed))

    def _refuse_foreign_members(self, topic: str) -> None:
        """Refuse a group of which a consumer of another kind still is a member: it would go on applying."""
        if others := self._cluster.foreign_members(self._group_id):
            raise errors.OffsetsNotAdopted(
                f'start="committed" adopts group {self._group_id!r} for topic {topic!r}, but members that are none '
                f"of this library's are still in it: {', '.join(others)}. Stop every one of them first; Kafka "
                "counts one that was killed for its session.timeout.ms more. Ours are known by their client.id"
            )

    def _not_adopted(self, topic: str, partitions: int) -> errors.OffsetsNotAdopted:
        return errors.OffsetsNotAdopted(
            f"Kafka holds committed offsets of group {self._group_id!r} for topic {topic!r} "
            f"({partitions} partitions), the ledger has none. Stop every old member of the group, then say "
            'start="committed" to go on from there, or start="earliest" to read everything again'
        )

    def identified(self, row: Row) -> Row:
        """Compare a row's ids with the cluster's; fill in those that had been unknown."""
        refuse_halted(self._group_id, self._ledger.session.schema, row)
        cluster_id, topic_id = self._cluster.cluster_id, self.topics[row.partition.topic].topic_id
        if row.cluster_id is not None and cluster_id is not None and row.cluster_id != cluster_id:
            raise errors.ClusterChanged(
                f"{row.partition} of group {self._group_id!r}: the ledger belongs to cluster {row.cluster_id}, "
                f"this is cluster {cluster_id}. Check bootstrap.servers; "
                "if the topic moved here with its offsets: "
                + self._command("adopt", row.partition.topic, "--keep-offsets")
                + ", and with others --to-committed, --to-time or --to-earliest in its place"
            )
        topic = self.topics[row.partition.topic]
        self.recheck(row.partition, row.topic_id, topic, stands_at=row.next_offset or 0)
        if row.topic_id is None and topic_id is not None:
            assert row.owner_token is not None
            self._ledger.identify({row.partition: row.owner_token}, topic_id, cluster_id=cluster_id)
        return replace(row, cluster_id=row.cluster_id or cluster_id, topic_id=row.topic_id or topic_id)

    def _choose(self, rows: list[Row], ranges: Mapping[Partition, Range]) -> list[Row]:
        """Commit the starting offsets of new rows; a row that was taken from us is left out."""
        if not rows:
            return []
        partitions = [row.partition for row in rows]
        chosen: dict[Partition, tuple[int, int | None]] = {p: (ranges[p][0], None) for p in partitions}
        if self._start is None:
            # Rows that another start= has made, and has not started: it was refused, or belongs to another member.
            for topic in sorted({p.topic for p in partitions}):
                held = self._cluster.committed(self._group_id, topic, self.topics[topic].partitions)
                if foreign := [c for c in held.values() if not c.is_mirrored]:
                    raise self._not_adopted(topic, len(foreign))
        if isinstance(self._start, datetime):
            chosen = {p: (offset, None) for p, offset in self._cluster.at(partitions, self._start).items()}
        elif self._start == "latest":
            chosen = {p: (offset, None) for p, offset in self._cluster.ends(partitions).items()}
        elif self._start == "committed":
            found: dict[Partition, tuple[int, int | None]] = {}
            told: set[str] = set()  # the topics of which Kafka holds any offset
            for topic in sorted({p.topic for p in partitions}):
                held = self._cluster.committed(self._group_id, topic, self.topics[topic].partitions)
                found |= {p: (c.offset, c.leader_epoch) for p, c in held.items() if not c.is_mirrored}
                told |= {p.topic for p in held}
            for partition in partitions:
                low, high = ranges[partition]
                if partition not in found and low < high:
                    others = ""
                    if partition.topic not in told:  # else what they have would come again
                        others = (
                            " It holds none of the whole topic: leave start= out to read it from its start, or give "
                            '"earliest", "latest" or a datetime with a time zone.'
                        )
                    raise errors.NoCommittedOffset(
                        f'start="committed", but Kafka holds no offset of group {self._group_id!r} for {partition}, '
                        f"whose log has offsets {low} to {high}.{others} Choose one with: {self._reset(partition)}"
                    )
            chosen |= {p: found[p] for p in partitions if p in found}
        started = [
            replace(row, next_offset=chosen[row.partition][0], leader_epoch=chosen[row.partition][1]) for row in rows
        ]
        ours = self._ledger.start(started)
        return [row for row in started if row.partition in ours]

    def _recreated(
        self, partition: Partition, stored: str | None, found: str | None, *, stands_at: int = 0
    ) -> errors.TopicRecreated:
        applied = (
            f" If a worker was reading then, messages of the new one below offset {stands_at}, where the ledger "
            "stands, may have been applied, and would be again."
        )
        return errors.TopicRecreated(
            f"{partition} of group {self._group_id!r}: the ledger belongs to topic id {stored}, the topic of that name "
            f"now has id {found}: it was deleted and made again.{applied if stands_at else ''} To read the new one: "
            + self._command("adopt", partition.topic, "--to-earliest")
        )

    def _command(self, action: str, topic: str, *more: str) -> str:
        return command(action, self._group_id, self._ledger.session.schema, "--topic", topic, *more)

    def _reset(self, partition: Partition) -> str:
        return reset_command(self._group_id, self._ledger.session.schema, partition)


def refuse_halted(group_id: str, schema: str, row: Row) -> None:
    """Refuse a row that nobody may go on with until an operator has decided.

    :raises PartitionHalted: saying why.
    """
    if row.halted is not None:
        what = "batch" if row.partition.counts_batches else "offset"
        raise errors.PartitionHalted(
            f"{row.partition} of group {group_id!r} is halted at {what} {row.next_offset or 0}: {row.halted}. "
            f"{after_halt(group_id, schema, row.partition, row.next_offset)}"
        )
