"""TransactionalProducer: messages behind a duplicate filter, together in the log or not at all.

A client is used for as long as nothing at all went wrong on its wires, and replaced after that: a request to end a
transaction that it has repeated may end the next one. ``docs/publishing.md`` says why.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from exactly_once._log import about
from exactly_once._model import Partition
from exactly_once.errors import BrokerUnreachable, ClientFailed, ConfigurationError, ExactlyOnceError

from .chain import Link
from .delivery import FAILURES, Callback, Delivery, Outcome
from .errors import NotPersisted, OutcomeUnknown, ProducerFenced
from .headers import Headers, kept
from .keys import GivenKey
from .options import PublishOptions, check_options, client_settings
from .publisher import AnyFilter, ProducerRecord, Publisher, ToSend, error_of, is_fatal
from .recovery import SequenceLog
from .tail import describe, ends_of, read_tail

logger = logging.getLogger(__name__)

_SECONDS = 60.0
_ABORT_SECONDS = 5.0
_FLUSH_SECONDS = 0.1
# Of connections that end after a minute without traffic the client does not tell.
_IDLE_SECONDS = 50.0
_FENCED = frozenset((KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH))  # noqa: SLF001
# Python's levels of the client's ``log_level`` 0 to 7.
_LEVELS = (*[logging.CRITICAL] * 3, logging.ERROR, logging.WARNING, logging.INFO, logging.INFO, logging.DEBUG)


class Transaction:
    """Messages that are published together when the block of ``with producer.transaction()`` ends."""

    def __init__(self) -> None:
        # Topics and messages, in the order of the calls.
        self.messages: list[tuple[str, ProducerRecord]] = []
        # What became of each; known when the block was left.
        self.deliveries: list[Delivery] = []
        # Whether the block was left: what comes later would be sent by nobody.
        self.is_over = False

    def produce(
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        *,
        dedup_key: GivenKey | None = None,
        sequence: int | None = None,
        chain: Link | None = None,
        partition: int = -1,
        headers: Headers | None = None,
        timestamp: int = 0,
        on_delivery: Callback | None = None,
    ) -> None:
        """Add a message; arguments as those of :meth:`DedupProducer.produce`.

        :raises ConfigurationError: when the block was left.
        """
        if self.is_over:
            raise ConfigurationError(f"the transaction is over: this message to {topic!r} would never be sent")
        given = ProducerRecord(value, key, dedup_key, sequence, chain, partition, kept(headers), timestamp, on_delivery)
        self.messages.append((topic, given))


class TransactionalProducer(Publisher):
    """Publishes in Kafka transactions what a filter has not seen; options as those of :class:`DedupProducer`.

        with TransactionalProducer({"transactional.id": "orders-1", ...}, dedup=...) as producer:
            with producer.transaction() as transaction:
                transaction.produce("orders", value, dedup_key=order_id)
                transaction.produce("audit", entry, dedup_key=order_id)

    Nothing is sent before the block ends, and nothing at all when it is left by an error. Keys are confirmed once what
    is new is committed, absent again if it surely was not, and unknown in the rare case that nobody can tell.

    One producer at a time may have a transactional id, and making a second one fences the first: that one's next
    transaction raises :class:`ProducerFenced`. With ``owner=``, the owner may name the id, and a take-over of its keys
    is certain then; such an id is drawn for each life.

    Every method may be called from any thread; transactions are published one after another.
    """

    _is_transactional = True
    _is_fenced = False
    find_seconds = _SECONDS
    """For so long brokers are asked how a transaction ended."""
    logs: Callable[[], Iterable[SequenceLog]]
    """Returns the logs of the sequences that are sent under this transactional id. Each has one writer."""

    def __init__(
        self,
        kafka: Mapping[str, Any],
        *,
        dedup: AnyFilter | Callable[[str], AnyFilter],
        **options: Unpack[PublishOptions],
    ) -> None:
        check_options(kafka, options, PublishOptions)
        self.logs = self._logs
        self._turn = threading.RLock()  # again in a callback that close() calls: it is told that the producer is closed
        self._id = str(kafka.get("transactional.id") or "")
        super().__init__(kafka, dedup=dedup, options=options)

    @contextlib.contextmanager
    def transaction(self, *, timeout_seconds: float = _SECONDS) -> Iterator[Transaction]:
        """Collect messages in a block, and publish them at its end.

        :raises NotPersisted: when surely none of them is in the log; their keys are absent again.
        :raises OutcomeUnknown: when they may be there, all or none.
        :raises HeldElsewhere: when another process is sending one of them; nothing was sent.
        :raises ProducerFenced: when another producer has taken over the transactional id, or the transaction took
            longer than ``transaction.timeout.ms``; deliveries tell what became of the messages.
        :raises BrokerUnreachable: when no client could be made ready; nothing was sent.
        """
        self._guard.check()  # the lock may be held for ever in a child
        made = Transaction()
        try:
            yield made
        finally:
            made.is_over = True
        try:
            with self._turn:
                try:
                    self._publish(made, time.monotonic() + timeout_seconds)
                except BaseException:
                    # Unknown is what an interruption has left in flight: nobody else publishes now.
                    batches = [batch for topic in self._topics.values() for batch in set(topic.in_flight.values())]
                    left = [(batch, range(len(batch.identities))) for batch in batches]
                    if any(batch.outcome(place) is Outcome.PENDING for batch, places in left for place in places):
                        self._is_usable = False  # a transaction may be open
                        conclude(left, Outcome.UNKNOWN, None)
                    raise
        finally:
            self._settle()  # outside of the lock: a callback may publish, too

    def _publish(self, made: Transaction, deadline: float) -> None:
        self._make_ready(deadline)
        if not (to_send := self._reserve_all(made)):
            return
        try:
            self._hand_over_all(to_send, deadline)
        except BaseException as exception:
            error = error_of(exception)
            conclude(to_send, Outcome.NOT_PERSISTED, error)
            if isinstance(exception, ClientFailed) or is_fatal(error):  # the next transaction has another client
                raise NotPersisted(f"the transaction is {Outcome.NOT_PERSISTED.value}: {exception}") from exception
            raise
        verdict, error = self._commit_all(to_send, deadline)
        conclude(to_send, verdict, error)
        if verdict is not Outcome.DELIVERED and error is not None:
            said = f"the transaction is {verdict.value}"
            problem = self._fenced(said) if self._is_fenced else FAILURES[verdict][1](f"{said}: {error.str()}")
            raise problem from KafkaException(error)

    def close(self, timeout_seconds: float = _SECONDS) -> None:
        """Let the transaction that is being published end, then close."""
        if not self._guard.is_ours():
            return
        with self._turn:
            super().close(timeout_seconds)

    def _failures(self, *, all_of_them: bool) -> None:
        """Return nothing: the error of a transaction has told of all its messages."""
        for topic in self._topics.values():
            topic.failed.clear()

    @contextlib.contextmanager
    def nothing_arrives(self) -> Iterator[None]:
        """End what was left open, and let nobody publish in the block."""
        with self._turn:
            self._make_ready(time.monotonic() + _SECONDS)
            yield

    def _connect(self, seconds: float | None = None) -> Producer:
        """Make a client and fence the one before; the transaction that it left open ends by that."""
        if not self._id:
            raise ConfigurationError("transactional.id is missing: name one that no other producer has")
        if self._owner is not None:
            self._owner.check()
        self._is_usable = False
        self._log = _ClientLog(self._settings)
        settings = {**client_settings(self._settings, is_transactional=True), **self._log.settings()}
        client = Producer(settings)
        try:
            client.init_transactions(_SECONDS if seconds is None else seconds)
        except KafkaException as error:
            _listen(client)
            # It asks again in its own thread for as long as it lives, which is as long as a traceback refers to it; and
            # each time it gets through, it fences the next one.
            del client
            if error.args[0].code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:  # at every attempt
                raise ConfigurationError(
                    "transaction.timeout.ms is above what the brokers allow, their transaction.max.timeout.ms"
                ) from error
            raise BrokerUnreachable(f"no transactions as {self._id!r}: {error.args[0].str()}") from error
        _listen(client)
        self._log.is_quiet, self._is_usable = True, True
        self._used_at = time.monotonic()
        return client

    def send(self, to_send: Sequence[ToSend], seconds: float) -> tuple[Outcome, KafkaError | None]:
        """Send what was reserved elsewhere in one transaction; return how it ended. The caller concludes it.

        :raises ProducerFenced: when another producer has taken over; nothing was sent.
        :raises BrokerUnreachable: when no client could be made ready; nothing was sent.
        """
        with self._turn:
            deadline = time.monotonic() + seconds
            self._make_ready(deadline)
            self._hand_over_all(to_send, deadline)
            return self._commit_all(to_send, deadline)

    def _commit_all(self, to_send: Sequence[ToSend], deadline: float) -> tuple[Outcome, KafkaError | None]:
        """Commit what was handed over; return how that ended. The messages of an interrupted one are concluded."""
        verdict, error = Outcome.UNKNOWN, None
        try:
            try:
                # The client's own wait goes on behind a message that is refused: others would wait for their time-out.
                while len(self._client) and not any(batch.errors for batch, _ in to_send):
                    if (left := deadline - time.monotonic()) <= 0:
                        break
                    self._client.flush(min(left, _FLUSH_SECONDS))  # unlike poll() it lets nothing linger
                self._client.commit_transaction(max(0.0, deadline - time.monotonic()))
                verdict = Outcome.DELIVERED
            except (KafkaException, SystemError) as exception:
                error = error_of(exception) or KafkaError(KafkaError._FATAL)  # noqa: SLF001 - its public name
                verdict = self._find_out(to_send, error)
        except BaseException:
            self._is_usable = self._is_usable and error is not None
            conclude(to_send, verdict, error)
            raise
        finally:
            self._used_at = time.monotonic()
        return verdict, error

    def _make_ready(self, deadline: float) -> None:
        """See to it that nothing of earlier transactions can arrive any more."""
        self._check_open()
        self._check_fenced()
        if self._owner is not None:
            self._owner.check()
        _listen(self._client)
        is_idle = time.monotonic() - self._used_at > _IDLE_SECONDS
        if not self._is_usable or is_idle or not self._log.is_quiet:
            self._replace_client(max(0.1, deadline - time.monotonic()), [])
            self._check_fenced()

    def _replace_client(self, seconds: float, to_send: Sequence[ToSend]) -> None:
        """Make a client in the place of the last one, unless somebody has taken over from that meanwhile.

        A process that was frozen for long does not know of its successor, and would fence it by this. What it has
        numbered is in the log then, by somebody else.
        """
        self._client = self._connect(seconds)
        self._is_usable = False  # until that is known
        own = {(m.partition(), m.offset()) for m in _reports(to_send)}
        if any(log.has_another_writer(own) for log in self.logs()):
            self._is_fenced = True
        self._is_usable = True

    def _reserve_all(self, made: Transaction) -> list[ToSend]:
        """Ask the filters for all messages before the first is sent.

        A filter may have to read the topic to answer, and an open transaction of our own would hide its end.
        """
        places: dict[str, list[int]] = {}
        for place, (topic, _) in enumerate(made.messages):
            places.setdefault(topic, []).append(place)
        found: dict[int, Delivery] = {}
        to_send: list[ToSend] = []
        try:
            for topic, of_topic in places.items():
                records = [made.messages[place][1] for place in of_topic]
                ready = self._ready(topic)
                deliveries, batch, may_go = ready.reserve_many(self._columns(ready, records))
                found.update(zip(of_topic, deliveries, strict=True))
                if may_go:
                    to_send.append((batch, may_go))
            ours = {(batch, place) for batch, may_go in to_send for place in may_go}
            for delivery in found.values():
                if not delivery.done() and delivery.entry not in ours:
                    raise OutcomeUnknown(
                        f"{delivery.identity!r} was left in flight by a transaction that was interrupted"
                    )
                if (problem := delivery.exception()) is not None:
                    raise problem
        except BaseException:
            for batch, may_go in to_send:
                batch.topic.undo(batch, may_go)
            raise
        finally:
            made.deliveries = [found[place] for place in sorted(found)]
        return to_send

    def _hand_over_all(self, to_send: Sequence[ToSend], deadline: float) -> None:
        """Give all to the client, or none: what it was not asked to commit is never in the log."""
        try:
            self._client.begin_transaction()
            for batch, may_go in to_send:
                self._hand_over(batch, may_go, max(0.0, deadline - time.monotonic()), undoes=False)
        except BaseException as exception:
            self._is_usable = False
            self._note_fenced(error_of(exception))
            with contextlib.suppress(KafkaException):  # if it does not work now, the next client does it
                self._client.purge()
                self._client.abort_transaction(_ABORT_SECONDS)
            self._check_fenced()
            raise

    def _find_out(self, to_send: Sequence[ToSend], error: KafkaError) -> Outcome:
        """Replace the client, which ends the transaction if that is still open; then see in the topic how it ended."""
        _listen(self._client)
        self._is_usable = False
        self._note_fenced(error)
        try:
            if not self._is_fenced:  # whoever fenced us has ended it
                self._replace_client(self.find_seconds, to_send)
            verdict = self._look_for(to_send)
        except (KafkaException, ExactlyOnceError) as problem:
            logger.warning(
                "the outcome of a transaction is not known: %s", problem, extra=self._about("transaction_unknown")
            )
            return Outcome.UNKNOWN
        what = "committed" if verdict is Outcome.DELIVERED else verdict.value
        logger.warning(
            "a transaction was found %s after: %s", what, error.str(), extra=self._about("transaction_found")
        )
        return verdict

    def _look_for(self, to_send: Sequence[ToSend]) -> Outcome:
        """Look whether readers are shown a message of a transaction that has ended: it stands for all of them."""
        acknowledged = _reports([(b, [p for p in places if p not in b.errors]) for b, places in to_send])
        if not acknowledged:
            return Outcome.NOT_PERSISTED  # the client asks to commit only when all are
        # The latest message of each topic: one that has become compacted cannot tell that it was not there.
        acknowledged.sort(key=lambda message: message.offset() or 0)
        places = {str(m.topic()): (m.offset() or 0, m.partition() or 0) for m in acknowledged}
        for topic, (offset, number) in places.items():
            if offset < 0:  # the broker has told none
                continue
            starts = {**ends_of(self._kafka, topic), Partition(topic, number): offset}
            with contextlib.closing(read_tail(self._kafka, topic, starts)) as tail:
                if any((m.partition(), m.offset()) == (number, offset) for m in tail):
                    return Outcome.DELIVERED
            if (why := describe(self._kafka, topic).why_unsure()) is None:
                return Outcome.NOT_PERSISTED
            said = "%r does not show how a transaction has ended: %s"
            logger.warning(said, topic, why, extra=self._about("transaction_unknown"))
        return Outcome.UNKNOWN

    def _note_fenced(self, error: KafkaError | None) -> None:
        self._is_fenced = self._is_fenced or (error is not None and error.code() in _FENCED)

    def _check_fenced(self) -> None:
        if self._is_fenced:
            raise self._fenced("nothing was sent")

    def _fenced(self, what: str) -> ProducerFenced:
        return ProducerFenced(
            f"{what}: another producer has taken over {self._id!r}, or a transaction lasted longer than "
            "transaction.timeout.ms. Stop, or start anew"
        )

    def _about(self, action: str) -> dict[str, object]:
        return about(action) | {"producer": self.producer_name, "transactional_id": self._id}


def _reports(to_send: Sequence[ToSend]) -> list[Message]:
    return [m for batch, places in to_send for p in places if (m := batch.message(p)) is not None]


def conclude(to_send: Sequence[ToSend], verdict: Outcome, error: KafkaError | None) -> None:
    """Settle the messages of a transaction that are not settled yet."""
    problems = []
    for batch, places in to_send:
        try:
            batch.topic.conclude(batch, places, verdict, error)
        except Exception as problem:  # noqa: BLE001 - the other topics must be told, too
            problems.append(problem)
    if problems:
        raise problems[0]


def _listen(client: Producer) -> None:
    """Have the client say what it has to say; fatal errors are raised by the call that they concern, too."""
    with contextlib.suppress(KafkaException):
        client.poll(0)


class _ClientLog(logging.Handler):
    """What a client says about its connections; only its log tells that it has asked again after a lost answer."""

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        super().__init__()
        self.is_quiet = True
        self._level = int(kafka.get("log_level", 7 if "debug" in kafka else 6))
        self._id = str(kafka["transactional.id"])
        self._forward: logging.Logger = kafka.get("logger", logger)

    def settings(self) -> dict[str, Any]:
        """Return the settings that make the client tell everything here."""
        listening = logging.Logger(logger.name)  # noqa: LOG001 - not one of the tree
        listening.addHandler(self)
        return {"logger": listening, "log_level": max(6, self._level), "log.connection.close": True}

    def emit(self, record: logging.LogRecord) -> None:
        """Take note, and pass on what the user wants to read."""
        if record.levelno >= logging.INFO:
            self.is_quiet = False
        if record.levelno >= _LEVELS[min(self._level, 7)]:
            self._forward.log(
                record.levelno, "%s", record.getMessage(), extra=about("client_said") | {"transactional_id": self._id}
            )
