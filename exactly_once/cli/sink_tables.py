"""Tables of the sink command: made, extended and looked at before they are filled, at the start or for a new topic."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
from confluent_kafka import Message
from psycopg import sql
from psycopg.rows import class_row

from exactly_once.ledger.outcome import PATIENCE_SECONDS
from exactly_once.ledger.retry import waiting
from exactly_once.ledger.session import Connection
from exactly_once.ledger.sql import query
from exactly_once.writer import TableError
from exactly_once.writer.evolving import add_columns
from exactly_once.writer.table import read_table

from .problems import CommandError
from .servers import Stored
from .sink_flows import Flow, Task, with_rest
from .sink_sample import REST_COMMENT, Positions, columns_of, create_table, sample

logger = logging.getLogger(__name__)

# Seconds between looks at a topic that is empty: at first, and at most.
_WAITS = (1.0, 30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A flow whose table is as the messages need it, once the statements are executed."""

    flow: Flow
    statements: Sequence[sql.Composed] = ()
    messages: Sequence[Message] = ()


def prepare(task: Task, flow: Flow, sent: Sequence[Message] = ()) -> Flow:
    """Make or extend the table where that was asked for, and see to it that it takes what it will be given.

    ``sent`` are messages that are known already.
    """
    while True:
        with task.open() as connection:
            connection.autocommit = False
            try:
                ready = made_ready(task, flow, connection, sent=sent)
                for statement in ready.statements:
                    connection.execute(statement, prepare=False)
            except psycopg.errors.InvalidSchemaName as error:
                raise CommandError(f"{flow.table}: {error.diag.message_primary}; create the schema first") from error
            except (psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):
                connection.rollback()
                continue  # another worker has just made it; IF NOT EXISTS does not wait for that
            for statement in ready.statements:
                logger.info("%s", statement.as_string(None), extra={"action": "ddl"})
            ready.flow.sink().write(connection, [])
            _warn_of_what_is_applied(task, ready.flow, connection)
        return ready.flow


def made_ready(
    task: Task, flow: Flow, connection: Connection, *, is_dry: bool = False, sent: Sequence[Message] = ()
) -> Ready:
    """Find out what must be done to the table, or to have one.

    :raises TableError: when there is none, and none is to be made.
    """
    # A Schema Registry that is away is waited for, as the workers do.
    asking = waiting(PATIENCE_SECONDS, group_id=task.kafka["group.id"])
    try:
        table = read_table(connection, flow.table)
    except TableError as error:
        connection.rollback()
        if not (task.creates_tables or is_dry):
            raise TableError(f"{error}; --create-table makes one") from None
        messages = sample(task.kafka, flow.topics) or sent or _first_sample(task, flow, waits=not is_dry)
        columns = asking(columns_of, flow, messages, for_new_table=True)
        return Ready(flow=with_rest(flow, columns.rest), statements=create_table(flow, columns), messages=messages)
    parameters = {"name": flow.table, "comment": REST_COMMENT}
    found = connection.execute(query("find_rest_column", ""), parameters, prepare=False).fetchone()
    flow = with_rest(flow, found[0] if found else None)
    if not (task.adds_columns or is_dry):
        return Ready(flow=flow)
    messages = sample(task.kafka, flow.topics, _positions(task, connection) if task.adds_columns else None)
    wanted = asking(columns_of, flow, messages, for_new_table=False).types if task.adds_columns else {}
    return Ready(flow=flow, statements=add_columns(table, wanted), messages=messages)


def _warn_of_what_is_applied(task: Task, flow: Flow, connection: Connection) -> None:
    """Tell of a group that goes on behind messages which this table cannot have: those are in another one, or gone."""
    # A ledger that is not there, or is of another version, is what the consumer tells of.
    with contextlib.suppress(psycopg.ProgrammingError), connection.transaction():
        applied = [(p, at) for p, at in _positions(task, connection).items() if p[0] in flow.topics and at > 0]
        found = connection.execute(query("is_unwritten", ""), {"name": flow.table}, prepare=False).fetchone()
        if applied and found is not None and found[0]:
            logger.warning(
                "%s is empty, and group %s goes on behind what it applied before, whatever --start says: %s; earlier "
                "messages do not come again. To copy them, too, say another --group-id, or `exactly-once reset`",
                flow.table,
                task.kafka["group.id"],
                ", ".join(f"{topic}[{number}] from offset {at}" for (topic, number), at in applied),
                extra={"action": "applied_before", "group": task.kafka["group.id"]},
            )


def _positions(task: Task, connection: Connection) -> Positions:
    """Return where the group stands."""
    with connection.cursor(row_factory=class_row(Stored)) as cursor:
        cursor.execute(query("status", task.schema), {"group_id": task.kafka["group.id"]}, prepare=False)
        return {(row.topic, row.partition): row.next_offset or 0 for row in cursor}


def _first_sample(task: Task, flow: Flow, *, waits: bool) -> Sequence[Message]:
    """Wait for a first message of topics that are to become a table; a service may begin before its producer.

    :raises CommandError: when it is not to be waited for.
    """
    waited, pause = 0.0, _WAITS[0]
    messages: Sequence[Message] = ()
    while not messages and flow.format != "raw":
        topics = ", ".join(flow.topics)
        if not waits or task.run.until_end:
            raise CommandError(
                f"{topics} holds no messages to learn columns from; make the table {flow.table} yourself"
            )
        logger.info("waiting for a first message of %s, to learn columns from: %.0f s", topics, waited)
        time.sleep(pause)
        waited, pause = waited + pause, min(2 * pause, _WAITS[1])
        messages = sample(task.kafka, flow.topics)
    return messages
