"""``exactly-once dead-letters``: look at messages that could not be applied, replay them, drop them."""

from __future__ import annotations

import argparse
import base64
import contextlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, get_args

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME

from exactly_once._log import named
from exactly_once._model import Partition
from exactly_once.consumer.options import Isolation
from exactly_once.consumer.replay import Replay, ReplayStopped
from exactly_once.consumer.unit import Unit
from exactly_once.errors import (
    ConfigurationError,
    HandlerCommitted,
    TransactionOutcomeUnknown,
    Unreachable,
    WrongThreadOrProcess,
)
from exactly_once.ledger import dead_letters
from exactly_once.ledger.commands import command
from exactly_once.ledger.dead_letters import DeadLetter
from exactly_once.ledger.session import Session

from . import options, output
from .named import Named
from .problems import CommandError, CommandParser, UsageError, one_line
from .servers import open_database

_DESCRIPTION = """\
Messages that a handler could not apply and that were stored in the transaction that skips them. They
stay until somebody replays or drops them. Of all groups, unless --group-id is given."""
_REPLAY = """\
Call a handler with dead letters in the order of the log, each in one transaction with its mark: a crash
leaves a dead letter replayed with its effects, or dead without them. One that fails again stays dead; the rest
goes on, and the command exits with 1. Where the server fails, and not the letter, it ends. A dry run unless
--execute is given."""
_HEADER = ("ID", "GROUP", "PARTITION", "OFFSET", "KEY", "DEAD SINCE", "TRIES", "STATUS", "ERROR")
_GIVE = tuple(map(_HEADER.index, ("ERROR", "GROUP", "PARTITION", "KEY")))
_SHOWN_CHARACTERS = 60  # of an error or a key: the table is for finding a letter, `show` for reading it
_LIST_LIMIT = 1000  # letters hold whole messages, and nobody reads more lines of a table
_TIMESTAMPS = {TIMESTAMP_CREATE_TIME: "CreateTime", TIMESTAMP_LOG_APPEND_TIME: "LogAppendTime"}
# No letter behind would fare better, or somebody must look first: the rest of a replay is not begun. All else is one
# letter's, be it a handler that asks for another try (Redelivered) or that broke its transaction.
_ENDS = (ConfigurationError, HandlerCommitted, TransactionOutcomeUnknown, Unreachable, WrongThreadOrProcess)
_REPLAYED, _SETTLED = "replayed", "was settled by somebody else meanwhile"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "dead-letters", help="list, show, replay or drop messages that could not be applied", description=_DESCRIPTION
    )
    an_id = options.number(int, "is not the id of a dead letter", least=1, most=options.INT64)
    actions = parser.add_subparsers(dest="action", metavar="action", required=True, parser_class=CommandParser)
    for action, text, more in (
        ("list", "list dead letters", None),
        ("show", "show whole dead letters", None),
        ("replay", "call a handler with dead letters", _REPLAY),
        ("drop", "take dead letters off the list without applying them", None),
    ):
        one = actions.add_parser(action, help=text, description=more, epilog=options.EPILOG)
        one.add_argument("ids", nargs="*", type=an_id, metavar="ID", help="only these")
        one.add_argument("--topic", action=options.Once, help="only of this topic")
        one.add_argument(
            "--partition", action=options.Once, type=options.partition, metavar="N", help="only of this partition"
        )
        options.add_common(one)
        if action == "list":
            one.add_argument("--all", action="store_true", help="also those that were replayed or dropped")
            how_many = "how many at most (%(default)s)"
            one.add_argument("--limit", type=options.positive, default=_LIST_LIMIT, help=how_many)
        elif action == "replay":
            what = "what is called with a unit, as by run()"
            one.add_argument("--handler", action=options.Once, required=True, metavar="MODULE:FUNCTION", help=what)
            isolation = "of the transactions, as the consumer's isolation= (%(default)s)"
            one.add_argument("--isolation", choices=get_args(Isolation), default="READ COMMITTED", help=isolation)
        if action in ("replay", "drop"):
            options.add_execute(one)


