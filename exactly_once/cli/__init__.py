"""The command line: ``exactly-once``, the operator's commands over the ledger.

Only the standard library is imported here: the package around may turn out to be somebody else's, and a
command's own needs are met when the command line names it.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import TextIO

from .problems import CUT_SHORT, EXIT_CODES, CommandParser, UsageError, one_line, other_distribution, without_secrets

COMMANDS = (
    "migrate",
    "status",
    "reset",
    "adopt",
    "hand-over",
    "dead-letters",
    "publish",
    "sink",
    "demo",
    "soak",
    "verify",
)
# They need an extra, and end in a verdict: what ended by an error shows nothing.
_RUNS = ("demo", "soak", "verify")
_DEMO_EXTRA = "pip install 'kafka-exactly-once[demo]'"


class _Nowhere(io.TextIOWrapper):
    """Stands for a stream that was closed before we began; it has its number, which the next file would get."""

    has_lost = False  # whether anything was written to it

    def __init__(self) -> None:
        super().__init__(open(os.devnull, "wb"))  # noqa: PTH123, SIM115

    def write(self, text: str) -> int:
        self.has_lost = True
        return super().write(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse itself exits with 2 on a wrong command line."""
    given = sys.argv[1:] if argv is None else list(argv)
    sys.stdout, sys.stderr = (stream or _Nowhere() for stream in (sys.stdout, sys.stderr))
    # What the terminal's encoding lacks is escaped, as on stderr: what was done must not end as an error.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    # Of the commands only the one that is named is imported: others need extras, and take their time.
    named = given[0] if given and given[0] in COMMANDS else None
    args = argparse.Namespace()
    try:
        if (found := other_distribution()) is not None:
            return _fail(found)
        parser = CommandParser(
            prog="exactly-once",
            description="Look at and change the ledger: the offsets of consumer groups that live in Postgres.",
            epilog=EXIT_CODES,
        )
        version = importlib.import_module("exactly_once").__version__
        parser.add_argument("--version", action="version", version=f"kafka-exactly-once {version}")
        commands = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=CommandParser)
        for name in [named] if named else COMMANDS:
            try:
                _module(name).add_parser(commands)
            except ImportError:
                if named:
                    raise
                commands.add_parser(name, help=f"needs an extra: {_DEMO_EXTRA}", add_help=False)
        parser.parse_args(given, args)
        code = int(_module(args.command).run(args))
        # Here and not at exit, where a reader that has left could no longer be told from another problem.
        sys.stdout.flush()
        if isinstance(sys.stdout, _Nowhere) and sys.stdout.has_lost:
            done = getattr(args, "done", None)
            return _fail("stdout is closed: the result is not written" + (f", but {done}" if done else ""))
        return code
    except BrokenPipeError:
        # Whoever read our output has left.
        _discard(sys.stdout)
        if done := getattr(args, "done", None):
            _tell(f"exactly-once: {done}, and whoever read the output has left")
        return 141  # as shells count: 128 + SIGPIPE
    except KeyboardInterrupt:
        return 130  # as shells count: 128 + SIGINT
    except Exception as error:  # noqa: BLE001  (the last place where an error can become one line)
        secrets = getattr(args, "secrets", ())
        text = one_line(error, secrets)
        if isinstance(error, ImportError) and named in _RUNS and _DEMO_EXTRA not in text:
            text = f"the {named} needs packages that are not installed ({text}): {_DEMO_EXTRA}"
        if getattr(args, "debug", False):
            sys.stderr.write(without_secrets("".join(traceback.format_exception(error)), secrets))
        if isinstance(error, OSError) and (done := getattr(args, "done", None)):
            text = f"{text}: the result is not written, but {done}"
        code = CUT_SHORT if named in _RUNS else 1
        return _fail(text, code=2 if isinstance(error, UsageError) else code)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name.replace('-', '_')}", __name__)


def _discard(stream: TextIO) -> None:
    """Have what is not written yet go nowhere; the interpreter would complain once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(message: str, code: int = 1) -> int:
    try:
        sys.stdout.flush()
    except OSError:
        _discard(sys.stdout)
    _tell(f"exactly-once: error: {message}")
    return code


def _tell(line: str) -> None:
    try:
        print(line, file=sys.stderr)
    except OSError:  # nobody reads it; the exit code tells all the same
        _discard(sys.stderr)
