"""``exactly-once dead-letters``: look at messages that could not be applied, replay them, drop them."""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from exactly_once._model import Partition
from exactly_once.consumer.replay import Replay
from exactly_once.consumer.unit import Unit
from exactly_once.errors import ExactlyOnceError
from exactly_once.ledger import dead_letters
from exactly_once.ledger.dead_letters import DeadLetter
from exactly_once.ledger.session import Session

from . import options, output
from .named import Named
from .problems import CommandError, CommandParser, UsageError
from .servers import open_database

_DESCRIPTION = """\
Messages that a handler could not apply and that were set aside in the transaction that skips them. They
stay until somebody replays or drops them. Of all groups, unless --group-id is said."""
_REPLAY = """\
Call a handler with dead letters in the order of the log, each in one transaction with its mark: a crash
leaves a letter replayed with its effects, or dead without them. One that fails again stays dead; the rest
goes on, and the command exits with 1. A dry run unless --execute is said."""
_HEADER = ("ID", "GROUP", "PARTITION", "OFFSET", "DEAD SINCE", "TRIES", "STATUS", "ERROR")
_GIVE = tuple(map(_HEADER.index, ("ERROR", "GROUP", "PARTITION")))
_SHOWN_CHARACTERS = 60
_REPLAYED, _SETTLED = "replayed", "was settled by somebody else meanwhile"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command's options and its own commands."""
    parser = subparsers.add_parser(
        "dead-letters", help="list, show, replay or drop messages that were set aside", description=_DESCRIPTION
    )
    actions = parser.add_subparsers(dest="action", metavar="action", required=True, parser_class=CommandParser)
    listing = _add(actions, "list", "list dead letters")
    listing.add_argument("--all", action="store_true", help="also those that were replayed or dropped")
    listing.add_argument("--limit", type=int, default=1000, help="how many at most (%(default)s)")
    _add(actions, "show", "show whole dead letters")
    replaying = _add(actions, "replay", "call a handler with dead letters", _REPLAY)
    replaying.add_argument(
        "--handler", required=True, metavar="MODULE:FUNCTION", help="what is called with a unit, as by run()"
    )
    dropping = _add(actions, "drop", "take dead letters off the list without applying them")
    for changing in (replaying, dropping):
        changing.add_argument("--execute", action="store_true", help="do it; without this, only say what would be done")


def run(args: argparse.Namespace) -> int:
    """Do what the action says."""
    settings = options.settings(args)
    settings.opener()
    actions = {"list": _list, "show": _show, "replay": _replay, "drop": _drop}
    with open_database(settings) as session:
        return actions[args.action](args, session, settings)


def _add(actions: argparse._SubParsersAction[CommandParser], name: str, help_: str, more: str = "") -> CommandParser:
    parser = actions.add_parser(name, help=help_, description=more or None, epilog=options.EPILOG)
    parser.add_argument("ids", nargs="*", type=int, metavar="ID", help="only these")
    parser.add_argument("--topic", help="only of this topic")
    parser.add_argument("--partition", type=int, metavar="N", help="only of this partition")
    options.add_common(parser)
    return parser


def _find(args: argparse.Namespace, session: Session, settings: options.Settings) -> list[DeadLetter]:
    """Return the letters that are meant.

    :raises CommandError: when an id that was said is not among them.
    """
    found = dead_letters.find(
        session.connection,
        schema=session.schema,
        group_id=settings.group_id,
        topic=args.topic,
        partition=args.partition,
        ids=args.ids or None,
        status=None if getattr(args, "all", False) or args.action == "show" else "dead",
        limit=getattr(args, "limit", None),
    )
    missing = set(args.ids) - {letter.id for letter in found}
    if missing:
        raise CommandError(
            f"there is no such dead letter: {', '.join(map(str, sorted(missing)))}; "
            "`exactly-once dead-letters list --all` shows all, also those replayed or dropped"
        )
    return found


def _list(args: argparse.Namespace, session: Session, settings: options.Settings) -> int:
    _print(args, _find(args, session, settings), "there are no dead letters")
    return 0


