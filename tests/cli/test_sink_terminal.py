"""The sink on a real terminal: one line moves, records stand above it, whatever the width and the number of workers."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.cli.test_sink import rows, send, workers_of
from tests.support.topics import create_topic
from tests.support.waiting import until

Database = psycopg.Connection[Any]
RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ")


class Screen:
    """What a terminal shows of bytes: it knows a return, a new line, and the erasing of a line's rest."""

    def __init__(self, width: int) -> None:
        self.lines = [""]
        self._width, self._column, self._left = width, 0, b""

    def feed(self, data: bytes) -> None:
        text = (self._left + data).decode(errors="ignore")
        cut = text.rfind("\x1b") if "\x1b" in text[-8:] and not text.endswith("K") else len(text)
        self._left = text[cut:].encode()
        for part in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+", text[:cut]):
            if part == "\n":
                self.lines.append("")
            elif part == "\x1b[K":
                self.lines[-1] = self.lines[-1][: self._column]
            elif part != "\r":
                for character in part:
                    if self._column == self._width:  # the next row of the screen
                        self.lines.append("")
                        self._column = 0
                    line = self.lines[-1].ljust(self._column)
                    self.lines[-1] = line[: self._column] + character + line[self._column + 1 :]
                    self._column += 1
            if part in ("\r", "\n"):
                self._column = 0


@contextmanager
def on_terminal(command: list[str], width: int) -> Iterator[tuple[subprocess.Popen[bytes], list[list[str]]]]:
    """Run a command on a terminal; yields what that shows after each piece of output."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    screen, seen = Screen(width), [[""]]

    def read() -> None:
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # nobody has the other end
                return
            screen.feed(data)
            seen.append(screen.lines[:])

    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment) as process:
        os.close(its)
        reading = threading.Thread(target=read)
        reading.start()
        try:
            yield process, seen
        finally:
            children = workers_of(process) if process.poll() is None else []
            process.kill()
            for child in children:
                child.kill()
            process.wait(30)
            reading.join(30)
            os.close(ours)


@pytest.mark.parametrize(("width", "workers"), [(80, 2), (100, 1), (160, 2)])
def test_one_line_moves_below_the_records(
    *, width: int, workers: int, bootstrap_servers: str, conninfo: str, name: str, db: Database
) -> None:
    create_topic(bootstrap_servers, 2, name=name)
    db.execute(f"CREATE TABLE {name} (id int NOT NULL)")
    send(bootstrap_servers, name, [(str(i), {"id": None if i in (7, 10) else i, "more": i}) for i in range(40)])
    command = [sys.executable, "-m", "exactly_once", "sink", "--topic", name, "--table", name, "--group-id", name]
    command += ["--bootstrap-servers", bootstrap_servers, "--conninfo", conninfo, "--workers", str(workers)]
    command += ["--on-poison", "dead-letter"]
    with on_terminal(command, width) as (process, seen):
        until(lambda: len(rows(db, name)) == 38, 120, "every row")
        until(lambda: re.match(r" +40 messages  ", seen[-1][-1]), 120, "the sum of all workers")
        send(bootstrap_servers, name, [(str(i), {"id": i}) for i in range(40, 1000)])
        until(lambda: re.match(r" +1,000 messages  ", seen[-1][-1]), 120, "the new sum")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    moving = {shown[-1] for shown in seen if re.match(r" +[\d,]+ messages", shown[-1])}
    assert all(len(line) < width for line in moving), moving
    assert len({line.index("messages") for line in moving}) == 1, "it holds still"
    above = [line for line in seen[-1] if line.strip()]
    assert "as a dead letter" in "".join(above), above  # which may go on in the next row
    # A record longer than the screen goes on in the next row; none stands behind the line that moves.
    glued = [line for line in seen[-1] if (found := RECORD.search(line)) is not None and found.start() > 0]
    assert glued == []
    left = [line for line in above if re.match(r" +[\d,]+ messages", line)]
    assert len(left) <= 1, "what has moved is not left behind"
