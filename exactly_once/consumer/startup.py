"""Start-up: the first contact with both servers, waited for, logged, and given up in time."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from confluent_kafka import Consumer

from exactly_once._log import about
from exactly_once.errors import DatabaseUnreachable, ReadOnly, UnknownTopic
from exactly_once.kafka.admin import Cluster
from exactly_once.ledger import migrate as schemas
from exactly_once.ledger.commands import grants_hint
from exactly_once.ledger.retry import at_start
from exactly_once.ledger.rows import Ledger
from exactly_once.ledger.session import Session, address, execute, last_row
from exactly_once.ledger.stale_owners import StaleBackendTerminator
from exactly_once.ledger.store import LedgerStore

from .client import Closing
from .options import Options
from .rebalance import Assignment

logger = logging.getLogger(__name__)

# How long brokers may take to learn of a new topic; seconds, where a cluster is busy.
_LAGGING_SECONDS = 3.0
# Between two questions for a topic that may be new.
_AGAIN_SECONDS = 0.1
# How long a member that cannot write keeps its partitions. A failover is over by then, as a rule; where this one was
# sent to a standby by mistake, a healthy member may be waiting for them.
LEAVE_SECONDS = 120.0


def check_database(session: Session, options: Options) -> None:
    """Connect, bring the schema up to date if that was asked for, and check it; a connection may be lost at any of it.

    :raises DatabaseUnreachable: after ``startup_seconds``, or at once for what waiting does not mend.
    :raises ReadOnly: when the server still takes no writes after ``startup_seconds``.
    :raises SchemaTooOld: or :raises SchemaTooNew: when this release cannot work with it.
    """

    def look() -> None:
        session.roll_back()  # an interruption of an earlier start may have left a statement
        connection = session.connection
        refuse_read_only(session)
        if options.migrate:
            schemas.migrate(connection, options.schema)
        schemas.check(connection, options.schema)

    try:
        with explaining(session):
            at_start(
                look, seconds=options.startup_seconds, what=f"Postgres at {options.database}", group_id=options.group_id
            )
    except psycopg.OperationalError as error:
        reason = " ".join(str(error).split())
        raise DatabaseUnreachable(f"no connection to Postgres at {options.database}: {reason}") from error


@contextlib.contextmanager
def explaining(session: Session) -> Iterator[None]:
    """Say of what the server refuses in the block, which holds statements of the library only, what mends it.

    :raises SchemaTooOld: where the schema is gone since the start.
    """
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        error.add_note(
            "the role of the connection lacks grants, or a policy of row-level security keeps it out. "
            f"{grants_hint(session.schema)}"
        )
        raise
    except psycopg.Error as error:
        schemas.refuse_lost(session, error)
        raise


def check_topics_exist(cluster: Cluster, topics: Sequence[str], options: Options) -> None:
    """Learn the cluster's id and look whether the topics are there.

    :raises BrokerUnreachable: after ``startup_seconds``.
    :raises UnknownTopic: unless ``wait_for_topics`` was given.
    """
    unknown: str | None = None

    def look() -> None:
        nonlocal unknown
        cluster.identify()
        deadline = time.monotonic() + min(options.startup_seconds, _LAGGING_SECONDS)
        while not options.wait_for_topics:
            try:
                cluster.describe(topics)
                return
            except UnknownTopic as error:
                # The broker that answers may be behind the one that has made the topic a moment ago.
                unknown = str(error)
                if time.monotonic() >= deadline:
                    raise UnknownTopic(f"{error}, or pass wait_for_topics=True") from error
            time.sleep(_AGAIN_SECONDS)

    at_start(
        look,
        seconds=options.startup_seconds,
        what=f"Kafka at {cluster.servers}",
        group_id=options.group_id,
        reason=lambda: unknown or cluster.reason(),
    )


def refuse_read_only(session: Session) -> None:
    """Look whether the server takes writes; if not, the next connection may lead to one that does.

    :raises ReadOnly: naming host and port.
    """
    connection = session.connection
    (is_read_only,) = last_row(execute(connection, session.schema, "is_read_only"))
    if is_read_only:
        place = address(connection)
        session.discard()
        raise ReadOnly(
            f"Postgres at {place} takes no writes: it is a standby, or default_transaction_read_only is on. Name the "
            "primary, and add target_session_attrs=read-write to the connection string, which finds it among several"
        )


@dataclass(slots=True)
class ReadOnlyGuard:
    """Asks the server whether it takes writes once it has refused one, until it does."""

    session: Session
    assignment: Assignment
    group_id: str
    _since: float | None = field(default=None, init=False)
    _has_left: bool = field(default=False, init=False)

    def met(self, client: Consumer) -> None:
        """Take note that the server has refused to write.

        :raises ReadOnly: naming it, unless it takes writes by now.
        """
        self._since = self._since or time.monotonic()
        self.check(client)

    def check(self, client: Consumer) -> None:
        """Let the loop go on only where it can write.

        :raises ReadOnly: else. After :data:`LEAVE_SECONDS` of that the group has been left.
        """
        if self._since is None:
            return
        extra = about("read_only", group=self.group_id)
        if not self._has_left and time.monotonic() - self._since > LEAVE_SECONDS:
            self._has_left = True
            logger.warning("the database takes no writes: leaving the group until it does", extra=extra)
            client.unsubscribe()
        refuse_read_only(self.session)
        if self._has_left:
            logger.warning("the database takes writes again: joining the group", extra=extra)
            self.assignment.join(client)  # first: whoever is interrupted between two lines joins twice, and never not
            self._has_left = False
        self._since = None


@dataclass(frozen=True, slots=True)
class Servers:
    """What a consumer reaches servers by; the simulator of the tests puts its own in place of each."""

    session: Callable[..., Session] = Session
    ledger: Callable[..., LedgerStore] = Ledger
    terminator: Callable[..., StaleBackendTerminator] = StaleBackendTerminator
    cluster: Callable[..., Cluster] = Cluster
    client: Callable[[dict[str, Any]], Consumer] = Consumer
    closing: Callable[[Consumer], Closing] = Closing
    check_database: Callable[[Session, Options], None] = check_database
    check_topics_exist: Callable[[Cluster, Sequence[str], Options], None] = check_topics_exist
