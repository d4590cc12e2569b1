"""Claims: keys a second through the function behind unit.claim_many, with an empty and with a full older generation."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import LiteralString
from uuid import uuid4

import psutil
import psycopg
from common import Connection, make_tables

from exactly_once import embedded
from exactly_once.ledger.claims import Key, claim


def server_seconds(pid: int) -> float:
    """Return the processor time of a backend on this machine; a tick is ten milliseconds."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def measure(connection: Connection, batches: int, size: int, draw: Callable[[], Key]) -> str:
    """Claim fresh keys batch by batch; return keys a second: median, tenth best, and by processor time."""
    taken = []
    keys = [[draw() for _ in range(size)] for _ in range(batches)]
    client, server = time.process_time(), server_seconds(connection.info.backend_pid)
    for batch in keys:
        began = time.perf_counter()
        with connection.transaction():
            assert all(claim(connection, batch, schema="exactly_once", group_id="benchmark"))
        taken.append(time.perf_counter() - began)
    client, server = time.process_time() - client, server_seconds(connection.info.backend_pid) - server
    taken.sort()
    return (
        f"median {size / taken[batches // 2]:9,.0f} keys/s, best tenth {size / taken[batches // 10]:9,.0f} keys/s, "
        f"a batch of processor: client {client / batches * 1000:.2f} ms, server {server / batches * 1000:.2f} ms"
    )


def main() -> None:
    """Run as told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--size", type=int, default=1000)
    args = parser.parse_args()
    numbers = itertools.count()
    size: LiteralString = (
        "SELECT sum(pg_total_relation_size(t::regclass)) FROM exactly_once.claim_window, "
        "unnest(ARRAY[younger, older]) t"
    )
    for kind, draw in (("random UUIDs", uuid4), ("rising numbers", lambda: next(numbers))):
        with embedded.Postgres() as postgres, psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            make_tables(postgres.conninfo)
            print(f"{kind}, older empty:", measure(connection, args.batches, args.size, draw))
            # The window is over at once, and one turn makes the keys of before the older generation.
            connection.execute("SELECT exactly_once.claim_keep('benchmark', 1e-9)")
            connection.execute("SELECT exactly_once.claim_turn('benchmark')")
            print(f"{kind}, older full: ", measure(connection, args.batches, args.size, draw))
            ((total,),) = connection.execute(size).fetchall()
            print(f"{kind}, bytes a key: {int(str(total)) / (2 * args.batches * args.size):.0f}")


if __name__ == "__main__":
    main()
