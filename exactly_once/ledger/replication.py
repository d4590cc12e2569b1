"""Replication: a COMMIT that did not wait for its synchronous standby is committed, and told as a warning only."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable

import psycopg

from exactly_once._log import about

from .session import Connection

logger = logging.getLogger(__name__)

# The server's own function that warns: its text depends on ``lc_messages``, and SQLSTATE 01000 is any warning.
_WAIT = "SyncRepWaitForLSN"


def watched(connect: Callable[[], Connection]) -> Callable[[], Connection]:
    """Return ``connect`` with connections that log the server's warning of a COMMIT which no standby has confirmed."""

    @functools.wraps(connect)
    def made() -> Connection:
        connection = connect()
        if isinstance(connection, psycopg.Connection):
            with contextlib.suppress(ValueError):  # a pool gives the same connection again
                connection.remove_notice_handler(_tell)
            connection.add_notice_handler(_tell)
        return connection

    return made


def _tell(notice: psycopg.errors.Diagnostic) -> None:
    if notice.source_function == _WAIT:
        logger.warning(
            "committed, and perhaps lost in a failover: %s (%s)",
            notice.message_primary,
            notice.message_detail,
            extra=about("not_replicated"),
        )
