"""Run one server program and end it when the process that asked for it is gone.

The parent starts this file with a pipe on standard input, writes one line of JSON with what to run,
reads the server's pid from standard output, and keeps the pipe open. A crash of the parent, ``kill -9``
included, closes the pipe; that works on every Unix. Standard library only, and run by path, so that it starts
in milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

# Longer than the five seconds after which Postgres itself kills children that ignore its request to quit.
_GRACE_SECONDS = 10.0


def main() -> int:
    """Run the server that standard input asks for; return its exit status."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    order = json.loads(line)
    with Path(order["log"]).open("ab") as log:
        child = subprocess.Popen(
            order["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=order["directory"],
            user=order["user"],
            group=order["group"],
            extra_groups=None if order["user"] is None else [],
        )
    print(child.pid, flush=True)
    # A request to the guard alone must not leave the server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ended, mark = os.pipe()

    def reap() -> None:
        child.wait()
        os.close(mark)

    try:
        threading.Thread(target=reap, daemon=True).start()
        # Until the server has ended or the parent is gone. A process forked from the parent may hold the pipe open
        # after the parent's end: hence the look at the parent's pid every second.
        while os.getppid() == order["parent"] and not select.select([sys.stdin, ended], [], [], 1.0)[0]:
            pass
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # A stopped server takes no other signal.
                child.send_signal(signal.SIGCONT)
                child.send_signal(order["end_signal"])
            try:
                child.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if order["remove"]:
                shutil.rmtree(order["remove"], ignore_errors=True)
    status = child.wait()
    return status if status >= 0 else 128 - status  # as shells report a signal


if __name__ == "__main__":
    sys.exit(main())
