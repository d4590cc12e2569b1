"""A PgBouncer in transaction pooling mode, as a process of the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import psycopg

from exactly_once.embedded.ports import free_port
from tests.support.waiting import until

_UNPRIVILEGED = "nobody"  # PgBouncer refuses to run as root


def pgbouncer_missing() -> str | None:
    """Why no PgBouncer can be started here, or None."""
    return None if _program() else "there is no pgbouncer program (Debian package: pgbouncer)"


class PgBouncer:
    """Stands before the Postgres of a URI; `with PgBouncer(uri) as pooler: connect(pooler.conninfo)`.

    Anybody may log in, under any name; the server is asked with the account of the URI.
    """

    def __init__(self, conninfo: str, *, pool_size: int = 2, **settings: str | int) -> None:
        self._uri = urlsplit(conninfo)
        if self._uri.scheme not in ("postgresql", "postgres") or not self._uri.hostname:
            raise ValueError("the pooler needs a postgresql:// URI with a TCP host")
        self._settings: dict[str, str | int] = {
            "listen_addr": "127.0.0.1",
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "default_pool_size": pool_size,
            "max_client_conn": 200,
            "server_tls_sslmode": "disable",
            **settings,
        }

    def __enter__(self) -> PgBouncer:
        program = _program()
        if program is None:
            raise FileNotFoundError(pgbouncer_missing())
        self._directory = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
        self.port = free_port()
        self._write_config()
        user = _UNPRIVILEGED if os.geteuid() == 0 else None
        if user is not None:
            for path in (self._directory, *self._directory.iterdir()):
                shutil.chown(path, user)
        with (self._directory / "stderr").open("wb") as stderr:
            command = [program, "-q", str(self._directory / "pgbouncer.ini")]
            self._process = subprocess.Popen(command, stdout=stderr, stderr=stderr, user=user)
        try:
            until(self._answers, 10, "PgBouncer to let a client through")
        except BaseException as error:
            error.add_note(self.log())
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()  # SIGTERM is PgBouncer's immediate shutdown
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory)

    @property
    def conninfo(self) -> str:
        """The upstream's URI with host and port of the pooler."""
        account, at, _ = self._uri.netloc.rpartition("@")
        return urlunsplit(self._uri._replace(netloc=f"{account}{at}127.0.0.1:{self.port}"))

    @property
    def pid(self) -> int:
        """The process, for tests that stop or kill it."""
        return self._process.pid

    def log(self) -> str:
        """What it has logged up to now."""
        files = (self._directory / name for name in ("pgbouncer.log", "stderr"))
        return "\n".join(path.read_text() for path in files if path.exists())

    def _write_config(self) -> None:
        server: dict[str, object] = {
            "host": self._uri.hostname,
            "port": self._uri.port or 5432,
            "user": unquote(self._uri.username or "postgres"),
        }
        if self._uri.password:
            server["password"] = unquote(self._uri.password)
        target = " ".join(f"{key}={_quoted(value)}" for key, value in server.items())
        settings = {
            "listen_port": self.port,
            "logfile": self._directory / "pgbouncer.log",
            **self._settings,
        }
        lines = ["[databases]", f"* = {target}", "[pgbouncer]"]
        lines += [f"{key} = {value}" for key, value in settings.items()]
        (self._directory / "pgbouncer.ini").write_text("\n".join(lines) + "\n")

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"PgBouncer ended with status {self._process.returncode}")
        try:
            with psycopg.connect(self.conninfo, connect_timeout=5, prepare_threshold=None) as connection:
                return connection.execute("SELECT true").fetchone() == (True,)
        except psycopg.OperationalError:
            return False


def _program() -> str | None:
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    return shutil.which("pgbouncer", path=search)


def _quoted(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"
