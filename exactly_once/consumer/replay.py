"""Replay: calls a handler with dead letters, each in one transaction with its mark.

The mark is set first, so it is as durable as whatever else that transaction leaves behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

import psycopg

from exactly_once._log import about, text_of
from exactly_once._model import Advance, Partition
from exactly_once.errors import HandlerCommitted
from exactly_once.ledger.dead_letters import DeadLetter, settle
from exactly_once.ledger.outcome import TRIES, Fault, classify, is_by_statement, may_be_data, own_error
from exactly_once.ledger.retry import trying
from exactly_once.ledger.rows import Ledger
from exactly_once.ledger.session import Connection, Session
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from exactly_once.ledger.transaction import UnitOfWork

from .unit import EndsUnits, Unit, apply

logger = logging.getLogger(__name__)

_NOBODY = UUID(int=0)  # the token of an advance that moves no row


class AlreadySettled(Exception):
    """Another transaction replayed or dropped the dead letter first."""


class DeadAgain(Exception):
    """A handler made the message of a dead letter one once more: nothing of that is stored, and the letter stays."""


class ReplayStopped(Exception):
    """A replay failed by what is not the message's, as the cause says: letters behind it must not be applied before it.

    What was sent with a COMMIT that got no answer may be durable; the letter's status tells when the server is back.
    """


class Replay:
    """Replays dead letters one by one on a connection of its own."""

    def __init__(self, connect: Callable[[], Connection], *, schema: str, isolation: str = "READ COMMITTED") -> None:
        self._session = Session(connect, schema=schema, owns_rows=False)
        self._isolation = isolation

    def close(self) -> None:
        """Close the connection."""
        self._session.close()

    def replay(self, letter: DeadLetter, handler: Callable[[Unit], object]) -> bool:
        """Call the handler with one message and mark the letter as replayed; both are durable, or nothing is.

        Return False when the letter was settled by somebody else meanwhile. What the handler raises propagates
        and leaves the letter dead. A conflict with another transaction is tried again, five times in all.

        :raises HandlerCommitted: when the handler committed by itself; the letter is marked then.
        :raises DeadAgain: when the handler made the message a dead letter.
        :raises ReplayStopped: when the server or the connection is at fault.
        """
        return trying(TRIES, _is_conflict, group_id=letter.group_id)(self._replay, letter, handler)

    def _replay(self, letter: DeadLetter, handler: Callable[[Unit], object]) -> bool:
        ledger = Ledger(self._session, group_id=letter.group_id, owner_kind="consumer")
        work = UnitOfWork(ledger, isolation=self._isolation)
        # Names the message's partition to the unit; nothing of the ledger moves.
        advance = Advance(
            partition=Partition(letter.topic, letter.partition),
            token=_NOBODY,
            epoch=0,
            topic_id=letter.topic_id,
            cluster_id=letter.cluster_id,
            expected=letter.message_offset,
            next_offset=letter.message_offset + 1,
            leader_epoch=letter.leader_epoch,
        )
        # Workers may wait for a row of the handler's, and must not take a slow one for a frozen process.
        terminator = StaleBackendTerminator(
            self._session.connect,
            schema=self._session.schema,
            group_id=letter.group_id,
            instance=self._session.instance,
        )
        commits = _Commits(letter, work, terminator)
        unit = Unit(
            [letter.message()],
            [advance],
            attempt=letter.attempts + 1,
            work=work,
            commits=commits,
        )
        try:
            apply(handler, unit)
        except AlreadySettled:
            return False
        except ReplayStopped:
            raise
        except Exception as error:
            if own_error(error) is None and commits.is_nobodys(error):
                raise ReplayStopped(text_of(error)) from error
            raise
        finally:
            terminator.close()
        return True


def _is_conflict(error: BaseException) -> bool:
    return isinstance(error, ReplayStopped) and classify(error, connection_lost=False) is Fault.CONFLICT


@dataclass
class _Commits(EndsUnits):
    """Begins, commits and undoes the unit of one dead letter."""

    letter: DeadLetter
    work: UnitOfWork
    terminator: StaleBackendTerminator
    is_begun: bool = False  # before it is, the handler was not called
    is_lost: bool = False  # whether the connection was gone when the handler or COMMIT failed

    def is_nobodys(self, error: BaseException) -> bool:
        """Tell whether an error is none of the message's, as the consumer does for a unit of one message."""
        if not self.is_begun:
            return isinstance(error, psycopg.Error)
        fault = classify(error, connection_lost=self.is_lost)
        if fault is Fault.ENVIRONMENT:
            return not is_by_statement(error, connection_lost=self.is_lost)
        return fault in (Fault.CONFLICT, Fault.DURATION) or (fault is Fault.OTHER and not may_be_data(error))

    def begin(self, unit: Unit) -> None:
        try:
            self.work.begin()
            assert self.work.begun is not None
            self.terminator.watch(self.work.begun.pid, connection=self.work.connection)
            found = settle(self.work.connection, self.letter.id, "replayed", schema=self.work.schema)
        except BaseException:
            self.work.roll_back()
            raise
        if found is None:
            self.work.roll_back()
            raise AlreadySettled
        self.is_begun = True

    def finish(self, unit: Unit) -> None:
        if not (unit.is_touched or unit.is_connection_used):
            extra = about("unit_unused", group=self.letter.group_id)
            text = "the handler did not use its unit for dead letter %s: effects elsewhere are not in its transaction"
            logger.warning(text, self.letter.id, extra=extra)
        if unit.is_claim_refused:
            extra = about("claimed_before", group=self.letter.group_id)
            text = (
                "a key that the handler claims for dead letter %s (%s) is claimed already, by another message or by "
                "the unit that made the dead letter; if the handler skips it therefore, it takes no effect"
            )
            logger.warning(text, self.letter.id, self.letter.place, extra=extra)
        try:
            if unit.letters:
                raise DeadAgain("the handler made the message a dead letter again")
            self.work.commit([])
        except BaseException as error:
            if self.work.is_unknown:
                self.work.roll_back()  # an interruption may have left the answer on the wire
                if self._outcome() == "committed":
                    if isinstance(error, Exception):
                        return
                    raise
            self.abandon(unit, error)
            raise

    def abandon(self, unit: Unit, error: BaseException) -> None:
        self.is_lost = self.work.is_lost
        self.work.is_shared |= unit.is_lent
        self.work.roll_back()
        if not self.work.is_unknown and self._outcome() == "committed":
            raise HandlerCommitted(
                f"the handler committed by itself while dead letter {self.letter.id} ({self.letter.place}) was "
                "replayed; the letter is marked as replayed. Take COMMIT out of the handler, and see what of its "
                "effects is there"
            ) from error

    def _outcome(self) -> str:
        try:
            return self.work.outcome()
        except psycopg.Error as error:
            raise ReplayStopped(f"what became of it is not known: {text_of(error)}") from error
