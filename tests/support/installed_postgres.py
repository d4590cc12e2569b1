"""The Postgres that this machine has installed, where the embedded one was built without something."""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from exactly_once.embedded import programs
from exactly_once.embedded.ports import free_port
from exactly_once.embedded.process import ServerProcess
from tests.support.waiting import until


def programs_with(option: str) -> Path | None:
    """Return the directory of a server that was configured with an option, such as ``--with-icu``; None without one."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_config"), reverse=True)
    if on_path := shutil.which("pg_config"):
        found.insert(0, Path(on_path))
    for pg_config in found:
        asked = subprocess.run([pg_config, "--configure", "--bindir"], capture_output=True, text=True, check=False)
        configured, _, directory = asked.stdout.strip().rpartition("\n")
        if option in configured and Path(directory, "postgres").exists():
            return Path(directory)
    return None


@contextmanager
def installed_postgres(directory: Path) -> Iterator[str]:
    """Run the server whose programs are there for as long as the block; its conninfo."""
    place = Path(tempfile.mkdtemp(prefix="exactly-once-installed-"))
    data, password, port = place / "data", place / "password", free_port()
    password.write_text(secrets.token_hex(16))
    programs.hand_over(place)
    options = ["--username=postgres", f"--pwfile={password}", "--auth=scram-sha-256", "--no-sync"]
    programs.run([directory / "initdb", "-D", data, "--encoding=UTF8", "--locale=C", *options], place)
    settings = {"port": str(port), "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
    user, group = programs.account()
    server = ServerProcess(
        [directory / "postgres", "-D", data, *(f"--{name}={value}" for name, value in settings.items())],
        log=place / "server.log",
        end_signal=signal.SIGQUIT,
        user=user,
        group=group,
        remove=place,
    )
    conninfo = f"postgresql://postgres:{password.read_text()}@127.0.0.1:{port}/postgres"

    def answers() -> bool:
        assert server.is_running(), server.log_tail()
        try:
            psycopg.connect(conninfo).close()
        except psycopg.OperationalError:
            return False
        return True

    try:
        until(answers, 60, "the installed Postgres")
        yield conninfo
    finally:
        server.end(signal.SIGQUIT, timeout_seconds=30)
