"""Tables of the sink command: made and extended by a sample of a topic, and looked at before they are filled."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import psycopg
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from psycopg import sql
from psycopg.rows import class_row

from exactly_once._model import Partition
from exactly_once.kafka.admin import Cluster
from exactly_once.kafka.log import kafka_logger
from exactly_once.kafka.settings import admin_settings
from exactly_once.ledger.commands import command
from exactly_once.ledger.outcome import PATIENCE_SECONDS
from exactly_once.ledger.retry import waiting
from exactly_once.ledger.session import Connection, cursor_on
from exactly_once.ledger.sql import query
from exactly_once.writer import BadRow, TableError, ddl
from exactly_once.writer.errors import NAME_BYTES, TableMissing, cut, place_of, way_on
from exactly_once.writer.evolving import type_of, types_in, wider
from exactly_once.writer.formats import hint_for
from exactly_once.writer.from_json import JsonDecoder, path_of, paths_of
from exactly_once.writer.json_shape import BYTE_ORDER_MARK, UNAVAILABLE, Path, Raw, Shape, fields_in, refuse_malformed
from exactly_once.writer.logical import in_key, types_in_key
from exactly_once.writer.table import Table, read_table

from .problems import CommandError
from .servers import Stored, naming_blockers
from .sink_flows import Flow, Task, with_rest

logger = logging.getLogger(__name__)

# Messages of each end of each partition: enough to meet what most messages have, and read in a second.
SAMPLE = 100
# Tells later runs which column it is.
REST_COMMENT = "exactly-once sink: the fields that have no column of their own"
Positions = Mapping[Partition, int]

_WAIT_SECONDS = 10.0
_METADATA_TYPES = {
    "topic": "text",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamptz",
    "key": "bytea",
    "headers": "jsonb",
}


class NoColumns(CommandError):
    """No message of a topic shows yet what columns its table is to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A flow whose table is as the messages need it, once the statements are executed."""

    flow: Flow
    statements: Sequence[sql.Composed] = ()
    columns: Collection[str] = ()
    """Those that the statements make, by their names."""
    messages: Sequence[Message] = ()

    def make(self, connection: Connection) -> None:
        """Execute the statements.

        :raises CommandError: for a column whose name the database's encoding cannot hold, or that the table cannot get.
        """
        for statement in self.statements:
            try:
                connection.execute(statement, prepare=False)
            except psycopg.errors.WrongObjectType as error:
                raise CommandError(ddl.elsewhere(self.flow.table, self.columns, error)) from error
            except psycopg.errors.UntranslatableCharacter as error:
                names = ", ".join(map(cut, ddl.unencodable(error, self.columns))) or "them"
                raise CommandError(
                    f"{self.flow.table}: no column of this database can have the name of {names} "
                    f"({error.diag.message_primary}): say --drop, or --rename COLUMN=PATH"
                ) from error


@contextlib.contextmanager
def opened(task: Task) -> Iterator[Connection]:
    """Open a connection whose transaction says for whom it waits: a table may be locked by another session."""
    with task.settings.opener()() as connection, naming_blockers(task.settings, connection, task.kafka["group.id"]):
        connection.autocommit = False
        yield connection


def prepare(task: Task, flow: Flow, sent: Sequence[Message] = ()) -> Flow:
    """Make or extend the table where that was asked for, and see to it that it takes what it will be given.

    ``sent`` are messages that are known already.

    :raises NoColumns: where there is no table, and nothing to make it from.
    """
    while True:
        with opened(task) as connection:
            try:
                ready = made_ready(task, flow, connection, sent=sent)
                ready.make(connection)
            except psycopg.errors.InvalidSchemaName as error:
                raise CommandError(f"{flow.table}: {error.diag.message_primary}; create the schema first") from error
            except psycopg.errors.TooManyColumns as error:
                topics = ", ".join(flow.topics)
                raise CommandError(
                    f"{flow.table}: the sample of {topics} asks for too many columns ({error.diag.message_primary}): "
                    "say which fields with --field, or drop some with --drop; other fields go to the column rest"
                ) from error
            except (psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):
                connection.rollback()
                continue  # another worker has just made it; IF NOT EXISTS does not wait for that
            ready.flow.sink().write(connection, [])
            # Of a group that goes on behind messages which this table cannot have: those are in another one, or gone.
            # A ledger that is not there, or is of another version, is what the consumer tells of.
            with contextlib.suppress(psycopg.ProgrammingError), connection.transaction():
                positions, name = _positions(task, connection).items(), {"name": flow.table}
                applied = [(place, at) for place, at in positions if place.topic in flow.topics and at > 0]
                found = cursor_on(connection).execute(query("is_unwritten", ""), name, prepare=False).fetchone()
                if applied and found is not None and found[0]:
                    group, schema = task.kafka["group.id"], task.settings.schema
                    logger.warning(
                        "%s is empty, and group %s goes on behind what it applied before, whatever --start says: %s; "
                        "earlier messages do not come again. To copy them, too, say another --group-id, or %s",
                        flow.table,
                        group,
                        ", ".join(f"{place} from offset {at}" for place, at in applied),
                        "; ".join(command("reset", group, schema, "--topic", topic) for topic in flow.topics),
                        extra={"action": "applied_before", "group": group},
                    )
        for statement in ready.statements:
            logger.info("%s", statement.as_string(None), extra={"action": "ddl"})
        return ready.flow


def made_ready(
    task: Task, flow: Flow, connection: Connection, *, is_dry: bool = False, sent: Sequence[Message] = ()
) -> Ready:
    """Find out what must be done to the table, or to have one.

    :raises TableError: when there is none, and none is to be made.
    :raises NoColumns: where there is nothing to make it from.
    """
    # A Schema Registry that is away is waited for, as the workers do.
    asking = waiting(PATIENCE_SECONDS, group_id=task.kafka["group.id"])
    try:
        table = read_table(connection, flow.table)
    except TableMissing as error:
        connection.rollback()
        if not (task.creates_tables or is_dry):
            raise TableError(f"{error}; --create-table makes one") from None
        if flow.format == "csv" and flow.csv_columns is None:
            raise CommandError("lines of CSV name no columns: say --csv-columns, or make the table yourself") from None
        # What was fetched already is looked at first: a sample costs a client, and tombstones may be many.
        is_shown = not sent or asking(columns_of, flow, sent, for_new_table=True).are_known
        messages = [*sample(task.kafka, flow.topics), *sent] if is_shown else sent
        columns = asking(columns_of, flow, messages, for_new_table=True)
        if not columns.are_known:
            topics = ", ".join(flow.topics)
            what = f"{topics} holds no messages to learn columns from"
            if messages:
                what = f"none of {len(messages)} messages in the sample of {topics} makes a row to learn columns from"
            raise NoColumns(f"{what}; make the table {flow.table} yourself") from None
        made = create_table(flow, columns)
        flow = with_rest(flow, columns.rest)
        return Ready(flow=flow, statements=made, columns=columns.types, messages=messages)
    parameters = {"name": flow.table, "comment": REST_COMMENT}
    found = cursor_on(connection).execute(query("find_rest_column", ""), parameters, prepare=False).fetchone()
    flow = with_rest(flow, found[0] if found else None)
    # It is not altered to what the options say of one that is made.
    if flow.mode == "append" and flow.key and set(flow.key) not in map(set, table.keys):
        text = "%s is there, and has no unique index over %s: in mode append key is for a table that is made"
        logger.warning(text, table, ", ".join(flow.key), extra={"action": "key_ignored", "table": flow.table})
    for column in (column for column in table.columns if column.name in flow.types):
        given = flow.types[column.name]
        names = query("name_types", "", one=sql.SQL(given), other=sql.SQL(column.type_name))
        # More than a name, such as serial or text NOT NULL, says how a column is made, and is compared with nothing.
        with contextlib.suppress(psycopg.ProgrammingError), connection.transaction():
            one, other = (each.type_display for each in connection.execute(names, prepare=False).description or ())
            if one != other:
                text = "%s is there, and its column %s is %s, not %s: types are for columns that are made"
                extra = {"action": "type_ignored", "table": flow.table}
                logger.warning(text, table, column.name, column.type_name, given, extra=extra)
    if not (task.adds_columns or is_dry):
        return Ready(flow=flow)
    messages = sample(task.kafka, flow.topics, _positions(task, connection) if task.adds_columns else None)
    wanted = asking(columns_of, flow, messages, for_new_table=False).types if task.adds_columns else {}
    return Ready(flow=flow, statements=ddl.add_columns(table, wanted), columns=wanted, messages=messages)


def check_without_table(flow: Flow, messages: Sequence[Message]) -> None:
    """See to it that messages of which no row can be made are nothing to a table that is not there.

    :raises BadRow: for one that the table's decoder would refuse, such as a tombstone where rows are only appended.
    """
    nothing: Any = {name: {} for name in ("rename", "metadata", "constants", "epoch", "decimal", "binary")}
    decoder = replace(flow, fields=None, rest=None, json_text=(), **nothing).decoder()
    decoder.prepare(Table(schema="", name=flow.table, columns=()), mode=flow.mode, key=())
    list(decoder.decode(messages))


def _positions(task: Task, connection: Connection) -> Positions:
    """Return where the group stands."""
    with cursor_on(connection, class_row(Stored)) as cursor:
        # Binary, as no style of dates of the database is to be minded then.
        asked = query("status", task.settings.schema), {"group_id": task.kafka["group.id"]}
        cursor.execute(*asked, prepare=False, binary=True)
        return {row.place: row.next_offset or 0 for row in cursor}


def sample(kafka: Mapping[str, Any], topics: Sequence[str], positions: Positions | None = None) -> list[Message]:
    """Read the first and the last messages of each partition, without being a member of any group.

    With ``positions`` the first ones are those from there on.

    :raises UnknownTopic: for a topic that is not there.
    :raises BrokerUnreachable: when no broker answers.
    """
    with Cluster(admin_settings(kafka)) as cluster:
        found = cluster.describe(topics)
        logs = cluster.ranges(Partition(name, n) for name, topic in found.items() for n in range(topic.partitions))
    settings = {key: value for key, value in kafka.items() if key != "group.instance.id"}
    settings |= {"enable.auto.commit": False, "enable.partition.eof": True, "auto.offset.reset": "earliest"}
    client = Consumer({**settings, "logger": kafka_logger()})
    try:
        starts = {place: max(start, (positions or {}).get(place, 0)) for place, (start, end) in logs.items()}
        head = _read(client, {place: start for place, start in starts.items() if start < logs[place][1]}, logs)
        known = set(map(place_of, head))
        tails = {place: max(start, end - SAMPLE) for place, (start, end) in logs.items() if start < end}
        tail = _read(client, tails, logs)
        return head + [message for message in tail if place_of(message) not in known]
    finally:
        client.close()


def _read(client: Consumer, starts: Positions, logs: Mapping[Partition, tuple[int, int]]) -> list[Message]:
    """Read at most so many messages from each place."""
    if not starts:
        return []
    client.assign([TopicPartition(*place, start) for place, start in starts.items()])
    found: dict[Partition, list[Message]] = {place: [] for place in starts}
    left = set(starts)
    heard_at = time.monotonic()
    while left and time.monotonic() - heard_at < _WAIT_SECONDS:
        for message in client.consume(1000, 0.2):
            heard_at, place = time.monotonic(), Partition.of(message)
            if message.error() is None and place in left:
                found[place].append(message)
            error, offset = message.error(), message.offset() or 0
            ends = error is not None and error.code() == KafkaError._PARTITION_EOF
            if ends or len(found.get(place, ())) >= SAMPLE or offset >= logs[place][1] - 1:
                left.discard(place)
    if left:
        names = ", ".join(map(str, sorted(left)))
        logger.warning("the sample lacks messages of %s: Kafka sent none for %g s", names, _WAIT_SECONDS)
    return [message for place in sorted(found) for message in found[place]]


@dataclass(slots=True)
class Columns:
    """The columns that a sample asks for."""

    types: dict[str, str] = field(default_factory=dict)
    are_known: bool = False
    """Whether a message shows any; those of the options alone make no table."""
    key: tuple[str, ...] = ()
    """The fields of the messages' keys, where an envelope tells them."""
    rest: str | None = None
    """The column that was not asked for by name, and takes what has no column."""


