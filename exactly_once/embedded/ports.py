"""Free TCP ports on the loopback interface."""

from __future__ import annotations

import random
import socket
import sys

from .errors import EmbeddedError

# Below the range Linux and macOS use for outgoing connections: while a server is stopped, a client that
# retries could otherwise be given the server's own port as its source and connect to itself.
_CANDIDATES = range(20_000, 32_000)
_TRIES = 200  # on a machine on which so many in a row are taken, something else is wrong
# Not the module's functions: a test runner that seeds them would make parallel runs choose alike.
_random = random.SystemRandom()
_given: set[int] = set()  # by this process: its servers are not up yet, or stopped and to come back


def free_port() -> int:
    """Choose a port of 127.0.0.1 that nobody listens on and that was not given before; on Linux, to no process."""
    for port in _random.sample(_CANDIDATES, _TRIES):
        if port in _given:
            continue
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            if sys.platform == "linux":
                # Kept until this process ends. There a server, which sets this option, may listen beside a socket that
                # only has it and the port, while the bind above, without the option, fails in every other process.
                candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                candidate.detach()
        _given.add(port)
        return port
    raise EmbeddedError(f"no free port between {_CANDIDATES.start} and {_CANDIDATES.stop} on 127.0.0.1")


def accepts(port: int) -> bool:
    """Return whether something accepts connections on *port* of 127.0.0.1."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
