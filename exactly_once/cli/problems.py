"""Problems: what a command cannot do, in one line that holds no secret. Imports the library when it must."""

from __future__ import annotations

import argparse
import importlib
import re
import textwrap
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NoReturn

EXIT_CODES = """\
exit codes:
  0    done (a dry run too)
  1    not done, or done and the result could not be written: stderr has one line about why and what mends it; status \
--check: something needs an operator
  2    the command line, an environment variable or the configuration file is wrong
  130  interrupted
  141  whoever read the output has left
  143  sink: SIGTERM, and the end that --until-end asked for was not reached, or the transaction in hand was given up, \
after --stop-seconds or a second SIGTERM; it comes again"""

# The exit code of a run that shows nothing.
CUT_SHORT = 3

_LEAST = 11  # characters of a line of help, which argparse has at least, too

# By the name of the class: psycopg, which defines them, must not be imported here.
_HINTS = {
    "InsufficientPrivilege": (
        "`exactly-once migrate --sql --role NAME`, with the same --schema, prints a worker's grants on the ledger; to "
        "drop or replay dead letters, also by reset, be the owner of the schema; tables of your own need GRANT INSERT, "
        "those that are changed by key SELECT, UPDATE and DELETE, too, and TEMPORARY ON DATABASE, and making one USAGE "
        "and CREATE ON SCHEMA; sequences of their defaults need USAGE, and functions EXECUTE"
    ),
    "LockNotAvailable": "a unit of work, perhaps of a process that stands still, holds the rows: try again",
    "QueryCanceled": (
        "a statement waited too long, mostly for a lock of another session (pg_blocking_pids names it), for the "
        "statement_timeout of the role or database: try again, or ALTER ROLE ... SET statement_timeout"
    ),
    "IdleInTransactionSessionTimeout": (
        "the idle_in_transaction_session_timeout of the role or database is shorter than one message takes: ALTER ROLE "
        "... SET idle_in_transaction_session_timeout"
    ),
    "ReadOnlySqlTransaction": (
        "the server is a standby, or default_transaction_read_only is on: name the primary, or add "
        "target_session_attrs=read-write to the connection string, which finds it among several"
    ),
    "InvalidSchemaName": "run `exactly-once migrate`, or pass --schema",
}
# What the library's errors say in Python, and how the command line and the file say it.
_IN_OPTIONS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r'on_poison="dead-letter"', "--on-poison dead-letter"),
        (r",? or pass (wait_for_topics|migrate)=True", ""),
        (r"\b(mode|missing)='(\S+)'", r"--\1 \2"),
        (r"\bstart=(['\"])(\S+)\1", r"--start \2"),
        (r"\b([Ss]ay) (key|missing|rest|start|schema)=", r"\1 --\2 "),
        (r"\bon_tombstone ?= ?(['\"])(\w+)\1", r"--on-tombstone \2"),
        (r"\bleave start= out", "leave --start out"),
        (r"\bmax_messages=", "--max-messages "),
        (r"\bset on_out_of_range=", "say --on-out-of-range"),
        (r"\bon_out_of_range=(?=[ .])", "--on-out-of-range"),
        (r"\bin_a_row=", "--dead-letter-limit "),
        (r"\bin_window=", "--dead-letter-window "),
        (r"\b(epoch|fields|update|newest_by|metadata|naive_timestamps|decimal)=", r"\1 = "),
    )
]


class CommandError(Exception):
    """A command refuses to do what it was asked, or cannot."""


class UsageError(CommandError):
    """The command line, the environment and the configuration file lack something, or do not fit."""


class _Help(argparse.HelpFormatter):
    """Help as wide as the terminal: paragraphs are filled, exit codes too; other lines that are indented are code."""

    def _format_usage(self, *given: Any) -> str:
        # Options of which one is to be given stay in one line, however long.
        lines: list[str] = []
        for line in super()._format_usage(*given).splitlines():
            indent = " " * (len(line) - len(line.lstrip()) + 1)
            lines += textwrap.wrap(
                line, max(self._width, _LEAST), subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
            ) or [line]
        return "\n".join(lines) + "\n\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for is_paragraph, block in groupby(text.splitlines(), lambda line: line[:1].strip() != ""):
            if is_paragraph:
                lines += textwrap.wrap(" ".join(block), width, break_on_hyphens=False, break_long_words=False)
                continue
            for line in block:
                code = re.match(r"  \d+ +", line)
                lines += textwrap.wrap(line, width, subsequent_indent=" " * code.end()) if code else [line]
        return "\n".join(indent + line for line in lines)


class CommandParser(argparse.ArgumentParser):
    """A parser whose complaints repeat no secret and whose help fits the terminal."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse would take no notice of a reader that has left or a disk that is full.
        print(message, end="", file=file, flush=True)

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and one line; argparse would repeat a connection string that it cannot place."""
        name = self.prog.split()[0]
        self.exit(2, f"{name}: error: {without_secrets(message)}; see {self.prog} --help\n")


def other_distribution() -> str | None:
    """Return a message if the package that was imported as ``exactly_once`` is not this one."""
    package = importlib.import_module("exactly_once")
    if hasattr(package, "ExactlyOnceConsumer"):
        return None
    return (
        f"the package exactly_once in {package.__file__} is not kafka-exactly-once: another distribution, called "
        "exactly-once, has the same import name. Both cannot be installed together: pip uninstall -y exactly-once "
        "kafka-exactly-once && pip install kafka-exactly-once"
    )


def one_line(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """Return an error and what mends it, in one line."""
    # What a server reports of a statement goes on for several lines: the statement itself, and where in it.
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    text = " ".join((primary or str(error)).split()) or type(error).__name__
    hint = _HINTS.get(type(error).__name__)
    # Worded for users by us, by the drivers, or by the system about a file; others are defects, named by their class.
    is_worded = isinstance(error, (CommandError, ImportError, OSError))
    package = type(error).__module__.split(".")[0]
    if package == "exactly_once":
        text = in_options(text)
    elif not is_worded and package not in ("psycopg", "cimpl"):
        text = f"{type(error).__name__}: {text} (--debug shows where)"
    return without_secrets(f"{text}; {hint}" if hint else text, secrets)


def in_options(text: str) -> str:
    """Say in the words of the command line what the library says in Python's."""
    for pattern, replacement in _IN_OPTIONS:
        text = pattern.sub(replacement, text)
    return text


def without_secrets(text: str, secrets: Iterable[str] = ()) -> str:
    """Hide what is known to be secret, and what looks like the password of a connection string."""
    # Not before :func:`other_distribution` was asked: somebody else's package has no such module.
    hidden: str = importlib.import_module("exactly_once._redaction").without_secrets(text, secrets)
    return hidden