def columns_of(flow: Flow, messages: Sequence[Message], *, for_new_table: bool) -> Columns:
    """Find the columns and types that messages ask for; a field that was null everywhere is jsonb.

    A new table gets a column for what has none, unless ``rest`` or ``fields`` say otherwise.

    :raises CommandError: when no message of the sample is of the format, or one is in an envelope that was not named.
    """
    result = Columns()
    # Fields that can be no columns.
    left_out: list[str] = []
    keys: list[bytes | None] = []
    if flow.format == "raw":
        result.types, result.are_known = {"key": "bytea", "value": "bytea"}, True
    elif messages:
        objects, types, result.key, keys = _objects(flow, messages)
        result.are_known = bool(objects or types)
        result.types = _types(flow, objects, types)
        left_out = [name for name in result.types if not ddl.can_be_column(name)]
        result.types = {name: kind for name, kind in result.types.items() if name not in left_out}
    for column, source in flow.metadata.items():
        kind = _METADATA_TYPES.get(source)
        shape = Shape({column: (path_of(source.removeprefix("key:")), Raw)})
        for key in keys if source.startswith("key:") else ():
            with contextlib.suppress(ValueError):  # the worker tells which one
                part = in_key(shape, key).get(column, b"null")
                kind = types_in_key(key).get(path_of(source[4:])) or wider(kind, type_of(msgspec.json.decode(part)))
        result.types[column] = kind or "text"
    result.types |= {column: type_of(value) or "text" for column, value in flow.constants.items()}
    result.types |= flow.types
    if flow.rest:
        result.types[flow.rest] = "jsonb"
    elif for_new_table and flow.rest is None and flow.format not in ("raw", "csv") and flow.fields is None:
        free = itertools.chain(["rest"], (f"rest_{number}" for number in itertools.count(2)))
        result.rest = next(name for name in free if name not in result.types)
        result.types[result.rest] = "jsonb"
    if left_out:
        where = f"they go to {flow.rest or result.rest}" if flow.rest or result.rest else "they are lost"
        names = ", ".join(map(cut, left_out))
        odd = f"over {NAME_BYTES} bytes, a quote or backslash, or Postgres's own"
        told = f"no column can have the name of {names} ({odd}); {where}"
        if for_new_table and not (flow.rest or result.rest):
            raise CommandError(f"{told}: say rename = {{column = path}} in a [[sink]], or rest")
        logger.warning("%s", told, extra={"action": "fields_left_out"})
    return result


