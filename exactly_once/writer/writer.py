"""The writer: puts rows into one table, inside a transaction that somebody else opened and will commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType
from typing import get_args

import psycopg
from confluent_kafka import Message
from psycopg import sql
from psycopg.pq import TransactionStatus

from exactly_once._log import about
from exactly_once.errors import ConfigurationError
from exactly_once.kafka.kinds import check_choice
from exactly_once.ledger.outcome import NOT_GRANTED, is_kept_out
from exactly_once.ledger.session import Connection

from .changes import Merge, Row
from .codec import Naive
from .decoding import Decoded
from .errors import BadRow, TableChanged, TableError, UnreadableValue, cut, has_name, origin
from .plan import Plan, Prepared
from .statements import Conflict, Mode, append, merge, place_in_copy
from .table import Column, OnMissing, Table, lock_shape, read_table, refuse_encoding
from .upsert import Upsert

logger = logging.getLogger(__name__)

# Up to so many rows an INSERT from arrays beats a COPY to a stage and a merge.
SMALL_BATCH = 500

# Their keys, members or letters would be taken for values.
_NO_ROWS = (Mapping, Set, str, bytes)
_REFUSED_BY_CHECK = "44000"
# A value that no index takes, a row that no page holds, or JSON that is too deep.
_TOO_LARGE = "54"
_BAD_DATA = ("22", "23", _TOO_LARGE, "P0001", _REFUSED_BY_CHECK)
_STALE = ("42", "22P03", "0A000")
# No operator, or more than one: a column of date or of text has no sums, one of json no order.
_NO_OPERATOR = ("42883", "42725")
# Without a key any constraint may be the one that has the row, and a deferrable one cannot.
_NO_ARBITER = "55000"
# What a role needs for each, as GRANT names it.
_RIGHTS: Mapping[Mode, Sequence[str]] = {
    "append": ["INSERT"],
    "insert-ignore": ["SELECT", "INSERT"],
    "upsert": ["SELECT", "INSERT", "UPDATE", "DELETE"],
}
# What the readers of some types raise for a value: ltree 42601, regclass 0A000, hstore before Postgres 16 XX000. A COPY
# names its column then.
_OF_READERS = ("42", "0A", "08P01", "XX000")


class TableWriter:
    """Writes rows to one table; one writer serves one thread.

    ``table`` is written as in SQL. ``columns`` are those that rows fill, in the rows' order; by default all that
    take values. In mode ``upsert`` the last change of each ``key`` (default: the primary key) wins, in the order of
    the rows, and a :class:`Tombstone` deletes; ``update`` restricts which columns a change may touch, with ``add`` the
    values of these columns are added to what is stored, and with ``newest_by``, which ``update`` must name then, a row
    that is older than the stored one is ignored. ``missing`` says what becomes of a column that
    a row lacks (``MISSING``): null, the column's default or, in an upsert, what it was; by default a new row gets the
    column's default and a row that exists keeps what it has, and a column without a default becomes null. A change
    that a later one of the same rows replaces is not sent, unless ``sends_each``: so constraints look at it. All work
    happens in the transaction of the connection that is given; nothing is committed, and nothing outlives it.
    """

    def __init__(
        self,
        table: str | sql.Identifier,
        *,
        mode: Mode = "append",
        columns: Sequence[str] | None = None,
        key: Sequence[str] | None = None,
        update: Sequence[str] | None = None,
        newest_by: str | None = None,
        add: Sequence[str] = (),
        missing: OnMissing | None = None,
        naive_timestamps: Naive = "refuse",
        sends_each: bool = False,
        small_batch: int = SMALL_BATCH,
    ) -> None:
        for option, value, kind in (
            ("mode", mode, Mode),
            ("missing", missing or "null", OnMissing),
            ("naive_timestamps", naive_timestamps, Naive),
        ):
            check_choice(option, value, get_args(kind))
        if mode != "upsert" and (update is not None or newest_by is not None or add or missing == "keep"):
            raise ConfigurationError(
                "update, newest_by, add and missing='keep' are about rows that exist: mode='upsert'"
            )
        if update is not None and (idle := sorted(set(add) - set(update))):
            raise ConfigurationError(f"add names {', '.join(idle)}, which update leaves as it is: name it there, too")
        if newest_by is not None and update is not None and newest_by not in update:
            raise ConfigurationError(
                f"update leaves {newest_by} as it is, so newest_by would compare with a row's first one: name it there"
            )
        if newest_by in add:
            raise ConfigurationError(f"add makes {newest_by} a sum, of which newest_by can tell no age")
        self.name = table
        self.mode = mode
        self.missing = missing
        self._columns = tuple(columns) if columns is not None else None
        self._key = tuple(key) if key is not None else None
        self._update = tuple(update) if update is not None else None
        self._newest_by = newest_by
        self._add = tuple(add)
        self._naive: Naive = naive_timestamps
        self._sends_each = sends_each
        self._small_batch = small_batch
        self._table: Table | None = None
        self._is_fresh = False
        # Whether small batches go by a stage, too: only a COPY tells a value that is wrong from a table that is.
        self._stages = False
        # How many deletes found no row so far, those of units that were rolled back included.
        self.missed_deletes = 0
        # How many rows were ignored so far because the table had one of their key, or a newer one; counted likewise.
        self.ignored_rows = 0
        # Whether it was told that the table keeps rows out.
        self._has_told = False
        self._conflict = Conflict(mode=mode)
        self._plans: dict[tuple[str, ...], Plan] = {}

    def __repr__(self) -> str:
        return f"<TableWriter {self.mode} {self._table or self.name}>"

    def table(self, connection: Connection, *, locks: bool = True) -> Table:
        """Return the table as it is, and see to it that nobody alters it before the transaction ends.

        Without ``locks`` it is only looked at, and whoever writes looks again: nobody who locks it is waited for.

        :raises TableError: when there is no such table, or it cannot take what it is asked to.
        :raises TableChanged: when it is gone; the next attempt looks for another one of its name.
        """
        if connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE:
            raise ConfigurationError("the writer needs an open transaction; this connection commits each statement")
        refuse_encoding(connection)
        try:
            while self._table is None or (locks and lock_shape(connection, self._table) != self._table.shape):
                table = read_table(connection, self.name)
                before, self._conflict = self._conflict.key, self._conflict_in(table)
                if before and before != self._conflict.key:
                    logger.warning(
                        "the primary key of %s was altered: rows are told apart by %s now, and no more by %s; key= "
                        "keeps one",
                        table,
                        ", ".join(self._conflict.key) or "any constraint",
                        ", ".join(before),
                        extra=about("key_changed"),
                    )
                self._columns = self._columns or tuple(table.writable)
                self._table, self._is_fresh, self._plans = table, True, {}
        except psycopg.errors.UndefinedTable as error:
            gone, self._table = self._table, None
            raise TableChanged(f"{gone or self.name} is gone: {error}") from error
        except psycopg.errors.InsufficientPrivilege as error:
            refused, self._table = self._table, None
            raise self._not_granted(error, refused or self.name) from error
        return self._table

    def key(self, connection: Connection) -> tuple[str, ...]:
        """Return the columns by which rows are told from each other; none where that does not matter."""
        if self._table is None:
            self.table(connection)
        return self._conflict.key

    def write(
        self,
        connection: Connection,
        rows: Iterable[Row],
        *,
        columns: Sequence[str] | None = None,
        origins: Sequence[Message] | None = None,
        exact: Collection[str] = (),
        partial: Mapping[str, Merge] = MappingProxyType({}),
        table: Table | None = None,
    ) -> int:
        """Write rows and return how many Postgres stored, changed or deleted.

        Rows are encoded while others are being stored, so an error leaves the transaction to be rolled back. ``rows``
        may be iterated over again to find a bad one. ``origins`` are the messages that the rows came from, for
        errors. The values of columns in ``exact`` are trusted to be what the column takes, for decoders that saw to
        that. Those in ``partial`` are JSON whose fields, with ``missing="keep"``, are merged into what a row has, and
        within ``rows`` by the function given. ``table`` is what :meth:`table` returned in this transaction, where that
        was asked already.

        :raises BadRow: when a row cannot be stored as it is; ``__cause__`` is what Postgres said, if it was asked.
        :raises TableError: when the table cannot take such rows at all.
        :raises TableChanged: when it was altered meanwhile; the next attempt reads it anew.
        """
        plan = self._plan(table or self.table(connection), tuple(columns or self._columns or ()))
        if not isinstance(rows, (Collection, Decoded)):
            rows = list(rows)
        small_batch = 0 if self._stages else self._small_batch
        written = 0
        with self._explaining(plan, rows, origins):
            # Decoders make tuples, and make them anew each time.
            for kind in {*map(type, rows)} if isinstance(rows, Collection) else ():
                if issubclass(kind, _NO_ROWS):
                    names = ", ".join(plan.names)
                    raise TableError(f"{plan.table}: a row is a sequence of values for {names}, not a {kind.__name__}")
            if self.mode == "upsert":
                merges = partial if self.missing == "keep" else {}
                upsert = Upsert(
                    plan,
                    self._conflict,
                    missing=self.missing,
                    merges=merges,
                    sends_each=self._sends_each,
                    small_batch=small_batch,
                )
                written = upsert.apply(connection, list(rows), exact=exact, origins=origins)
                self.missed_deletes += upsert.missed
                self.ignored_rows += upsert.ignored
                return self._counted(written, of=written + upsert.kept_out)
            if set(plan.names) <= set(exact) and self.missing in (None, "null") and not plan.may_leave_out:
                prepared = Prepared(rows, is_binary=True)
            else:
                prepared = plan.prepare(list(rows), exact=exact, origins=origins)
            first_wins = self._conflict.key if self.mode == "insert-ignore" else None
            for part, some in plan.by_columns(prepared, first_wins=first_wins, origins=origins):
                if self.mode == "append" and plan.table.can_copy:
                    written += append(connection, part, *part.encode(some))
                else:
                    written += merge(connection, part, some, self._conflict, small_batch=small_batch)
        # A decoder's rows are made while they are written, each of a message.
        given = len(prepared.rows if isinstance(prepared.rows, Collection) else origins or ())
        if self.mode == "append":
            return self._counted(written, of=given)
        self.ignored_rows += given - written
        return written

    def write_encoded(
        self,
        connection: Connection,
        encode: Callable[[Sequence[Column]], Iterable[bytes] | None],
        rows: Iterable[Row],
        *,
        row_count: int,
        columns: Sequence[str],
        origins: Sequence[Message] | None = None,
    ) -> int:
        """Append what ``encode`` makes for the columns, a binary COPY, or the ``rows`` themselves if that is nothing.

        ``rows``, of which there are ``row_count``, may be iterated over again, which also finds the one that Postgres
        refused; see :meth:`write`.
        """
        table = self.table(connection)
        plan = self._plan(table, tuple(columns))
        encoded = encode(plan.columns) if self.mode == "append" and plan.table.can_copy else None
        if encoded is None:
            return self.write(connection, rows, columns=columns, origins=origins, table=table)
        with self._explaining(plan, rows, origins):
            written = append(connection, plan, "BINARY", encoded)
        return self._counted(written, of=row_count)

    def _counted(self, written: int, *, of: int) -> int:
        """Return how many rows were written; where these are fewer than there were to be, say so once."""
        if written < of and not self._has_told:
            self._has_told = True
            logger.warning(
                "%s: Postgres counts %s of %s rows as stored: a trigger or a rule of the table keeps the others out or "
                "puts them elsewhere. Their messages count as applied; said once",
                self._table,
                written,
                of,
                extra=about("rows_kept_out"),
            )
        return written

    @contextmanager
    def _explaining(self, plan: Plan, rows: Iterable[Row], origins: Sequence[Message] | None) -> Iterator[None]:
        """Turn what is raised while rows are written into what it says of them."""
        try:
            yield
        except (TableError, TableChanged):
            self._table, self._stages = None, False
            raise
        except psycopg.Error as error:
            explained = self._explained(error, plan, rows, origins)
            # The state of a policy's refusal is kept: whose fault it is :func:`classify` knows.
            is_known = (error.sqlstate or "22").startswith((*_BAD_DATA, NOT_GRANTED))
            is_ours = isinstance(explained, BadRow) and not is_known
            raise explained from UnreadableValue(str(error)) if is_ours else error
        except BadRow:
            raise
        except Exception as error:
            raise plan.find_bad(rows, origins) or error from error
        self._is_fresh = self._stages = False

    def _plan(self, table: Table, names: tuple[str, ...]) -> Plan:
        if names not in self._plans:
            self._plans[names] = Plan(table, names, naive=self._naive, missing=self.missing)
        return self._plans[names]

    def _conflict_in(self, table: Table) -> Conflict:
        """Find the key in this table.

        :raises TableError: when nothing guarantees that it is unique.
        """
        if self.mode == "append":
            return Conflict(mode="append")
        if table.has_rules:
            raise TableError(
                f"{table} has rules for INSERT or UPDATE, with which Postgres has no ON CONFLICT: make them triggers, "
                "or append only"
            )
        key = self._key or table.primary_key
        if self.mode == "upsert" and not key:
            raise self._no_key(table)
        table.pick(key)
        if key and set(key) not in map(set, table.keys):
            raise TableError(
                f"{table}: no unique index over exactly {', '.join(key)} (a partial, deferrable or expression index "
                "does not count, nor one of another collation), so Postgres cannot tell which row a change belongs to"
            )
        table.pick(self._add)
        table.pick(self._update or ())
        if both := sorted(set(self._add) & set(key)):
            raise TableError(f"{table}: {', '.join(both)} is of the key, so add= cannot add to it")
        return Conflict(mode=self.mode, key=key, update=self._update, newest_by=self._newest_by, add=self._add)

    # What went wrong.

    def _no_key(self, table: Table) -> TableError:
        found = "; there is one over " + ", or ".join(map(", ".join, table.keys)) if table.keys else ""
        return TableError(
            f"{table} has no primary key that is checked at once; say key=COLUMNS, over which there is a unique "
            f"index or constraint that is not deferrable{found}"
        )

    def _not_granted(self, error: psycopg.Error, table: object) -> TableError:
        return TableError(
            f"{error.diag.message_primary}: to write to {table} in mode {self.mode} a role needs "
            f"{', '.join(_RIGHTS[self.mode])} on the table, and USAGE on its schema; grants on single columns are not "
            "enough, as the table is locked"
        )

    def _explained(
        self, error: psycopg.Error, plan: Plan, rows: Iterable[Row], origins: Sequence[Message] | None
    ) -> Exception:
        """Say which row it was, or that the table is another one now."""
        state = error.sqlstate or ""
        is_settled = self._is_fresh and (self._stages or (self.mode == "append" and plan.table.can_copy))
        if not state:  # not from the server: the connection is lost, or the driver cannot dump something
            return plan.find_bad(rows, origins) or error
        copied, column = place_in_copy(plan, error.diag.context or "")
        reads_value = column is not None and state.startswith(_OF_READERS) and state != NOT_GRANTED
        if (self._add or self._newest_by) and state in _NO_OPERATOR and not (reads_value or error.diag.context):
            reason = error.diag.message_primary or ""
            is_sum = self._add and ("+" in reason or self._newest_by is None)
            option = f"add={list(self._add)}" if is_sum else f"newest_by={self._newest_by!r}"
            return TableError(f"{plan.table}: {option} cannot be: {reason}")
        if self.mode == "insert-ignore" and not self._conflict.key and state == _NO_ARBITER and not error.diag.context:
            return TableError(f"{self._no_key(plan.table)} ({error.diag.message_primary})")
        if is_kept_out(error):
            state = _REFUSED_BY_CHECK
        elif state == NOT_GRANTED:  # of the table, or of what a default, a check or a trigger of it uses
            is_tables = has_name(error.diag.message_primary or "", plan.table.name) and not error.diag.context
            return self._not_granted(error, plan.table) if is_tables else error
        if not reads_value and state.startswith(_STALE):
            self._table, self._stages = None, True
            if not is_settled:
                return TableChanged(f"{plan.table} was altered since it was read, or a value does not fit: {error}")
        if not reads_value and not state.startswith(_BAD_DATA):
            return error
        # Elsewhere rows are in another order than they came. COPY stores many at once, and where it is the table that
        # refuses one, too long for a page or by a server behind it, the number is that of the last one read.
        is_told = column is not None or error.diag.table_name is not None
        is_exact = is_told or not (state.startswith(_TOO_LARGE) or plan.table.is_foreign)
        line = copied if is_exact and self.mode == "append" and not plan.may_leave_out else None
        if line is None and origins is not None and len(origins) == 1:
            line = 0
        reason = error.diag.message_primary or str(error)
        row = next(islice(rows, line, None), None) if line is not None else None
        column = error.diag.column_name or column or (plan.column_refusing(row, reason) if row is not None else None)
        if error.diag.message_detail:
            reason = f"{reason} ({error.diag.message_detail})"
        elif error.diag.datatype_name and row is not None and column in plan.names:  # a domain's own checks
            reason = f"{reason}: {cut(row[plan.names.index(column)])}"
        has_nul = any(nul in reason for nul in ("0x00", "\\u0000"))
        if (line is None or (has_nul and column is None)) and (bad := plan.find_bad(rows, origins)) is not None:
            return bad
        if has_nul:
            reason += '; nul = "strip" takes NUL out of JSON'
        return BadRow(
            reason,
            message=origin(origins, line) if line is not None else None,
            row=line,
            column=column,
        )
