"""Service: what ``run`` adds to the loop: retries, poison, and an orderly end on signals."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal

from confluent_kafka import Message

from exactly_once._log import about, named, text_of
from exactly_once._model import Partition
from exactly_once.errors import PoisonMessage, Redelivered, TransactionAborted
from exactly_once.ledger.dead_letters import DeadLetterLimit, enforce
from exactly_once.ledger.outcome import (
    IN_FAILED_TRANSACTION,
    Fault,
    attribute_of,
    may_be_data,
    own_error,
    sqlstate_of,
)
from exactly_once.ledger.retry import Stop

from .bisection import Bisection
from .unit import Unit, apply, call, refuse_undone
from .units import Units

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HOW_ON = 'on_poison="dead-letter" stores such messages as dead letters'
_SWALLOWED = "it cannot be stored as a dead letter, because a SQL error was swallowed and its cause is unknown"


# What becomes of a message that cannot be applied. A callable is called in the transaction that skips it.
OnPoison = Literal["stop", "dead-letter"] | Callable[[Unit, Message, Exception], object]


@dataclass(slots=True)
class _Suspect:
    """A message that failed alone."""

    partition: Partition
    offset: int
    tries: int = 0
    """How often it was tried alone, for whatever reason it failed."""
    failures: int = 0
    """How often of these the handler or the message was at fault."""
    poison: Exception | None = None
    """What it is to become a dead letter for, once that is decided."""
    is_stored: bool = False
    """Whether its unit has made it one: a callable may have done something else with it."""

    @property
    def place(self) -> str:
        return f"{self.partition} offset {self.offset}"

    def is_in(self, unit: Unit, at: int = 0) -> bool:
        return _place_of(unit, at) == (self.partition, self.offset)


@dataclass(slots=True, kw_only=True)
class Service:
    """Calls the handler unit by unit; tries again what is nobody's fault, and stores poison as dead letters."""

    units: Units
    handler: Callable[[Unit], object]
    retrying: Callable[[Callable[[], bool]], bool]
    stopping: Stop
    on_poison: OnPoison
    attempts: int
    limit: DeadLetterLimit

    _bisection: Bisection = field(default_factory=Bisection, init=False)
    _suspect: _Suspect | None = field(default=None, init=False)
    # Messages that failed alone by what any other message may meet as well, in their order.
    _doubts: list[_Suspect] = field(default_factory=list, init=False)
    # Up to where the batch goes that is searched for its poison.
    _searched: dict[Partition, int] = field(default_factory=dict, init=False)
    # Whether the handler could apply a part of it.
    _has_committed: bool = field(default=False, init=False)
    # How many messages of it became dead letters.
    _found: int = field(default=0, init=False)
    # The message that the last error named, until it was tried alone.
    _named: tuple[Partition, int] | None = field(default=None, init=False)

    def run(self) -> None:
        """Serve until the iteration ends."""
        try:
            while self.retrying(self._one):
                pass
        except Redelivered:
            # Stopped while waiting for a server: nothing was stored, the next owner goes on from there.
            if not self.stopping.is_set:
                raise

    def _one(self) -> bool:
        """Serve one unit; return whether there was one."""
        self.units.max_messages = len(self._doubts) + 1 if self._doubts else self._bisection.max_messages
        unit = next(self.units, None)
        if unit is None:
            return False
        suspect = self._suspect
        if not all(doubt.is_in(unit, at) for at, doubt in enumerate(self._doubts[: len(unit.sent)])):
            # The partition of one of them was taken: what comes in its place was not tried alone, and what is ours only
            # now begins a search of its own.
            self._doubts = []
        if self._doubts:
            if not self._decide(unit):
                return True
        elif suspect is not None and suspect.poison is not None and len(unit.sent) == 1 and suspect.is_in(unit):
            with unit:
                self._dispose(unit, unit.sent.messages, [suspect])
            self._log_found(unit, suspect)
        elif self._apply(unit):
            self._has_committed = True
        else:
            return True
        self._suspect, self._doubts = None, []
        self._bisection.committed(len(unit.sent))
        if self._searched and self._is_searched(unit):
            for advance in unit.advances:
                if advance.next_offset == self._searched[advance.partition]:
                    del self._searched[advance.partition]
            if not self._searched:
                # What was found has been told by name already.
                level, found = (logging.INFO, self._found) if self._found else (logging.WARNING, "none")
                extra = about("poison_search_ended", group=unit.work.group_id, several=unit.advances)
                text = "the search is over: %s of the messages failed alone, the others were applied; the last unit: %r"
                logger.log(level, text, found, unit, extra=extra)
        return True

    def _apply(self, unit: Unit) -> bool:
        """Call the handler; return False when its messages are to be tried in smaller units, or are dead letters.

        :raises Redelivered: when a message that failed alone is to be tried again after a wait.
        :raises PoisonMessage: when it stops the service.
        """
        try:
            apply(self.handler, unit)
        except Exception as error:
            is_alone = len(unit.sent) == 1  # whatever the handler has left in ``unit.messages``
            if is_alone:
                suspect = self._tried(unit)
            # Where others of the same batch were applied, it was not a table or a grant that is missing.
            has_committed = self._has_committed and self._is_searched(unit)
            is_data = _is_doubtful(unit, error) and (not is_alone or has_committed)
            is_doubtful = is_alone and not is_data and _is_doubtful(unit, error) and self.on_poison != "stop"
            if not (unit.fault is Fault.HANDLER or is_data or is_doubtful):
                if is_alone and _is_doubtful(unit, error):
                    # Nobody can tell whether it is the message's, but whoever mends it must know which one it was.
                    extra = about("stopped_at", group=unit.work.group_id, partition=suspect.partition)
                    logger.error("%s fails alone, too: %s", suspect.place, text_of(error), extra=extra)
                raise
            # How many messages come before the one that the error names, if it does.
            said = [attribute_of(error, name) for name in ("topic", "partition", "offset")]
            place = tuple(value if isinstance(value, str | int) else None for value in said)
            places = [(m.topic(), m.partition(), m.offset()) for m in unit.sent.messages]
            if place in places and not is_alone:
                before = places.index(place)
                self._bisection.named(len(unit.sent), before)
                self._named = _place_of(unit, before)
                return False
            if not is_alone and not self._is_searched(unit):
                self._searched = {advance.partition: advance.next_offset for advance in unit.advances}
                self._found, self._has_committed = 0, False
                extra = about("poison_sought", group=unit.work.group_id, several=unit.advances)
                text = "%s; looking for the message in smaller units than %r"
                logger.warning(text, named(error), unit, extra=extra)
            self._bisection.failed(len(unit.sent))
            if is_doubtful:
                suspect.poison = error
                self._doubt(unit, [suspect])
            elif is_alone:
                suspect.failures += 1
                self._refuse(suspect, error)
                suspect.poison = error
            return False
        if self._named is not None and _place_of(unit) == self._named:
            extra = about("named_and_applied", group=unit.work.group_id, several=unit.advances)
            logger.warning("an error named %s offset %s, which was applied all the same", *self._named, extra=extra)
            self._named = None
        return True

    def _tried(self, unit: Unit, at: int = 0) -> _Suspect:
        """Count a try of the message there, be it the suspect of before or another one."""
        if self._suspect is None or not self._suspect.is_in(unit, at):
            self._suspect = _Suspect(*_place_of(unit, at))
        self._suspect.tries += 1
        return self._suspect

    def _refuse(self, suspect: _Suspect, error: Exception) -> None:
        """Return if a message that the handler has failed with alone is to become a dead letter.

        :raises Redelivered: when it is to be tried again.
        :raises PoisonMessage: when it stops the service.
        """
        told = f"{suspect.place}: {named(error)}"
        if suspect.failures < self.attempts:
            raise Redelivered(f"{told} (attempt {suspect.failures} of {self.attempts})") from error
        # Such an error only says that an earlier one was swallowed.
        is_consequence = isinstance(error, TransactionAborted) or sqlstate_of(error) == IN_FAILED_TRANSACTION
        why = _SWALLOWED if is_consequence else _HOW_ON if self.on_poison == "stop" else None
        if why is not None:
            before = "Everything before it is committed"
            if self._doubts:
                before = f"Everything before {self._doubts[0].place} is committed, which failed alone, too"
            raise PoisonMessage(
                f"{told}. {before}; {why}",
                topic=suspect.partition.topic,
                partition=suspect.partition.number,
                offset=suspect.offset,
            ) from error

    def _is_searched(self, unit: Unit) -> bool:
        """Tell whether a unit is a part of the batch that is searched."""
        return all(a.next_offset <= self._searched.get(a.partition, -1) for a in unit.advances)

    def _decide(self, unit: Unit) -> bool:
        """Dead-letter doubtful messages together with the next one, which is applied: so nothing was missing for all.

        Return False when the next one fails, too.

        :raises Exception: the first error, when too many are, or when there is no other message to compare them with.
        """
        doubts, error = self._doubts, self._doubts[0].poison
        assert error is not None
        if len(unit.sent) <= len(doubts) or len(doubts) > self.limit.in_a_row:
            with unit:  # else nobody could iterate on: it was handed out, and would not have come to an end
                raise error
        aside, other = unit.sent.messages[: len(doubts)], unit.sent.messages[len(doubts)]
        is_tried = False
        try:
            with unit:
                self._dispose(unit, aside, doubts)
                unit.messages, unit.given = (other,), 1
                is_tried = True
                call(self.handler, unit)
        except Exception as another:
            # What on_poison raises says nothing about the message that the handler was to be called with.
            if not is_tried or not (unit.fault is Fault.HANDLER or _is_doubtful(unit, another)):
                raise
            suspect = self._tried(unit, len(doubts))
            if unit.fault is Fault.HANDLER:
                suspect.failures += 1
                self._refuse(suspect, another)
            suspect.poison = another
            self._doubt(unit, [*doubts, suspect])
            return False
        self._has_committed = True
        for suspect in doubts:
            self._log_found(unit, suspect)
        return True

    def _doubt(self, unit: Unit, doubts: list[_Suspect]) -> None:
        """Keep messages for :meth:`_decide`; their number is logged each time that it has doubled."""
        self._doubts, last = doubts, doubts[-1]
        if len(doubts) & (len(doubts) - 1) == 0:
            extra = about("poison_doubted", group=unit.work.group_id, partition=last.partition, offset=last.offset)
            text = "%s fails alone, as %s before it, by what others may meet as well: %s; the next one is tried"
            logger.warning(text, last.place, len(doubts) - 1, named(last.poison), extra=extra)

    def _dispose(self, unit: Unit, messages: Sequence[Message], suspects: Sequence[_Suspect]) -> None:
        """Do in the open unit what is to be done with poisonous messages."""
        work, stored = unit.work, dict[Partition, Message]()
        for message, suspect in zip(messages, suspects, strict=True):
            error = suspect.poison
            assert error is not None
            unit.tries_alone = suspect.tries
            before = len(unit.letters)
            if callable(self.on_poison):
                refuse_undone(self.on_poison(unit, message, error), "on_poison")
            else:
                unit.dead_letter(message, error)
            suspect.is_stored = len(unit.letters) > before or not callable(self.on_poison)
            if len(unit.letters) > before:
                stored[suspect.partition] = message
        unit.tries_alone = None
        # The last of each partition has the most behind it: a count for each would take the square of the time.
        for message in stored.values():
            enforce(self.limit, work.connection, message, schema=work.schema, group_id=work.group_id)

    def _log_found(self, unit: Unit, suspect: _Suspect) -> None:
        """Log what was skipped without a dead letter; those that were stored are logged when they have committed."""
        self._found += 1
        self._named = None
        if suspect.is_stored:
            return
        epochs = {advance.partition: advance.epoch for advance in unit.advances}
        extra = about(
            "set_aside",
            group=unit.work.group_id,
            partition=suspect.partition,
            offset=suspect.offset,
            owner_epoch=epochs[suspect.partition],
        )
        told = "%s was skipped by on_poison, without a new dead letter: %s"
        logger.error(told, suspect.place, named(suspect.poison), extra=extra)


