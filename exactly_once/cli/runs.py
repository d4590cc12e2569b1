"""Runs that are drawn from a seed and end in a verdict: their options, their exit code, and an orderly end."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .options import whole
from .problems import CommandError, UsageError, one_line

_ROOM_BYTES = 20 << 20  # Postgres asks for 16 MB at a time


def add_seed(parser: argparse.ArgumentParser, repeats: str) -> None:
    """Add the options of a run that is drawn from a seed and ends in a verdict."""
    parser.add_argument("--seed", type=whole, metavar="N", help=repeats)
    parser.add_argument("--json", action="store_true", help="the result as one JSON object in the last line")
    parser.add_argument("--debug", action="store_true", help="on an error print the traceback, too")


def drawn(args: argparse.Namespace, below: int) -> int:
    """Return the seed that was given, or one that is short enough to be typed again."""
    return random.SystemRandom().randrange(below) if args.seed is None else int(args.seed)


@contextlib.contextmanager
def naming_a_full_disk() -> Iterator[None]:
    """Name a full disk as the cause of an error; servers without room report it in other words."""
    try:
        yield
    except Exception as error:
        place = tempfile.gettempdir()
        if shutil.disk_usage(place).free > _ROOM_BYTES:
            raise
        raise CommandError(
            f"the disk of {place} is full, and the servers keep their data there; TMPDIR names another place: {error}"
        ) from error


@contextlib.contextmanager
def ending_in_order(args: argparse.Namespace, so_far: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Leave by an exception when this process is asked to end, or its terminal is gone: what it started ends, too.

    With ``--json`` there is a result then as well, and behind any other error: why it was cut short, and ``so_far``.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup asks for
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    except (BrokenPipeError, UsageError):  # nobody reads it, or nothing was begun
        raise
    except BaseException as error:
        if args.json:
            why = one_line(error) if isinstance(error, Exception) else "interrupted"
            print(json.dumps({"ok": False, "cut_short": why, **so_far()}), flush=True)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
