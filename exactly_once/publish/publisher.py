"""Publisher: what both producers share: a client, and for each topic its filter and what is in flight."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException, Producer

from exactly_once._log import about
from exactly_once._model import Partition
from exactly_once.errors import ClientFailed, ConfigurationError
from exactly_once.kafka.guard import Guard, leave_in_children

from .chain import Link
from .delivery import Batch, Call, Callback, Delivery, Extra, Outcome
from .errors import KeyRefused, PublishError, Undelivered
from .filter import Filter, NoFilter, Resolved
from .headers import Headers, headers_of, kept, key_of, sequence_of, with_key, with_sequence
from .keys import GivenKey, checked_all
from .options import PublishOptions, client_settings, named_alike
from .owners import PublishOwner, is_position
from .recovery import SequenceLog
from .sequence import SequenceFilter
from .snapshot import SnapshotFile
from .tail import describe, read_tail, rest_of
from .topic import Columns, TopicPublisher

logger = logging.getLogger(__name__)

_STATES = ("confirmed", "in_flight", "unknown", "evicted", "evicted_young", "failed_open")
CLOSE_SECONDS = 30.0
# librdkafka's default of message.timeout.ms.
_TIMEOUT_MS = 300_000
_ROOM_SECONDS = 0.1
_CLOSED = "the producer is closed: make a new one"
_FATAL = "the client met a fatal error: make a new producer"
# So many failed messages are named in an error; the others are counted.
_NAMED = 3

# So much of a topic's name is in that of its snapshots: 255 characters are what file systems take for all of it.
_SHOWN = 200

AnyFilter = Filter[Any]


class ProducerRecord(NamedTuple):
    """A message that is to be sent; the fields are the arguments of ``produce``."""

    value: str | bytes | None = None
    key: str | bytes | None = None
    dedup_key: GivenKey | None = None
    sequence: int | None = None
    chain: Link | None = None
    partition: int = -1
    headers: Headers | None = None
    timestamp: int = 0
    on_delivery: Callback | None = None


class _Errors(list[BaseException]):
    """Collects what steps raise that must not keep the next ones from being taken: ``with errors: step()``."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            self.append(error)
        return True


class _Ended:
    """In the place of the client when that is gone: another thread may have been about to use it."""

    def __len__(self) -> int:
        return 0

    def poll(self, _: float = 0.0) -> int:
        return 0

    flush = poll

    def produce(self, *_: object, **__: object) -> None:
        raise ConfigurationError(_CLOSED)


# A batch, and the places of what the filter has let through.
ToSend = tuple[Batch, Sequence[int]]
# The identities of a message, in the order of a record's fields, and what a filter that takes one of them knows.
_IDENTITIES = {"dedup_key": "keys", "sequence": "numbers", "chain": "chains"}
_NO_EXTRA: Extra = (-1, None, 0)