def _objects(
    flow: Flow, messages: Sequence[Message]
) -> tuple[list[bytes], dict[Path, str], tuple[str, ...], list[bytes | None]]:
    """Return the rows in messages, the types and the key that their schemas tell, and the messages' keys in JSON."""
    keys: list[bytes | None] = []
    objects: list[bytes] = []
    types: dict[Path, str] = {}
    key: tuple[str, ...] = ()
    bad: list[BadRow] = []
    looks = replace(flow, missing="keep", on_tombstone="skip", on_truncate="skip").unwrapping(
        JsonDecoder(metadata=flow.metadata)
    )
    for message in messages:
        if flow.format is None and flow.schema_registry is None and (hint := hint_for(message.value())) is not None:
            raise CommandError(str(BadRow(hint, message=message)))
        try:
            found, told, names = looks.read(message, tells=True)
            values = (m.value() for m in found)
            rows = [_object(value.removeprefix(BYTE_ORDER_MARK)) for value in values if value is not None]
            objects += rows
            keys += [m.key() for m in found]
            types |= told if rows else {}
            key = key or names
        except (ValueError, BadRow) as error:
            bad.append(BadRow(error.reason if isinstance(error, BadRow) else str(error), message=message))
    if bad:
        what = "JSON objects" if flow.format in (None, "json") else f"messages of format {flow.format}"
        told_ = f"{len(bad)} of {len(messages)} messages of the sample are no {what}; {bad[0]}"
        if not objects:
            raise CommandError(told_)
        logger.warning("%s", told_, extra={"action": "sample_skipped"})
    return objects, types, key, keys


