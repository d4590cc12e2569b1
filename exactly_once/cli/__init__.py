"""The command line: ``exactly-once``, the operator's commands over the ledger.

Only the standard library is imported here: the package around may turn out to be somebody else's, and a
command's own needs are met when the command line names it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from .problems import EXIT_CODES, CommandParser, UsageError, one_line, other_distribution, without_secrets

COMMANDS = ("migrate", "status", "reset", "adopt", "hand-over", "dead-letters", "publish", "sink", "demo", "soak")
_NEED_EXTRA = ("demo", "soak")
_DEMO_EXTRA = "pip install 'kafka-exactly-once[demo]'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse itself exits with 2 on a wrong command line."""
    given = sys.argv[1:] if argv is None else list(argv)
    args = argparse.Namespace()
    try:
        if (found := other_distribution()) is not None:
            return _fail(found)
        _parser(given).parse_args(given, args)
        code = _run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read our output has left; the interpreter would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001  (the last place where an error can become one line)
        return _told(error, args)


def _parser(given: Sequence[str]) -> CommandParser:
    """Make the parser; of the commands only the one that is named is imported, or all for the help."""
    parser = CommandParser(
        prog="exactly-once",
        description="Look at and change the ledger: the offsets of consumer groups that live in Postgres.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"kafka-exactly-once {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=CommandParser)
    named = [name for name in given[:1] if name in COMMANDS]
    for name in named or COMMANDS:
        _add(commands, name, is_named=bool(named))
    return parser


def _add(commands: argparse._SubParsersAction[CommandParser], name: str, *, is_named: bool) -> None:
    try:
        _module(name).add_parser(commands)
    except ImportError:
        if is_named:
            raise
        commands.add_parser(name, help=f"needs an extra: {_DEMO_EXTRA}", add_help=False)


def _run(args: argparse.Namespace) -> int:
    return int(_module(args.command).run(args))


def _module(name: str) -> ModuleType:
    """Import a command's module.

    :raises ImportError: naming the extra that the demo and the soak need.
    """
    try:
        return importlib.import_module(f".{name.replace('-', '_')}", __name__)
    except ImportError as error:
        if name not in _NEED_EXTRA:
            raise
        raise _lacking(error, name) from error


def _lacking(error: ImportError, name: str) -> ImportError:
    return ImportError(f"the {name} needs packages that are not installed ({error}): {_DEMO_EXTRA}")


def _told(error: Exception, args: argparse.Namespace) -> int:
    """Tell an error in one line on stderr, behind its traceback if that was asked for."""
    secrets = getattr(args, "secrets", ())
    command = getattr(args, "command", None)
    if isinstance(error, ImportError) and command in _NEED_EXTRA:
        error = error if _DEMO_EXTRA in str(error) else _lacking(error, command)
    if getattr(args, "debug", False):
        sys.stderr.write(without_secrets("".join(traceback.format_exception(error)), secrets))
    return _fail(one_line(error, secrets), code=2 if isinstance(error, UsageError) else 1)


def _fail(message: str, code: int = 1) -> int:
    sys.stdout.flush()
    print(f"exactly-once: error: {message}", file=sys.stderr)
    return code


def _version() -> str:
    return str(importlib.import_module("exactly_once").__version__)
