"""The consumer: the loop that polls Kafka, has the maintenance done and hands out units."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

import psycopg
import tenacity
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from exactly_once import errors
from exactly_once._failpoints import failpoint
from exactly_once._log import about
from exactly_once._model import Partition, RangePolicy, StartPolicy
from exactly_once.kafka import settings
from exactly_once.kafka.guard import leave_in_children
from exactly_once.kafka.log import kafka_logger
from exactly_once.ledger.claims import ClaimsWindow
from exactly_once.ledger.dead_letters import DeadLetterLimit
from exactly_once.ledger.retry import BACKOFF, Stop, retry_for, retry_forever
from exactly_once.ledger.session import Connection
from exactly_once.ledger.start import StartOffsets
from exactly_once.ledger.transaction import UnitOfWork
from exactly_once.metrics.health import Health
from exactly_once.metrics.table import Metrics

from .buffer import FetchBuffer
from .client import Closing, Linger, fetch
from .commit import CommitProtocol, Counters
from .handler_thread import HandlerThread
from .kafka_offsets import KafkaOffsets
from .maintenance import Maintenance
from .observer import Observer
from .options import Isolation, Options, application_of, check_idle, check_options, check_run
from .partitions import Ownership
from .rebalance import Assignment, Change
from .service import OnPoison, Service, stopping_on_signals
from .startup import ReadOnlyGuard, Servers, explaining
from .unit import Stage, Unit
from .units import Units

logger = logging.getLogger(__name__)

# How long one fetch waits, and so how late a stop is noticed.
POLL_SECONDS = 0.1
# How much is taken at once of what the client has: as many as it fetches ahead (``queued.min.messages``).
_QUEUED_MESSAGES = 100_000
# How long the Kafka client may take to end: while its coordinator is away, it waits for what it has asked of it.
CLIENT_SECONDS = 30.0
# After so many membership checks without an answer, ten seconds each, a client is asked no more.
_SILENT_CHECKS = 3
# Of max.poll.interval.ms, how long Kafka may assign nothing: a rebalance waits for one at most, and before that perhaps
# for the session of a member that died.
_UNASSIGNED_INTERVALS = 1.5
# How long closing may take on the way to Postgres, which may stand still: below the 10 seconds of `docker stop`.
CLOSE_SECONDS = 8.0
# How long the last offsets may take to be committed to Kafka: nothing depends on it but a dashboard.
_GOODBYE_SECONDS = 2.0
# How long to wait before joining again under a ``group.instance.id`` that is taken: it expires after many seconds.
_REOPEN_SECONDS = 1.0
# A second fence by the instance id within this time is another process: of two that run, one gets an error by then.
TWIN_SECONDS = 60.0
_FATAL = KafkaError._FATAL  # noqa: SLF001 - that is its public name
_ONE_ASSIGNOR = (
    "All members of a group need a common partition.assignment.strategy and the same group.protocol; "
    "stop the others, or change this one's"
)
# What stops the loop, because a broker refuses it every time, and what mends it where the client does not say that.
_FATAL_CODES = {
    _FATAL: "",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "",
    KafkaError.INVALID_GROUP_ID: "Choose another group.id",
    KafkaError.INVALID_SESSION_TIMEOUT: "Set session.timeout.ms between the broker's group.min.session.timeout.ms and "
    "group.max.session.timeout.ms",
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: _ONE_ASSIGNOR,
    KafkaError.UNSUPPORTED_ASSIGNOR: "Set group.remote.assignor to one that the broker has",
}
# What the client says of a batch that it can check, decompress or parse no better the next time.
_UNREADABLE = (
    KafkaError._BAD_MSG,  # noqa: SLF001 - these, too, are public names
    KafkaError._BAD_COMPRESSION,  # noqa: SLF001
    KafkaError._NOT_IMPLEMENTED,  # noqa: SLF001
    KafkaError._CRIT_SYS_RESOURCE,  # noqa: SLF001
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
)

_IN_ASYNCIO = (
    "one thread polls Kafka and commits. Run it in a thread of its own, and call your coroutines from its handler with "
    "asyncio.run_coroutine_threadsafe; docs/how-to/fastapi.md shows it"
)

OnRebalance = Callable[["ExactlyOnceConsumer", list[TopicPartition]], object]

_INSTEAD = {
    "assign": "only subscribe() is supported: the ledger decides where a partition is read from",
    "seek": "move offsets with `exactly-once reset`; the ledger decides where a partition is read from",
    "commit": "leaving `with unit:` commits, offset and effects together",
    "store_offsets": "leaving `with unit:` commits, offset and effects together",
    "poll": "iterate: `for unit in consumer: with unit:`, or call run(handler)",
    "consume": "iterate: `for unit in consumer: with unit:`, or call run(handler)",
}


class ExactlyOnceConsumer:
    """Read Kafka topics so that each message takes effect in Postgres once.

    All checks of options happen here; servers are first contacted by :meth:`subscribe`.

    A partition that cannot be read, because it is halted or its offset is not in the log, say, is left out until its
    row is changed, and the others are read on; :meth:`health` and the log say why.

    One thread owns the consumer; only :meth:`stop` and :meth:`health` may be called from others, and only
    :meth:`stop` from signal handlers.

    :param kafka: The configuration that confluent-kafka's ``Consumer`` takes. What librdkafka logs goes to the logger
        ``exactly_once.kafka``, each line once, unless ``logger`` names another.
    :param conninfo: A connection string of libpq; this or ``connect``.
    :param connect: A callable that opens a psycopg connection and returns it. ``getconn`` of a pool of psycopg_pool is
        one, and gets every connection back, closed.
    :param start: Where partitions begin that the ledger has no offset of: ``"earliest"``, ``"latest"``, ``"committed"``
        (where Kafka has the group), or a datetime with a time zone. None, the default, is ``"earliest"`` for a group
        that Kafka has no offsets of, and refuses one that has.
    :param on_out_of_range: What to do where the log has lost the stored offset: ``"fail"`` (the default: the partition
        is left out), ``"earliest"`` or ``"latest"``, written to the audit table.
    :param isolation: Of the units' transactions: ``"READ COMMITTED"`` (the default), ``"REPEATABLE READ"`` or
        ``"SERIALIZABLE"``.
    :param max_messages: How many messages a unit has at most: 500, up to 1,000,000.
    :param max_bytes: How many bytes of keys and values a unit has at most, but for a single larger message:
        64 MiB.
    :param linger_seconds: How long a unit that is not full waits for more, counted from its first message, so that few
        messages a second are few transactions: 0.
    :param max_unit_seconds: How long a unit may take until peers may end it, if its process shows no sign of life: 60,
        or half of ``max.poll.interval.ms`` where that is less; always below that.
    :param claims_window: For how long keys that units claim are held at least, as a timedelta or seconds; at most twice
        as long, or for ever by default. The last that is given holds for the group.
    :param startup_seconds: How long each server is waited for at the start: 30.
    :param wait_for_topics: Wait for topics that are not there yet instead of raising :class:`UnknownTopic`.
    :param stop_on_bad_partition: Have the iteration raise the :class:`StartError` of a partition that cannot be read.
    :param take_over: Take rows that Spark has not released.
    :param schema: Where the library's tables are: ``exactly_once``.
    :param migrate: Make the tables, or bring them up to date, at the start.
    :param name: The name of this member, for operators.
    :param application: The program that all members of the group run; where another one applied messages of the group
        before, a warning says so. By default the handler's name under :meth:`run`, else what the names of members have
        in common, or the program's file.
    :param metrics: What takes the measurements; by default nothing is measured.
    :raises ConfigurationError: for an option or a setting of ``kafka`` that is not possible, naming it.
    """

    _servers = Servers()

    def __init__(
        self,
        kafka: Mapping[str, Any],
        *,
        conninfo: str | None = None,
        connect: Callable[[], Connection] | None = None,
        start: StartPolicy | None = None,
        on_out_of_range: RangePolicy = "fail",
        isolation: Isolation = "READ COMMITTED",
        max_messages: int = 500,
        max_bytes: int = 64 * 1024 * 1024,
        linger_seconds: float = 0.0,
        max_unit_seconds: float | None = None,
        claims_window: timedelta | float | None = None,
        startup_seconds: float = 30.0,
        wait_for_topics: bool = False,
        stop_on_bad_partition: bool = False,
        take_over: bool = False,
        schema: str = "exactly_once",
        migrate: bool = False,
        name: str | None = None,
        application: str | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        given = dict(locals())  # first of all: every option by its name, of which options.Options has a field
        self._options = check_options(**{option: given[option] for option in given.keys() - {"self", "metrics"}})
        self._about = partial(about, group=self._options.group_id)
        self._kafka = {"logger": kafka_logger(), "client.id": settings.client_id(name), **kafka}
        self._process = os.getpid()
        self._thread: threading.Thread | None = None  # the one that used it first, and owns it
        # What was handed out last, whatever became of it.
        self._unit: Unit | None = None
        self._stopping = Stop()
        # Set by the first call of close(); written by the owning thread, read by all.
        self._closed = False
        # Why the client can do nothing but be replaced; empty while it can.
        self._must_reopen = ""
        # Why it was replaced last, until a unit is handed out: the same reason again is logged at DEBUG.
        self._reopened_for = ""
        # The end of the present client, where it was begun.
        self._closing_client: Closing | None = None
        # What the client reported when it was fenced by its instance id, until it is opened anew.
        self._fence: str | None = None
        # When it was the last time, on the monotonic clock.
        self._fenced_at = -math.inf
        # Until when the client was polled with partitions paused, on the monotonic clock.
        self._idled_at = 0.0
        # What closing still has to do, with Postgres and without; None before it.
        self._closing: list[deque[Callable[[], object]]] | None = None
        # Which errors of the client were logged as warnings, and where.
        self._warned: set[tuple[int, str]] = set()
        self._assemble(self._options, metrics)
        self._client = self._open_client()
        leave_in_children(self)

    def _assemble(self, options: Options, metrics: Metrics | None) -> None:
        """Make the parts and connect them; nothing is contacted yet."""
        servers = self._servers
        session = self._session = servers.session(options.connect, schema=options.schema)
        self._terminator = servers.terminator(
            options.connect, schema=options.schema, group_id=options.group_id, instance=session.instance
        )
        ledger = self._ledger = servers.ledger(
            session,
            group_id=options.group_id,
            owner_kind="consumer",
            owner_name=options.name,
            take_over=options.take_over,
            application=options.application or application_of(None, options.name),
            watch=self._terminator.acquiring,
        )
        self._assignment = Assignment(incremental=settings.is_incremental(self._kafka), group_id=options.group_id)
        ownership = self._ownership = Ownership()
        self._kafka_offsets = KafkaOffsets(group_id=options.group_id)
        self._linger = Linger(options.linger_seconds, options.max_bytes)
        self._buffer = FetchBuffer(
            ownership,
            on_error=self._on_error,
            queue_bytes=int(self._kafka.get("queued.max.messages.kbytes", 65536)) * 1024,  # librdkafka's default
            can_outgrow=options.linger_seconds > 0,
        )
        self._commits = CommitProtocol(ledger, self._buffer, self._terminator, max_messages=options.max_messages)
        self._cluster = servers.cluster(settings.admin_settings(self._kafka))
        start_offsets = self._start_offsets = StartOffsets(
            ledger, self._cluster, start=options.start, on_out_of_range=options.on_out_of_range
        )
        self._maintenance = Maintenance(
            self._commits,
            self._assignment,
            start_offsets,
            self._kafka_offsets,
            self._cluster,
            is_called_for_nothing=settings.calls_back_for_nothing(self._kafka),
            stop_on_bad_partition=options.stop_on_bad_partition,
        )
        self._observer = Observer(metrics, self._kafka, self._maintenance, owner_name=options.name)
        self._claims = ClaimsWindow(session=session, group_id=options.group_id, seconds=options.claims_window)
        self._read_only = ReadOnlyGuard(session, self._assignment, options.group_id)
        self._retry_forever = retry_forever(sleep=self._idle, stop=self._stopping, group_id=options.group_id)

    def __repr__(self) -> str:
        held = ", ".join(map(str, sorted(self._ownership.states)))
        return f"<ExactlyOnceConsumer group {self._options.group_id!r}: {held or 'no partitions'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Units:
        return self.units()

    if not TYPE_CHECKING:  # else a type checker takes every misspelt method for one that exists and never returns

        def __getattr__(self, name: str) -> NoReturn:
            if name in _INSTEAD:
                raise AttributeError(f"ExactlyOnceConsumer has no {name}(): {_INSTEAD[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        # Looked up on the class: without them `async for` and `async with` fail without naming the way out.
        def __aiter__(self) -> NoReturn:
            raise TypeError(f"`async for` over a consumer is not possible: {_IN_ASYNCIO}")

        async def __aenter__(self) -> NoReturn:
            raise TypeError(f"`async with` on a consumer is not possible: {_IN_ASYNCIO}")

        __aexit__ = __aenter__

    @property
    def counters(self) -> Counters:
        """What happened to units so far."""
        return self._commits.counters

    def subscribe(
        self,
        topics: list[str],
        *,
        on_assign: OnRebalance | None = None,
        on_revoke: OnRebalance | None = None,
        on_lost: OnRebalance | None = None,
    ) -> None:
        """Join the group for these topics, after a look at both servers, the schema and the topics.

        The callbacks are called by the loop, ``on_assign`` after acquisition and with the real
        offsets; what they raise is raised by the iteration.

        A server that is away is waited for and logged, for ``startup_seconds`` each.

        :raises DatabaseUnreachable: or :raises BrokerUnreachable: after that; for a wrong password, database, host
            name or certificate at once.
        :raises ReadOnly: when the database server still takes no writes after that.
        :raises UnknownTopic: unless ``wait_for_topics`` was given.
        :raises SchemaTooOld: when ``exactly-once migrate`` has not been run.
        :raises UnitNotFinished: inside of a unit.
        """
        self._check_use()
        settings.check_topics(topics)
        if self._unit is not None and self._unit.stage is Stage.OPEN:
            # The look at the database would end its transaction.
            raise errors.UnitNotFinished(f"subscribe() inside of {self._unit!r}: leave its `with unit:` before")
        self._servers.check_database(self._session, self._options)
        self._servers.check_topics_exist(self._cluster, [t for t in topics if not t.startswith("^")], self._options)
        first, first_before = None, self._start_offsets.first_topics
        waits = self._options.wait_for_topics
        if self._options.start not in (None, "earliest") and (waits or any(topic.startswith("^") for topic in topics)):
            # ``start`` chooses for topics that are named and exist, and for those that a pattern finds in a group
            # without rows: every topic there is, found or not, which only client and broker know. What arrives in a
            # topic that is made later, before it is found, would be skipped by ``start="latest"``.
            asking = retry_for(self._options.startup_seconds)
            there = asking(self._cluster.topic_names)
            named = set(topics).intersection(there) if waits else set(topics)
            first = frozenset(named if asking(self._ledger.has_rows) else named.union(there))
        self._start_offsets.first_topics = first
        if not self._assignment.topics:
            self._buffer.only_topic = topics[0] if len(topics) == 1 and not topics[0].startswith("^") else None
        elif self._assignment.topics != list(topics):
            # Messages of the topics of before may still come, until Kafka has taken those away.
            self._buffer.only_topic = None
        before, self._assignment.topics = self._assignment.topics, list(topics)
        lost = on_revoke if on_lost is None else on_lost
        given = {Change.ASSIGNED: on_assign, Change.REVOKED: on_revoke, Change.LOST: lost}
        called = {change: partial(callback, self) for change, callback in given.items() if callback is not None}
        self._maintenance.callbacks = called
        try:
            self._assignment.join(self._client)
        except KafkaException as error:
            self._assignment.topics, self._start_offsets.first_topics = before, first_before
            if error.args[0].code() != KafkaError._INVALID_ARG:  # noqa: SLF001 - that is its public name
                raise
            raise errors.ConfigurationError(f"the client refuses topics={topics!r}: {error.args[0].str()}") from None
        self._observer.record_poll()

    def units(self, *, until_end: bool = False, idle_seconds: float | None = None) -> Units:
        """Iterate over units: for ever, or until an end.

        With ``until_end`` the iteration ends when every partition of this member has reached where
        its log ended when the partition was acquired, or the first open transaction of a producer began, which is
        logged. With ``idle_seconds`` it ends when nothing came for so long, counted from when all partitions of this
        member are being read. A member that is given no partitions waits ten seconds for others to give some up,
        except under the eager protocol, where it is told so; one whose patterns match no topic waits as long.
        :meth:`stop` ends it always.

        :raises StartError: at such an end, when a partition could not be read: what it has was not applied.
        :raises UnknownTopic: in place of such an end, when the topic of a log that was not read to its end is gone.
        """
        check_idle(idle_seconds)
        if not self._assignment.topics:
            raise errors.ConfigurationError("subscribe() first: there is nothing to iterate over")
        if self._ownership.bad():
            self._maintenance.check_rows_soon()  # or it ends with an error that somebody has mended since
        return Units(
            self._next,
            self._maintenance,
            until_end=until_end,
            idle_seconds=idle_seconds,
            max_unit_seconds=self._options.max_unit_seconds,
            read_committed=settings.reads_committed(self._kafka),
        )

    def run(
        self,
        handler: Callable[[Unit], object],
        *,
        on_poison: OnPoison = "stop",
        attempts: int = 1,
        dead_letter_limit: DeadLetterLimit | None = None,
        in_thread: bool = False,
        revoke_seconds: float = 10.0,
        stop_seconds: float = 30.0,
        until_end: bool = False,
        idle_seconds: float | None = None,
        wait: tenacity.wait.wait_base = BACKOFF,
    ) -> bool:
        """Call ``handler(unit)`` for each unit until SIGTERM, SIGINT or :meth:`stop`; the form for services.

        What is nobody's fault is tried again after ``wait``, polling Kafka with partitions paused. When the
        handler fails for a reason in the data, or by an error of its own, smaller and smaller units are tried
        until the message is found; what comes before it commits. So **the handler may be called again with the
        same messages, or with fewer of them**. A message that failed ``attempts`` times alone is poison:
        ``on_poison="stop"`` raises, ``"dead-letter"`` stores it and skips it in one transaction, a callable
        ``(unit, message, error)`` does as it likes in the transaction that skips it.

        With ``in_thread`` the handler works in another thread while this one keeps polling with partitions
        paused, for handlers that take longer than ``max.poll.interval.ms``. When Kafka takes a partition of
        its unit away, it may finish for ``revoke_seconds``, then its transaction is ended.

        On a signal the unit in hand may finish for ``stop_seconds``, or until the second signal. Then whatever goes on,
        a wait for a server that stands still too, is given up, the unit is rolled back, and
        ``SystemExit(128 + signal)`` is raised. ``until_end`` and ``idle_seconds`` are those of :meth:`units`. Return
        whether such an end was reached: False after :meth:`stop`, while a signal that comes before an end that was
        asked for raises ``SystemExit(128 + signal)``, so that a job that was stopped is not taken for one that is done.

        :raises PoisonMessage: naming topic, partition and offset.
        :raises TooManyDeadLetters: beyond ``dead_letter_limit``.
        """
        check_run(
            handler,
            on_poison=on_poison,
            attempts=attempts,
            dead_letter_limit=dead_letter_limit,
            wait=wait,
            revoke_seconds=revoke_seconds,
            stop_seconds=stop_seconds,
            idle_seconds=idle_seconds,
        )
        self._ledger.application = self._options.application or application_of(handler, self._options.name)
        units = self.units(until_end=until_end, idle_seconds=idle_seconds)
        if in_thread:
            units.max_unit_seconds = math.inf  # Kafka does not wait for this handler
            handler = HandlerThread(
                handler=handler, poll=self._poll_aside, session=self._session, revoke_seconds=revoke_seconds
            )
        service = Service(
            units=units,
            handler=handler,
            retrying=retry_forever(sleep=self._idle, stop=self._stopping, group_id=self._options.group_id, wait=wait),
            stopping=self._stopping,
            on_poison=on_poison,
            attempts=attempts,
            limit=dead_letter_limit or DeadLetterLimit(),
        )
        with stopping_on_signals(self.stop, stop_seconds) as received:
            service.run()
        if received and not units.is_over and (until_end or idle_seconds is not None):
            logger.warning("stopped before the end that was asked for", extra=self._about("stopped_before_end"))
            raise SystemExit(128 + received[0])
        return units.is_over

    def health(self) -> Health:
        """Say how this consumer is. Safe from threads; asks no server, so it answers at once."""
        return self._observer.health(
            is_subscribed=bool(self._assignment.topics), is_stopping=self._stopping.is_set or self._closed
        )

    def stop(self) -> None:
        """End the iteration after the unit in hand. Safe from threads and signal handlers."""
        self._stopping.set()

    def close(self) -> None:
        """Release the rows and leave the group. Idempotent; trouble on the way is logged, not raised.

        Where an exception of a signal handler has cut it short, another call does the rest.

        What Postgres has to be asked for gets :data:`CLOSE_SECONDS`: rows that are not released keep nobody out.

        :raises WrongThreadOrProcess: in another thread, while the one that subscribed is alive; nothing has happened
            then.
        """
        if os.getpid() != self._process:
            return
        if self._thread not in (None, threading.current_thread()) and self._thread.is_alive():
            raise errors.WrongThreadOrProcess(
                f"this consumer belongs to the thread {self._thread.name!r}, which may be inside of a unit: call "
                "stop() and have that thread close the consumer, or wait until it has ended"
            )
        self._closed = True
        if self._closing is None:
            with_postgres = (
                self._terminator.close,
                self._end_unit,
                self._commits.log_unused,
                self._move_to_ends,
                self._say_goodbye,
                self._release,
            )
            without = (
                self._leave,
                self._close_client,
                self._ownership.states.clear,
                self._cluster.close,
                self._session.close,
                self._observer.close,
            )
            self._closing = [deque(with_postgres), deque(without)]
        if self._closing[0]:
            with self._session.cut_after(CLOSE_SECONDS):
                self._close_by(self._closing[0])
        self._close_by(self._closing[1])
        # It holds our callbacks, which hold us: nothing but the garbage collector would free it, and until then it
        # keeps one of the 1,024 thread-local keys of the process.
        vars(self).pop("_client", None)

    def _close_by(self, steps: deque[Callable[[], object]]) -> None:
        while steps:
            try:
                steps[0]()
            except Exception as error:  # noqa: BLE001 - the next steps matter more
                logger.warning("while closing: %s", error, extra=self._about("close_failed"))
            steps.popleft()

    # The loop.

    def _next(self, units: Units) -> Unit | None:
        """Return the next unit, or None when stopped or the iteration is over."""
        self._check_use()
        self._refuse()
        if (unit := self._unit) is not None and unit.stage is Stage.NEW and unit.is_told:
            unit.stage = Stage.FAILED  # whoever had it has lost it, in an error before it was entered
            self._commits.take_back(unit)
        elif unit is not None and unit.stage not in (Stage.DONE, Stage.FAILED, Stage.JOINED):
            unit.is_told = True
            raise errors.UnitNotFinished(
                f"the last unit was not finished: {unit!r}; enter it with `with unit:`"
                + (", or iterate on, and its messages come again" if unit.stage is Stage.NEW else "")
            )
        if not self._ownership.is_sound or not (self._commits.is_pending or self._ownership.is_accounted):
            # A signal handler may raise between any two lines: fetch again from where the ledger stands.
            self._buffer.drop_all()
            self._ownership.invalidate_all()
            if not self._must_reopen:  # else the client may be closed already
                self._assignment.find_unrecorded(self._client, self._ownership.states)
        if self._unit is not None:
            units.record_activity()  # it may have taken long, and in a thread nothing was fetched meanwhile
        with self._ownership.changing():
            unit = self._unit = self._find_unit(units)
        self._observer.record_poll()
        if unit is None:
            self._refuse()
            if self._assignment.failures:
                raise self._assignment.failures.popleft()
            if not self._stopping.is_set:
                units.refuse_bad()
        return unit

    def _refuse(self) -> None:
        if (refusal := self._commits.refusal) is not None:
            self._commits.refusal = None
            raise refusal

    def _find_unit(self, units: Units) -> Unit | None:
        """Do what is due, fetch, and hand out a batch: once round the loop for each unit, and while there is none."""
        if (left := self._commits.not_before - time.monotonic()) > 0:
            self._idle(left)
        while not (self._stopping.is_set or self._assignment.failures or self._commits.refusal):
            if self._must_reopen or self._is_client_stuck():
                self._reopen_client()
            if self._maintenance.is_due:
                if not self._keep_up() or self._assignment.failures or self._commits.refusal:
                    continue
                units.ask_for_ends()
            self._assignment.pause(self._client, self._buffer.to_pause)
            units.is_over = units.has_reached_ends()
            if units.is_over:
                return None
            limit = min(self._commits.limit, units.max_messages or self._commits.limit)
            waiting = self._buffer.waiting
            if left := self._linger_left(units, limit):
                # Where there is an end it must be seen at once; else nobody needs to wake up for each message.
                self._fetch(min(left, POLL_SECONDS), limit - waiting, fill=not units.until_end)
            else:
                count = limit if not waiting else _QUEUED_MESSAGES if self._buffer.keeps else 1
                self._fetch(0 if waiting else POLL_SECONDS, count)
            if self._assignment.events or self._linger_left(units, limit):
                continue
            messages, spans = self._buffer.next_batch(limit, self._options.max_bytes)
            if messages:
                units.record_activity()
                advances = self._ownership.hand_out(spans)
                isolation, may_take = self._options.isolation, units.max_unit_seconds
                work = UnitOfWork(self._ledger, isolation=isolation, max_unit_seconds=may_take)
                failpoint("polled")
                self._reopened_for = ""
                return Unit(messages, advances, attempt=self._buffer.attempt, work=work, commits=self._commits)
            units.is_over = units.is_left_without(since=self._idled_at)
            if units.is_over:
                return None
        units.is_over = units.has_reached_ends()  # stopped, perhaps in the last unit
        return None

    def _linger_left(self, units: Units, limit: int) -> float:
        """Return for how long what was fetched should wait for more; what comes again does not."""
        if not self._options.linger_seconds or self._buffer.repeats or units.has_read_all():
            return 0.0
        return self._linger.left(self._buffer.waiting, limit)

    def _keep_up(self) -> bool:
        """Have the maintenance done, however long a server is away; return whether it was done."""
        try:
            self._retry_forever(self._step)
        except Exception:
            if self._stopping.is_set:
                return False
            raise
        failpoint("positioned")
        return True

    def _step(self) -> None:
        try:
            self._session.roll_back()  # an interruption may have left a statement: nothing works on it any more
            self._read_only.check(self._client)
            try:
                with explaining(self._session):
                    self._maintenance.run_once(self._client)
                    self._claims.turn()
            except psycopg.errors.ReadOnlySqlTransaction:
                self._read_only.met(self._client)
                raise
        except Exception as error:
            self._observer.trouble = error
            raise
        self._observer.trouble = None

    def _fetch(self, timeout_seconds: float, count: int, *, fill: bool = False) -> None:
        self._observer.record_poll()
        messages = fetch(self._client, timeout_seconds, count, fill=fill)
        self._linger.weigh(messages)
        self._maintenance.take_events()
        self._buffer.add(messages)

    def _poll_aside(self, seconds: float, unit: Unit | None = None) -> bool:
        """Poll while no unit can be made, so that the membership survives; keep what comes.

        Return whether Kafka took partitions of the ``unit`` that is open.
        """
        self._observer.record_poll()
        with self._ownership.changing():
            messages = fetch(self._client, seconds, _QUEUED_MESSAGES)
            if unit is None:  # else events wait for its end
                self._maintenance.take_events()
            self._buffer.add(messages, keep=True)
            self._assignment.pause(self._client, self._buffer.to_pause)
        return unit is not None and self._assignment.takes(a.partition for a in unit.advances)

    def _idle(self, seconds: float) -> None:
        """Wait, polling so that the membership survives."""
        self._check_use()  # a handler may have closed the consumer
        deadline = time.monotonic() + seconds
        while not self._stopping.is_set and (left := deadline - time.monotonic()) > 0:
            self._poll_aside(min(left, POLL_SECONDS))
            self._idled_at = time.monotonic()
            if self._assignment.failures:
                raise self._assignment.failures.popleft()

    def _on_error(self, message: Message) -> None:
        """Handle an error event that came instead of a message; what must stop the loop is raised later."""
        error = message.error()
        assert error is not None
        code, text = error.code(), error.str()
        instance = self._kafka.get("group.instance.id")
        if code == KafkaError._PARTITION_EOF:
            partition = Partition.of(message)
            self._ownership.reached_end(partition, message.offset() or 0, time.monotonic())
        elif code == KafkaError._AUTO_OFFSET_RESET:
            self._ownership.suspect(Partition.of(message), text)
        elif code in _UNREADABLE and message.topic() is not None:
            self._maintenance.unreadable(message)
        elif code == _FATAL and _text(KafkaError.UNRELEASED_INSTANCE_ID) in text:
            # Under group.protocol=consumer a static member keeps its place until it expires.
            self._must_reopen = f"group.instance.id={instance!r} is still taken by an earlier process"
        elif code == _FATAL and _text(KafkaError.FENCED_INSTANCE_ID) in text:
            self._fence = text
            self._must_reopen = f"group.instance.id={instance!r} is taken, perhaps by what this member was before"
        elif code in _FATAL_CODES:
            texts = [f"{error.name()}: {text}", *(m for c, m in _FATAL_CODES.items() if m and _text(c) in text)]
            self._assignment.failures.append(errors.ClientFailed(". ".join(texts)))
        else:
            # It may pass; the client repeats it for as long as it lasts.
            topic, number = message.topic(), message.partition()
            if code == KafkaError.UNKNOWN_TOPIC_OR_PART and topic is not None:
                self._maintenance.absent.add(topic)
            where = "" if topic is None else f" ({topic}[{number}])" if (number or -1) >= 0 else f" ({topic})"
            level = logging.DEBUG if (code, where) in self._warned else logging.WARNING
            self._warned.add((code, where))
            told = "Kafka client: %s: %s%s; repetitions are logged at DEBUG"
            logger.log(level, told, error.name(), text, where, extra=self._about("client_said"))
            if topic is not None:
                self._maintenance.recheck_soon(topic)

    def _is_client_stuck(self) -> bool:
        """Tell whether the client does nothing although brokers answer: then it may stand still for ever.

        Its own thread may stand still, and after a crash of the group's coordinator it may never join.
        """
        patience = _UNASSIGNED_INTERVALS * settings.poll_interval_seconds(self._kafka)
        if self._kafka_offsets.unanswered >= _SILENT_CHECKS:
            self._kafka_offsets.unanswered = 0
            reason = f"the Kafka client left {_SILENT_CHECKS} commits without an answer"
        elif self._maintenance.unassigned_seconds > patience:
            self._maintenance.joining = None
            reason = f"Kafka has assigned nothing, be it no partition, for {patience:g} s"
        else:
            return False
        try:
            self._cluster.topic_names()
            self._cluster.describe({partition.topic for partition in self._ownership.to_confirm()})
        except (errors.BrokerUnreachable, errors.UnknownTopic):
            return False
        self._must_reopen = f"{reason}, and brokers answer"
        return True

    def _reopen_client(self) -> None:
        """Join anew, with another client.

        :raises InstanceFenced: when another process has our rows, or it is the second time in a short while.
        """
        if self._fence is not None:
            # The client may have fenced itself: one that hears nothing of its coordinator for a session time-out
            # forgets its member id. A commit that waits in it then goes out without that, which brokers take for
            # another process of the same instance id. A real one owns rows of ours by now, or fences us again.
            now, own, rows = time.monotonic(), self._session.instance, []
            with contextlib.suppress(psycopg.Error):
                rows = self._ledger.look(list(self._ownership.states))
            is_replaced = any(row.owner_token is not None and row.owner_instance != own for row in rows)
            if is_replaced or now - self._fenced_at < TWIN_SECONDS:
                raise errors.InstanceFenced(
                    f"{self._fence}; group.instance.id={self._kafka.get('group.instance.id')!r}"
                )
            self._fence, self._fenced_at = None, now
        level = logging.DEBUG if self._must_reopen == self._reopened_for else logging.WARNING
        told = "%s; joining again until it works; repetitions are logged at DEBUG"
        logger.log(level, told, self._must_reopen, extra=self._about("joining_again"))
        self._reopened_for = self._must_reopen
        self._maintenance.take_events()
        self._assignment.lose(self._ownership.states)
        self._close_client()
        time.sleep(_REOPEN_SECONDS)
        self._client = self._open_client()
        self._assignment.join(self._client)
        self._must_reopen = ""

    def _close_client(self) -> None:
        self._closing_client = self._closing_client or self._servers.closing(self._client)
        if not self._closing_client.wait(CLIENT_SECONDS):
            logger.error(
                "the Kafka client has not ended within %g s and is left behind; others get its partitions when its "
                "session is over",
                CLIENT_SECONDS,
                extra=self._about("close_failed"),
            )
        self._closing_client = None

    # First contact and goodbye.

    def _open_client(self) -> Consumer:
        own = {name: self._assignment.contain(callback) for name, callback in settings.callbacks(self._kafka).items()}

        def on_commit(error: KafkaError | None, offsets: list[TopicPartition]) -> None:
            self._kafka_offsets.on_commit(error, offsets)
            if "on_commit" in own:
                own["on_commit"](error, offsets)

        given = {**settings.client_settings(self._kafka), **own, "on_commit": self._assignment.contain(on_commit)}
        try:
            return self._servers.client(given)
        except KafkaException as error:
            raise errors.ConfigurationError(
                f"confluent-kafka refuses the configuration: {error.args[0].str()}"
            ) from None

    def _check_use(self) -> None:
        if os.getpid() != self._process:
            raise errors.WrongThreadOrProcess("this consumer was made in another process; make one after the fork")
        self._thread = self._thread or threading.current_thread()
        if self._thread is not threading.current_thread():
            raise errors.WrongThreadOrProcess(
                "this consumer belongs to the thread that subscribed; only stop() may be called from others"
            )
        if self._closed:
            raise errors.ConfigurationError("this consumer is closed; make a new one")

    def _end_unit(self) -> None:
        if self._unit is not None and self._unit.stage is Stage.OPEN:
            self._session.roll_back()
        elif self._commits.awaits_joined:  # also after stop(), when the iteration has no unit any more
            self._commits.resolve()  # if its transaction is over; else it is left to whoever comes next

    def _say_goodbye(self) -> None:
        """Let dashboards see the last offsets, for a moment."""
        if self._assignment.topics:
            self._kafka_offsets.send(self._client, self._ownership.states, at_once=True)
        deadline = time.monotonic() + _GOODBYE_SECONDS
        while not self._kafka_offsets.is_idle and time.monotonic() < deadline:
            self._client.poll(POLL_SECONDS / 2)

    def _leave(self) -> None:
        """Leave the group: with an empty assignment the client's close may not do so, and all wait for its ghost."""
        if self._assignment.topics:
            # An empty one, of a variable that is not set, makes no static member.
            self._assignment.leave(self._client, for_good=not self._kafka.get("group.instance.id"))

    def _move_to_ends(self) -> None:
        if self._ownership.is_sound and not self._commits.is_pending and not self._session.lost:
            self._maintenance.move_to_ends(released=True)
            self._maintenance.move_to_ends()

    def _release(self) -> None:
        held = self._ownership.tokens()
        if held and not self._commits.is_pending and not self._session.lost:
            self._ledger.release(held)


def _text(code: int) -> str:
    """Return librdkafka's words for an error, which is all that tells one fatal error from another."""
    return KafkaError(code).str()