def _show(args: argparse.Namespace, session: Session, settings: options.Settings) -> int:
    if not args.ids:
        raise UsageError("say the ids of the dead letters to show; `exactly-once dead-letters list` has them")
    found = _find(args, session, settings)
    if args.json:
        output.print_json({"dead_letters": [_document(letter) for letter in found]})
        return 0
    for letter in found:
        for name, value in _document(letter).items():
            print(f"{name:15} {output.printable(value)}")
        print()
    return 0


def _replay(args: argparse.Namespace, session: Session, settings: options.Settings) -> int:
    handler = Named("--handler", args.handler)
    found = _find(args, session, settings)
    groups = sorted({letter.group_id for letter in found})
    if len(groups) > 1 and not args.ids:
        raise UsageError(f"these dead letters are of several groups, and have one handler each: {', '.join(groups)}")
    if not args.execute:
        return _dry(args, found, f"would be replayed by {args.handler}")
    replaying = Replay(session.connect, schema=session.schema)
    outcomes: list[dict[str, object]] = []
    try:
        for letter in found:
            outcomes.append(_replay_one(replaying, letter, handler))
            if not args.json:
                print("  ".join(output.printable(value) for value in outcomes[-1].values()))
    finally:
        replaying.close()
    if args.json:
        output.print_json({"dead_letters": outcomes})
    else:
        print(f"{sum(each['outcome'] == _REPLAYED for each in outcomes)} of {len(found)} replayed")
    return 1 if any("error" in each for each in outcomes) else 0


def _replay_one(replaying: Replay, letter: DeadLetter, handler: Callable[[Unit], object]) -> dict[str, object]:
    outcome: dict[str, object] = {"id": letter.id, "place": letter.place}
    try:
        return outcome | {"outcome": _REPLAYED if replaying.replay(letter, handler) else _SETTLED}
    except ExactlyOnceError:
        raise
    except Exception as error:  # noqa: BLE001 - it is the handler's, and the letter is as dead as before
        return outcome | {"outcome": "failed again", "error": " ".join(f"{type(error).__name__}: {error}".split())}


def _drop(args: argparse.Namespace, session: Session, settings: options.Settings) -> int:
    if not (args.ids or args.topic):
        raise UsageError("say which dead letters to drop: their ids, or --topic")
    found = _find(args, session, settings)
    if not args.execute:
        return _dry(args, found, "would be dropped")
    with session.connection.transaction():
        settled = [dead_letters.settle(session.connection, each.id, "dropped", schema=session.schema) for each in found]
    if args.json:
        output.print_json({"dead_letters": [_document(letter) for letter in settled if letter is not None]})
    else:
        print(f"{sum(letter is not None for letter in settled)} of {len(found)} dropped")
    return 0


def _dry(args: argparse.Namespace, found: list[DeadLetter], what: str) -> int:
    _print(args, found, "there are no dead letters")
    print(f"dry run: {len(found)} {what}; --execute does it", file=sys.stderr)
    return 0


def _print(args: argparse.Namespace, found: list[DeadLetter], nothing: str) -> None:
    if args.json:
        output.print_json({"dead_letters": [_document(letter) for letter in found]})
    elif found:
        output.print_table(_HEADER, [_cells(letter) for letter in found], give=_GIVE)
    else:
        print(nothing)


def _cells(letter: DeadLetter) -> list[object]:
    error = f"{letter.error_class.rpartition('.')[2]}: {letter.error}"
    return [
        letter.id,
        letter.group_id,
        Partition(letter.topic, letter.partition),
        letter.message_offset,
        output.ago(letter.dead_seconds_ago),
        letter.attempts,
        letter.status,
        error if len(error) <= _SHOWN_CHARACTERS else f"{error[:_SHOWN_CHARACTERS]}...",
    ]


def _document(letter: DeadLetter) -> dict[str, Any]:
    headers = [] if letter.headers is None else [[name, _readable(value)] for name, value in letter.headers]
    document = asdict(letter) | {"key": _readable(letter.key), "value": _readable(letter.value), "headers": headers}
    del document["header_names"], document["header_values"]
    return document


def _readable(value: str | bytes | None) -> str | None:
    """Give text as it is, and other bytes in base64 behind a prefix that says so."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(value).decode()}"