class Publisher:
    """The common part of :class:`DedupProducer` and :class:`TransactionalProducer`."""

    _is_transactional = False
    """Whether all messages are sent in transactions."""

    def __init__(
        self, kafka: Mapping[str, Any], *, dedup: AnyFilter | Callable[[str], AnyFilter], options: PublishOptions
    ) -> None:
        self._settings = named_alike(kafka)
        # Of clients that read: where and as whom.
        self._kafka = {key: value for key, value in kafka.items() if not key.startswith("transaction")}
        self._options = options
        self._owner = owner = options.get("owner")
        self._check_owner(owner)
        given = options.get("producer_name")
        self._has_name = given is not None or (owner is not None and owner.is_named)
        # Who publishes with sequences gives one, and the same after a restart.
        self.producer_name = given or (f"producer-{uuid4()}" if owner is None else owner.name)
        self._dedup = dedup
        # Replaced as a whole by who adds one: other threads may be in a loop over it.
        self._topics: dict[str, TopicPublisher] = {}
        self._opening = threading.Lock()
        # Callbacks that are to be called, with what they are told.
        self.calls: deque[Call] = deque()
        self._closed = False
        # The thread that closes it.
        self._closes: int | None = None
        # Set when it is closed and nothing more is reported.
        self._ended = threading.Event()
        self._guard = Guard("the producer")
        self._client = self._connect()
        leave_in_children(self)

    def _fence_predecessor(self) -> bool:
        """Have numbered messages sent in transactions, which fences an earlier life; tell whether that is so."""
        return self._is_transactional

    def nothing_arrives(self) -> contextlib.AbstractContextManager[None]:
        """See to it that nothing this producer has sent in transactions arrives meanwhile."""
        return contextlib.nullcontext()

    def _connect(self) -> Producer:
        """Make a client."""
        return Producer(client_settings(self._settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Undelivered as failed:
            if error is None:
                raise
            # It would hide why the block was left.
            self._log_failed(failed)
            error.add_note(f"closing also raised Undelivered: {failed}")

    def __len__(self) -> int:
        """Return how many messages wait for their report."""
        self._guard.check()
        return 0 if self._closed else self._waiting(len(self._client))

    def __bool__(self) -> bool:
        """Be true also with nothing to wait for."""
        return True

    @property
    def is_ended(self) -> bool:
        """Whether it is closed and nothing more is reported."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> None:
        """Serve delivery reports, or wait for the thread that closes the producer and serves them.

        :raises ConfigurationError: in a callback of ``close``: no more of them come before it returns.
        """
        if not self._closed:
            self.poll(seconds)
        elif self._closes != threading.get_ident():
            self._ended.wait(seconds)
        elif not self.is_ended:
            raise ConfigurationError("a callback that close() calls waits for another message: it would wait for ever")

    @property
    def send_seconds(self) -> float:
        """For how long the client tries to send a message."""
        # To the client none means that there is no end.
        return float(self._settings.get("message.timeout.ms", _TIMEOUT_MS)) / 1000 or math.inf

    def last_sequence_id(self, topic: str) -> int:
        """Return the number up to which everything pushed is in the log, -1 if there is none; recovered at the start.

        :raises KeyRefused: when the topic's filter knows no sequences.
        """
        return self._sequences(topic).persisted

    def abandon(self, topic: str, sequence: int) -> None:
        """Give up a number that failed and will not be sent again."""
        self._sequences(topic).abandon(sequence)

    def filter_of(self, topic: str) -> AnyFilter:
        """Return the filter of a topic."""
        return (self._topics.get(topic) or self._open(topic)).filter

    def metrics(self) -> str:
        """Return figures of all topics in the text format of Prometheus; filters in Postgres scan their keys for it."""
        ended, keys = ["# TYPE exactly_once_publish_messages_total counter"], ["# TYPE exactly_once_publish_keys gauge"]
        for topic in self._topics.values():
            name = self.producer_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            labels = f'topic="{topic.topic}",producer="{name}"'
            stats = topic.filter.stats()
            counts = {outcome.name.lower(): topic.counts[outcome] for outcome in Outcome if outcome.name != "PENDING"}
            for outcome, count in {**counts, "attached": topic.attached, "cache_hit": stats.cache_hits}.items():
                ended.append(f'exactly_once_publish_messages_total{{{labels},outcome="{outcome}"}} {count}')
            states = {name: getattr(stats, name) for name in _STATES}
            keys += [
                f'exactly_once_publish_keys{{{labels},state="{state}"}} {value}'
                for state, value in states.items()
                if value >= 0  # else it would have to be counted
            ]
        return "\n".join((*ended, *keys, ""))

    def resolve(self, topic: str, *, positions: Mapping[int, int] | None = None) -> Resolved:
        """Read a topic for messages whose outcome is unknown, settle them in its filter; return what became of them.

        It reads from ``positions``, offsets by partition below which none of them stands; for numbered messages from
        where the producer knows that; else from the beginning. What is there is delivered. What is not is absent if
        nothing can arrive any more, which only Kafka transactions make sure; else it stays unknown. So it does if the
        log may have held it: retention or compaction has removed messages, or the topic was made anew.

        :raises ConfigurationError: when messages do not carry their keys, or ``positions`` are none of the topic's.
        :raises TailHidden: when another producer's open transaction hides the end for too long.
        """
        given: object = {} if positions is None else positions
        if not (isinstance(given, Mapping) and all(map(is_position, given.items()))):
            raise ConfigurationError(
                f"positions={given!r} must be offsets by partition of {topic!r}, such as {{0: 1200, 1: 800}}"
            )
        of_topic = self._ready(topic)
        of_topic.filter.resolve((), is_sure=False)  # before anything is read: whether it can at all
        self.hurry()
        starts = {Partition(topic, number): offset for number, offset in (positions or {}).items()}
        if positions is None and of_topic.log is not None:
            starts = of_topic.log.positions
        found: set[Any] = set()
        is_sure = of_topic.is_transactional
        with self.nothing_arrives() if is_sure else contextlib.nullcontext():
            begin, why = rest_of(self._kafka, topic, starts, ahead=int(is_sure))
            if positions is not None and (lacking := [each.number for each in starts if each not in begin]):
                raise ConfigurationError(f"positions={positions!r}: {topic!r} has no partition {lacking[0]}")
            for message in read_tail(self._kafka, topic, begin):
                headers = headers_of(message)
                sent = sequence_of(headers)
                if sent is None:
                    if (key := key_of(headers)) is not None:
                        found.add(key)
                elif sent.producer == self.producer_name:
                    found.add(sent.number)
            if is_sure:
                topic_id = None if of_topic.log is None else of_topic.log.topic_id
                why = why or describe(self._kafka, topic).why_unsure(topic_id)
                if why is not None:
                    said = "what %r does not hold stays unknown: %s"
                    logger.warning(said, topic, why, extra=about("stays_unknown") | {"topic": topic})
            return of_topic.filter.resolve(found, is_sure=is_sure and why is None)

    def poll(self, timeout_seconds: float = 0.0) -> int:
        """Serve delivery reports, mark them in the filters, call callbacks; return how many the client served.

        A filter whose server does not answer is waited for two seconds at most; it is told with a later call.
        """
        self._guard.check()
        if self._closed:
            return 0
        self.hurry(only_if_due=True)
        served = self._serve("poll", timeout_seconds)
        self._settle()
        return served

    def hurry(self, *, only_if_due: bool = False) -> None:
        """Send what waits for more to come: somebody waits for its outcome, or it has waited for long enough."""
        self._guard.check()

    def flush(self, timeout_seconds: float = -1) -> int:
        """Wait for all reports; return how many messages still have none: those may or may not be sent.

        :raises Undelivered: when messages failed and nobody has looked: they have no callback, nobody asked their
            ``result()`` or ``exception()``, and no later call delivered them. It is told once. What another process
            was sending is told by ``produce`` at once, and raised by ``close`` only.
        """
        self._guard.check()
        if self._closed:
            return 0
        self.hurry()
        left = self._serve("flush", timeout_seconds)
        self._settle()
        if (failed := self._failures(all_of_them=False)) is not None:
            raise failed
        return self._waiting(left)

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Flush, and fail what has no acknowledgement by then. May be called again.

        It goes to its end whatever callbacks and filters raise, and raises the gravest of that then: the others are
        logged, and notes of it.

        :raises Undelivered: when messages were left without one, or failed and nobody has looked, as ``flush`` says.
        """
        if self._closed or not self._guard.is_ours():  # a child has none of its parent's messages
            return
        self._closed, self._closes = True, threading.get_ident()
        errors = _Errors()
        with errors:
            self.hurry()
        left = self._drain(timeout_seconds, errors)
        if left:
            with errors:
                self._client.purge()
            self._drain(CLOSE_SECONDS, errors)
        # Before the topics are finished: what another thread hands over meanwhile is refused, or is among theirs. The
        # client's callbacks refer to us: nothing but the garbage collector would end its threads and connections.
        self._client = cast("Producer", _Ended())
        for topic in self._topics.values():
            with errors:
                left += topic.finish(timeout_seconds)
            with errors:
                topic.filter.close()
        with errors:
            self._close_others()
        while self.calls:
            with errors:
                self._call_back()
        self._ended.set()
        if left:
            errors.append(Undelivered(f"{left} messages had no acknowledgement after {timeout_seconds:g} s"))
        if (failed := self._failures(all_of_them=True)) is not None:
            errors.append(failed)
        if errors:
            # An interruption, else what became of messages, else a callback's own error.
            first, *others = sorted(errors, key=lambda e: (isinstance(e, Exception), not isinstance(e, PublishError)))
            for other in others:
                self._log_failed(other)
            for other in others[:_NAMED]:
                first.add_note(f"closing also raised {type(other).__name__}: {other}")
            if len(others) > _NAMED:
                first.add_note(f"and {len(others) - _NAMED} errors more, which are logged")
            raise first

    def _log_failed(self, error: BaseException) -> None:
        said = f"{type(error).__name__}: {error}"
        logger.error("closing producer %r: %s", self.producer_name, said, extra=about("close_failed"))

    def _waiting(self, events: int) -> int:
        """Return how many messages are among what the client still has to tell: it counts errors of its own, too."""
        topics = (topic for topic in self._topics.values() if topic.is_transactional is self._is_transactional)
        return min(events, sum(len(topic.in_flight) for topic in topics))

    def _close_others(self) -> None:
        """Close what this producer has beside its client and its filters."""

    def _drain(self, seconds: float, errors: _Errors) -> int:
        """Flush and settle to the end, whatever callbacks raise; return how many messages have no report."""
        deadline = time.monotonic() + seconds
        while True:
            before = len(errors)
            left = seconds if seconds < 0 else max(0.0, deadline - time.monotonic())
            unsent = None
            with errors:
                unsent = self._serve("flush", left)
            # The client ends a flush at once where a callback raises. An interruption says that it is to end.
            if len(errors) == before or not left or not isinstance(errors[-1], Exception):
                break
        for topic in self._topics.values():
            with errors:
                self._settle_topic(topic)
        while self.calls:
            with errors:
                self._call_back()
        return self._waiting(len(self._client) if unsent is None else unsent)

    def _failures(self, *, all_of_them: bool) -> Undelivered | None:
        """Return the failures that nobody has looked at, once; at the end also what others were to send."""
        found: list[Delivery] = []
        for topic in self._topics.values():
            mine = [d for d in list(topic.failed.values()) if all_of_them or d.outcome is not Outcome.HELD_ELSEWHERE]
            for delivery in mine:
                topic.failed.pop(delivery.identity, None)
            found += mine
        if not found:
            return None
        named = "; ".join(f"{d.identity!r} to {d.topic}: {d.error}" for d in found[:_NAMED])
        return Undelivered(
            f"{len(found)} messages failed in producer {self.producer_name!r}, and no callback or result() has looked "
            f"at them; {named}. They may be sent again under the same identity"
        )

    def _ready(self, topic: str) -> TopicPublisher:
        """Return what publishes to a topic, if this producer may still publish."""
        if self._owner is not None:
            self._owner.check()
        self._check_open()
        return self._topics.get(topic) or self._open(topic)

    def _check_open(self) -> None:
        self._guard.check()
        if self._closed:
            raise ConfigurationError(_CLOSED)

    def _columns(self, topic: TopicPublisher, records: Sequence[ProducerRecord]) -> Columns:
        """Return messages by column, with their identities checked."""
        columns = list(zip(*records, strict=True)) or [()] * len(ProducerRecord._fields)
        values, keys, *identities, partitions, headers, timestamps, calls = columns
        extras: dict[int, Extra] = {}
        if any(headers) or any(timestamps) or partitions.count(-1) < len(records):
            given = enumerate(zip(partitions, headers, timestamps, strict=True))
            extras = {n: (p, kept(h), t) for n, (p, h, t) in given if (p, h, t) != _NO_EXTRA}
        callbacks = {n: call for n, call in enumerate(calls) if call is not None} if any(calls) else {}
        return Columns(self._identities(topic, identities), list(values), list(keys), extras, callbacks)

    def _identities(self, topic: TopicPublisher, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """Check and return identities of the kind that the filter takes; the others must not be given."""
        takes = topic.filter.takes
        if takes == "nothing":
            return [object() for _ in columns[0]]
        by_name = dict(zip(_IDENTITIES, columns, strict=True))
        given = by_name.pop(takes)
        for other, column in by_name.items():
            if column.count(None) < len(column):
                raise KeyRefused(f"{other}= was given, but the filter of this topic takes {takes}=")
        if None in given:
            what = _IDENTITIES[takes]
            raise KeyRefused(f"a message to {topic.topic!r} needs {takes}=, because its filter knows {what}")
        return checked_all(given) if takes == "dedup_key" else list(given)

    def _hand_over(self, batch: Batch, places: Sequence[int], room: float, *, undoes: bool = True) -> None:
        """Give messages to the client, in order; where its queue is full, serve reports until there is room.

        :raises BufferError: when there is none within so many seconds; what was not handed over is not marked.
        """
        name, produce = batch.topic.topic, self._client.produce
        done = 0
        try:
            made, extras = batch.topic.filter, batch.extras
            own: Iterable[Extra] = repeat(_NO_EXTRA, len(places))
            if extras:
                own = [extras.get(place, _NO_EXTRA) for place in places]
            if made.writes_key:  # with what recovery needs
                identities = [batch.identities[place] for place in places]
                if isinstance(made, SequenceFilter):
                    numbered = zip(own, made.predecessors(identities), identities, strict=True)
                    own = [(p, with_sequence(h, self.producer_name, before, n), t) for (p, h, t), before, n in numbered]
                else:
                    own = [(p, with_key(h, key), t) for (p, h, t), key in zip(own, identities, strict=True)]
            is_all = len(places) == len(batch.values)
            values = batch.values if is_all else [batch.values[place] for place in places]
            keys = batch.keys if is_all else [batch.keys[place] for place in places]
            calls: Iterable[Any] = batch.callbacks_of(places)
            for value, key, told, extra in zip(values, keys, calls, own, strict=True):
                try:
                    if extra is _NO_EXTRA:  # without keywords: the client takes longer for them
                        produce(name, value, key, -1, told)
                    else:
                        produce(name, value, key, extra[0], told, headers=extra[1], timestamp=extra[2])
                except BufferError:
                    partition, given, timestamp = extra
                    send = partial(produce, name, value, key, partition, told, headers=given, timestamp=timestamp)
                    self._find_room(send, room)
                done += 1
        except BaseException as exception:
            if done < len(places):
                exception.add_note(f"handing over {batch.identities[places[done]]!r} to {name!r}")
            if undoes:
                batch.topic.hand_over_failed(batch, places[done:], exception)
                check_fatal(exception)
            elif isinstance(exception, KafkaException):
                batch.errors[places[done]] = exception.args[0]
            elif isinstance(exception, (TypeError, ValueError)) and done < len(places):  # no message at all
                batch.errors[places[done]] = KafkaError(KafkaError.INVALID_RECORD, str(exception))
            raise

    def _find_room(self, call: Callable[[], None], seconds: float) -> None:
        """Call again, serving reports while the client's queue is full."""
        deadline = time.monotonic() + seconds
        while True:
            if seconds <= 0:
                raise BufferError("the client's queue is full: nothing was marked; call poll() and try again")
            self.poll(_ROOM_SECONDS)
            try:
                return call()
            except BufferError:
                if time.monotonic() > deadline:
                    raise

    def _serve(self, command: Literal["poll", "flush"], seconds: float) -> int:
        """Have the client report what it has; the traceback of an error must not keep it alive."""
        try:
            served: int = getattr(self._client, command)(seconds)
            return served
        except BaseException as error:
            for topic in self._topics.values():
                topic.serving_failed()
            if isinstance(error, SystemError):  # a fatal error amid its reports, and perhaps lost over them
                raise ClientFailed(f"{_FATAL} ({error.__cause__ or error})") from error.__cause__
            check_fatal(error)
            raise

    def _settle(self) -> None:
        for topic in self._topics.values():
            self._settle_topic(topic)
        while self.calls:
            self._call_back()

    def _settle_topic(self, topic: TopicPublisher) -> None:
        doubts = list(topic.doubts)
        topic.settle(doubts if doubts and not len(self._client) else ())

    def _call_back(self) -> None:
        try:
            callback, error, message = self.calls.popleft()
        except IndexError:  # another thread has taken the last one
            return
        callback(error, message)

    def _logs(self) -> list[SequenceLog]:
        return [topic.log for topic in self._topics.values() if topic.log is not None]

    def _sequences(self, topic: str) -> SequenceFilter:
        made = self.filter_of(topic)
        if not isinstance(made, SequenceFilter):
            raise KeyRefused(f"the filter of {topic!r} knows no sequences; it is a {type(made).__name__}")
        return made

    def _open(self, name: str) -> TopicPublisher:
        """Begin with a topic at its first use."""
        self._guard.check()
        with self._opening:
            if name in self._topics:
                return self._topics[name]
            log, options, is_transactional = None, self._options, self._is_transactional
            patterns = (options.get("topics") or {}).items()
            is_on = next((on for pattern, on in patterns if fnmatchcase(name, pattern)), True)
            made: AnyFilter
            if not (is_on and options.get("enabled", True)):
                made = NoFilter()
            else:
                made = self._dedup if isinstance(self._dedup, Filter) else self._dedup(name)
                if not isinstance(made, Filter):
                    raise ConfigurationError(f"dedup= returned {made!r} for {name!r}: it must return a filter")
            if made.takes in ("dedup_key", "chain"):  # numbers see to that themselves
                if made.topic not in (None, name):
                    raise ConfigurationError(
                        f"dedup= gives one filter, which already serves {made.topic!r}: the same key on {name!r} would "
                        "be taken for a duplicate. Give a function that makes a filter for each topic: "
                        "dedup=lambda topic: WindowFilter(...)"
                    )
                made.check_topic(name)
                made.topic = name
                if made.reserved_seconds <= self.send_seconds and made.reserved_seconds < math.inf:
                    said = (
                        "%r: a key stays reserved for %g s, and its message may wait for %g s: another process may "
                        "send it as well. Give a longer lease_seconds=, or a shorter message.timeout.ms"
                    )
                    extra = about("lease_short") | {"topic": name}
                    logger.warning(said, name, made.reserved_seconds, self.send_seconds, extra=extra)
            for owner in getattr(made, "owners", (getattr(made, "owner", None),)):
                self._check_owner(owner)
            if isinstance(made, SequenceFilter):
                with made.serving(self.producer_name, name):
                    if options.get("recover", True):
                        is_transactional = self._fence_predecessor()
                        log = self._recovered(name, made, is_fenced=is_transactional)
            topic = TopicPublisher(self, name, made, log, is_transactional=is_transactional)
            self._topics = {**self._topics, name: topic}
            if self._closed:  # meanwhile, and it may not have seen this topic
                made.close()
                self._close_others()
                raise ConfigurationError(_CLOSED)
            return topic

    def _recovered(self, topic: str, made: SequenceFilter, *, is_fenced: bool) -> SequenceLog:
        if not self._has_name:
            said = (
                "%r was drawn as the name of this producer: after a restart it recognises nothing on %r. Give "
                "producer_name=, the same in each life"
            )
            extra = about("name_drawn") | {"topic": topic, "producer": self.producer_name}
            logger.warning(said, self.producer_name, topic, extra=extra)
        given, store = self._options.get("snapshots"), None
        if callable(given):
            store = given(topic)
        elif given is not None:  # a directory, in which each producer and topic has a file of its own
            shown = topic if len(topic) <= _SHOWN else f"{topic[:_SHOWN]}-{_digest(topic)}"
            store = SnapshotFile(Path(given) / f"{shown}-{_digest(self.producer_name)}.snapshot")
        log = SequenceLog(
            self._kafka,
            topic,
            made,
            producer=self.producer_name,
            store=store,
            every=self._options.get("snapshot_every", 1000),
            accept_trimmed=self._options.get("accept_trimmed", False),
            is_fenced=is_fenced,
            since=self._options.get("published_since"),
        )
        log.recover()
        return log

    def _check_owner(self, owner: PublishOwner | None) -> None:
        """Refuse an owner who promises to take-overs that its messages are sent under another transactional id."""
        used = self._settings.get("transactional.id")
        if owner is not None and owner.transactional_id not in (None, used):
            raise ConfigurationError(
                f"the owner's transactional_id is {owner.transactional_id!r}, but this producer sends "
                + ("outside of transactions" if used is None else f"as {used!r}")
            )


def error_of(exception: BaseException) -> KafkaError | None:
    """Return the error of the client in an exception, if it is one of the client: amid reports it is a SystemError."""
    found = exception.__cause__ if isinstance(exception, SystemError) else exception
    return found.args[0] if isinstance(found, KafkaException) else None


def is_fatal(error: KafkaError | None) -> bool:
    """Tell whether the client takes nothing more after an error."""
    return error is not None and (error.fatal() or error.code() == KafkaError._FATAL)  # noqa: SLF001 - its public name


def check_fatal(exception: BaseException) -> None:
    """Raise :class:`ClientFailed` where that is so."""
    if is_fatal(error_of(exception)):
        raise ClientFailed(f"{_FATAL} ({exception})") from exception


def _digest(name: str) -> str:
    return blake2b(name.encode(), digest_size=8).hexdigest()
