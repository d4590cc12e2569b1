"""Commands that errors name: what mends a trouble, as a shell takes it. No I/O."""

from __future__ import annotations

import shlex

from exactly_once._model import Partition

DEFAULT_SCHEMA = "exactly_once"
_NAMING = ("--group-id", "--topic", "--schema")


def command(action: str, group_id: str | None, schema: str, *more: object) -> str:
    """Return a command about this group of this ledger, whatever the environment of its reader says.

    Servers are left out: a connection string may hold a secret.
    """
    which = [] if group_id is None else ["--group-id", group_id]
    which += [] if schema == DEFAULT_SCHEMA else ["--schema", schema]
    words = ["exactly-once", *action.split()]
    for word in (*which, *map(str, more)):
        if words[-1] in _NAMING and word.startswith("-"):
            words[-1] += f"={word}"  # else it would be taken for an option
        else:
            words.append(word)
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """Quote for bash and zsh; what does not show, such as the end of a line, is escaped."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(c if c.isprintable() and c not in "\\'" else f"\\U{ord(c):08x}" for c in word) + "'"


def reset_command(group_id: str, schema: str, partition: Partition) -> str:
    """Return the command that chooses where a partition goes on; N is for its reader to say."""
    where = ("--topic", partition.topic, "--partition", partition.number)
    return command("reset", group_id, schema, *where, "--to-offset", "N")


def after_halt(group_id: str, schema: str, partition: Partition, next_offset: int | None) -> str:
    """Say how an operator lets a halted row go on: the effects of what was read last may be there, or not."""
    if not partition.counts_batches:
        return f"Decide which offset is right, then: {reset_command(group_id, schema, partition)}"
    batch_id = next_offset or 0
    keep, again = (
        command("reset", group_id, schema, "--topic", partition.topic, "--to-batch", last)
        for last in (batch_id, batch_id - 1)
    )
    return (
        f"Look whether the rows of batch {batch_id} are in the table. If they are there and right: {keep}; if they are "
        f"not, or once you have taken them out: {again}"
    )


def grants_hint(schema: str) -> str:
    """Say what gives a role the grants that it lacks; with the schema in any case, as its reader may have several."""
    found = shlex.join(["exactly-once", "migrate", "--schema", schema, "--role", "NAME"])
    return f"{found} gives a role all grants that it needs, or prints them (--sql)"
