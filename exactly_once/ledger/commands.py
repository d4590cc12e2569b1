"""Commands that errors name: what mends a trouble, as a shell takes it. No I/O."""

from __future__ import annotations

import shlex

from exactly_once._model import Partition

DEFAULT_SCHEMA = "exactly_once"


def command(action: str, group_id: str | None, schema: str, *more: object) -> str:
    """Return a command about this group of this ledger, whatever the environment of its reader says.

    Servers are left out: a connection string may hold a secret.
    """
    which = [] if group_id is None else ["--group-id", group_id]
    which += [] if schema == DEFAULT_SCHEMA else ["--schema", schema]
    return shlex.join(["exactly-once", *action.split(), *which, *map(str, more)])


def reset_command(group_id: str, schema: str, partition: Partition) -> str:
    """Return the command that chooses where a partition goes on; N is for its reader to say."""
    where = ("--topic", partition.topic, "--partition", partition.number)
    return command("reset", group_id, schema, *where, "--to-offset", "N")


def grants_hint(schema: str) -> str:
    """Say what gives a role the grants that it lacks; with the schema in any case, as its reader may have several."""
    found = shlex.join(["exactly-once", "migrate", "--schema", schema, "--role", "NAME"])
    return f"{found} gives a role all grants that it needs, or prints them (--sql)"
