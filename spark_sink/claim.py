"""Claim: a group knows the table that it writes, because an offset that is written into one is in no other."""

from __future__ import annotations

from typing import NamedTuple

from exactly_once.errors import ConfigurationError
from exactly_once.ledger.session import Connection, cursor_on
from exactly_once.ledger.sql import query
from exactly_once.writer import Table

from .errors import FrameError
from .options import Options


class Claim(NamedTuple):
    """What the database knew of a group before this run."""

    is_known_query: bool
    """Whether this query has written a batch under it."""
    has_others: bool
    """Whether another query has: one with another checkpoint."""


def claim(connection: Connection, options: Options, table: Table, query_id: str) -> Claim:
    """Write down which table the group writes; until it has written something it may be another one.

    :raises ConfigurationError: when it has written another table.
    """
    wanted = f"{table.schema}.{table.name}"
    parameters = {
        "group_id": options.group_id,
        "query_id": query_id,
        "table": wanted,
        "previous": options.previous_table,
    }
    row = cursor_on(connection).execute(query("spark_claim", options.schema), parameters, prepare=False).fetchone()
    assert row is not None
    written, is_known_query, has_others = row
    if written != wanted:
        raise ConfigurationError(
            f"group {options.group_id!r} has written into {written}, now the table is {wanted}: what the ledger has "
            "as written is not there and would never come. Choose another group_id, which reads the topic from "
            f"startingOffsets on; or, where {written} was renamed or goes on in {wanted}, say "
            f"previous_table={written!r}"
        )
    return Claim(is_known_query, has_others)


def refuse_lost_state(known: Claim, operators: list[str], options: Options) -> None:
    """Refuse a new checkpoint behind operators with a state: what they knew of earlier rows is gone.

    :raises FrameError: naming them and what to do.
    """
    if operators and known.has_others and not known.is_known_query and options.mode == "append":
        raise FrameError(
            f"the query has a new checkpoint, and another query has written for group {options.group_id!r}: the state "
            f"of {', '.join(operators)} is gone, so rows that it would have dropped would be written again. Restore "
            "the checkpoint; or say mode='insert-ignore' or 'upsert' with a key; or empty the table and choose another "
            "group_id"
        )