def run(args: argparse.Namespace) -> int:
    """Find the letters that are meant, and do with them what the action says."""
    settings = options.settings(args)
    settings.opener()
    if args.action in ("show", "drop") and not (args.ids or args.topic):
        listed = command("dead-letters list", settings.group_id, settings.schema)
        raise UsageError(f"name the dead letters to {args.action}: their ids, or --topic; `{listed}` shows them")
    handler = Named("--handler", args.handler) if args.action == "replay" else None
    limit = getattr(args, "limit", None)
    with open_database(settings) as session:
        found = dead_letters.find(
            session.connection,
            schema=session.schema,
            group_id=settings.group_id,
            topic=args.topic,
            partition=args.partition,
            ids=args.ids or None,
            status=None if args.ids or getattr(args, "all", False) else "dead",
            limit=None if limit is None or args.ids else limit + 1,  # one more tells whether these are all
        )
        if missing := set(args.ids) - {letter.id for letter in found}:
            listed = command("dead-letters list", settings.group_id, session.schema, "--all")
            raise CommandError(
                f"there is no such dead letter: {', '.join(map(str, sorted(missing)))}; "
                f"`{listed}` shows all, also those replayed or dropped"
            )
        no_more = [f"{letter.id} was {letter.status}" for letter in found if letter.status != "dead"]
        if no_more and args.action in ("replay", "drop"):
            raise CommandError(f"nothing was changed, for some are dead no more: {', '.join(no_more)}; leave them out")
        groups = sorted({letter.group_id for letter in found})
        if handler is not None and len(groups) > 1 and not args.ids:
            raise UsageError(
                f"these dead letters are of several groups, and have one handler each: {', '.join(groups)}"
            )
        # `list` and `show` have no such option.
        if not getattr(args, "execute", False):
            _show(args, found[:limit])
            if limit is not None and len(found) > limit:
                print(f"there are more than these {limit}: --limit N shows more", file=sys.stderr)
            return 0
        if handler is not None:
            return _replay(args, session, found, handler)
        # All or none: what somebody else settles meanwhile is waited for, and left as it is then.
        with session.connection.transaction():
            settled = [dead_letters.settle(session.connection, x.id, "dropped", schema=session.schema) for x in found]
    dropped = [_document(letter) for letter in settled if letter is not None]
    note = f"{len(dropped)} of {len(found)} dropped"
    output.show(args, {"dead_letters": dropped}, _HEADER, [], notes=[note], done=note)
    return 0


def _show(args: argparse.Namespace, found: list[DeadLetter]) -> None:
    """Print letters: whole ones, or a table of them."""
    documents = [_document(letter) for letter in found]
    if args.action == "show" and not args.json:
        for document in documents:
            for name, value in document.items():
                print(f"{name:15} {output.printable(value)}")
            print()
        return
    cells: list[list[object]] = []
    for letter in found:
        error = f"{letter.error_class.rpartition('.')[2]}: {letter.error}"
        key, error = (
            text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
            for text in (_readable(letter.key) or "-", error)
        )
        place, age = Partition(letter.topic, letter.partition), output.ago(letter.dead_seconds_ago)
        row = [letter.id, letter.group_id, place, letter.message_offset, key, age, letter.attempts, letter.status]
        cells.append([*row, error])
    title = [] if found else ["there are no dead letters"]
    output.show(args, {"dead_letters": documents}, _HEADER, cells, title=title, give=_GIVE)
    if args.action in ("replay", "drop"):
        what = f"would be replayed by {args.handler}" if args.action == "replay" else "would be dropped"
        print(f"dry run: {len(found)} {what}; --execute does it", file=sys.stderr)


def _replay(
    args: argparse.Namespace, session: Session, found: list[DeadLetter], handler: Callable[[Unit], object]
) -> int:
    replaying = Replay(session.connect, schema=session.schema, isolation=args.isolation)
    outcomes: list[dict[str, object]] = []
    note = f"0 of {len(found)} replayed"
    try:
        for letter in found:
            outcome: dict[str, object] = {"id": letter.id, "place": letter.place}
            try:
                outcome["outcome"] = _REPLAYED if replaying.replay(letter, handler) else _SETTLED
            except _ENDS:
                raise
            except ReplayStopped as stopped:
                raise CommandError(
                    f"{note}; at {letter.place} (dead letter {letter.id}) the server or the connection failed, not the "
                    f"handler, so those behind it were not begun: {one_line(stopped.__cause__ or stopped)}; the same "
                    "command goes on with what is still dead then"
                ) from stopped
            # It is the handler's, and the letter is as dead as before. Whoever leaves by another status means that.
            except (Exception, SystemExit) as error:
                if isinstance(error, SystemExit) and error.code:
                    print(f"the handler ended the command at {letter.place}; {note}", file=sys.stderr)
                    raise
                text = " ".join(named(error).split())
                outcome |= {"outcome": "failed again", "error": text}
            outcomes.append(outcome)
            note = args.done = f"{sum(each['outcome'] == _REPLAYED for each in outcomes)} of {len(found)} replayed"
            if not args.json:  # at once: a replay takes as long as its handler
                print("  ".join(output.printable(value) for value in outcome.values()))
    finally:
        replaying.close()
    output.show(args, {"dead_letters": outcomes}, _HEADER, [], notes=[note], done=note)
    return 1 if any("error" in each for each in outcomes) else 0


def _document(letter: DeadLetter) -> dict[str, Any]:
    """Return a letter for reading: text as text, the timestamp as a time or else milliseconds, headers as pairs."""
    kind = _TIMESTAMPS.get(letter.timestamp_type)
    time: datetime | int | None = letter.timestamp_ms if kind else None
    with contextlib.suppress(ValueError, OverflowError, OSError):  # no date: Kafka takes any number
        time = datetime.fromtimestamp(letter.timestamp_ms / 1000, UTC) if kind else None
    document = asdict(letter) | {
        "timestamp_type": kind,
        "timestamp": time,
        "key": _readable(letter.key),
        "value": _readable(letter.value),
        "headers": [[name, _readable(value)] for name, value in letter.headers or ()],
    }
    for raw in ("timestamp_ms", "header_names", "header_values", "dead_seconds_ago"):
        del document[raw]
    return document


def _readable(value: str | bytes | None) -> str | None:
    """Give text as it is, and other bytes in base64 behind a prefix."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(value).decode()}"