class _Stopped(BaseException):
    """Becomes SystemExit, at which psycopg would ask the server for 10 seconds to cancel a statement."""


@contextlib.contextmanager
def stopping_on_signals(stop: Callable[[], None], stop_seconds: float) -> Iterator[list[int]]:
    """Stop on the first SIGTERM or SIGINT; raise SystemExit after ``stop_seconds`` or on the second.

    Yields the list of the signals that came.

    Wherever the second finds the loop: what waits for a server that stands still would wait for ever, and everything
    is made to be interrupted between any two lines.

    Does nothing outside of the main thread, where Python allows no signal handlers.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    alarms: list[threading.Timer] = []
    process = os.getpid()
    is_over = False  # from there on signals are only noted

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            # A child that the handler has forked, a worker of a pool say: it ends as it would without us.
            signal.signal(number, before[signal.Signals(number)] or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        received.append(number)
        if is_over:
            return
        if len(received) == 1:
            stop()
            name = signal.Signals(number).name
            text = "%s: stopping after the unit in hand, for which at most %g s are waited"
            logger.info(text, name, stop_seconds, extra=about("stopping"))
            alarm = threading.Timer(stop_seconds, signal.pthread_kill, [threading.get_ident(), number])
            alarm.daemon = True
            alarms.append(alarm)  # before it starts: the second signal may come at any line
            alarm.start()
        else:
            for alarm in alarms:
                alarm.cancel()  # what is undone now is not to be interrupted by the clock, too
            raise _Stopped

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        with contextlib.suppress(_Stopped):
            yield received
    finally:
        is_over = True
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None is one of what embeds Python
        for alarm in alarms:
            alarm.cancel()
    # Also where the driver has made another error of it, which is waited for or ends the service as a stop does.
    if len(received) > 1:
        raise SystemExit(128 + received[0])


def _is_doubtful(unit: Unit, error: Exception) -> bool:
    """Tell whether an error may be one message's own, or one that every message meets."""
    return unit.fault is Fault.OTHER and may_be_data(error) and own_error(error) is None


def _place_of(unit: Unit, index: int = 0) -> tuple[Partition, int]:
    """Name the first message of a unit, or another, as the broker sent it: a handler may have changed its topic."""
    message = unit.sent.of(unit.sent.messages[index])
    return Partition.of(message), message.offset() or 0
