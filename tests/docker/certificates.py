"""Certificates for one run of the tests: an authority, a server's, and an authority that nobody should believe."""

from __future__ import annotations

import subprocess
from pathlib import Path

_NAMES = "subjectAltName=DNS:localhost,DNS:postgres,IP:127.0.0.1"
_POSTGRES = """\
# Run once when the database is made: from then on nobody comes in without TLS and a password.
install -m 0600 /certificates/server.key "$PGDATA/server.key"
install -m 0644 /certificates/server.crt "$PGDATA/server.crt"
echo "ssl = on" >>"$PGDATA/postgresql.conf"
printf 'local all all trust\\nhostssl all all all scram-sha-256\\n' >"$PGDATA/pg_hba.conf"
"""


def make(folder: Path) -> None:
    """Fill a folder that is mounted into both servers."""
    for authority in ("ca", "other-ca"):
        _openssl(folder, authority, "-subj", f"/CN={authority}")
    _openssl(folder, "server", "-subj", "/CN=localhost", "-addext", _NAMES, "-CA", "ca.crt", "-CAkey", "ca.key")
    parts = [(folder / name).read_text() for name in ("server.key", "server.crt", "ca.crt")]
    (folder / "kafka.pem").write_text("".join(parts))
    (folder / "tls.sh").write_text(_POSTGRES)
    # The servers in the containers have accounts of their own.
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def _openssl(folder: Path, name: str, *options: str) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", f"{name}.key", "-out", f"{name}.crt", *options]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