def _object(value: bytes) -> bytes:
    """Return the text of an object.

    :raises ValueError: showing what it is instead.
    """
    try:
        refuse_malformed(value)
        fields_in(value)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{cut(value)} ({error}){way_on(value)}") from error
    return value


def _types(flow: Flow, objects: Sequence[bytes], types: Mapping[Path, str]) -> dict[str, str]:
    """Find the type of each column."""
    if flow.fields is None:
        names = [path[0] for path in types if len(path) == 1]
        names += [name for one in objects for name, raw in fields_in(one).items() if bytes(raw) != UNAVAILABLE]
        paths: dict[str, Path] = {name: (name,) for name in names}
        renamed = paths_of(flow.rename)
        taken = {*flow.metadata, *flow.constants, flow.rest, *flow.drop, *(path[0] for path in renamed.values())}
        paths = {name: path for name, path in paths.items() if name not in taken} | renamed
    else:
        paths = paths_of(flow.fields)
    found = dict.fromkeys(paths, "jsonb") | types_in(paths, objects)
    found |= {column: types[path] for column, path in paths.items() if path in types}
    found |= {column: "date" if unit == "days" else "timestamptz" for column, unit in flow.epoch.items()}
    found |= dict.fromkeys(flow.decimal, "numeric") | dict.fromkeys(flow.json_text, "jsonb")
    found |= dict.fromkeys(flow.binary, "bytea")
    return found


def create_table(flow: Flow, columns: Columns) -> list[sql.Composed]:
    """Write the CREATE TABLE; the key becomes the primary key.

    :raises CommandError: for a column of the key that the sample does not have.
    """
    key = flow.key or (columns.key if flow.mode != "append" else ())
    # In a table without a key nothing is ever the same, so insert-ignore would append.
    if flow.mode != "append" and not key:
        raise CommandError(f"{flow.table}: --mode {flow.mode} needs a key in the table that is made: say --key COLUMN")
    if unknown := [name for name in key if name not in columns.types]:
        raise CommandError(
            f"no message of the sample has {', '.join(unknown)}, which --key names; "
            f"there are {', '.join(columns.types)}"
        )
    name = ddl.parts_of(flow.table)
    made = [ddl.create_table(name, columns.types, key)]
    if columns.rest is not None:
        column = sql.Identifier(*name, columns.rest)
        made.append(query("comment_on_rest_column", "", column=column, comment=sql.Literal(REST_COMMENT)))
    return made
