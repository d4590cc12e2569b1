"""Move money between accounts, once per payment, and keep a statement of it.

Payments are JSON: {"from": 1, "to": 2, "amount": "12.50"}. Stop it with SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import os

import psycopg

from exactly_once import ExactlyOnceConsumer, Unit

logger = logging.getLogger("transfers")

TABLES = """
    CREATE TABLE IF NOT EXISTS transfer_account (id int PRIMARY KEY, balance numeric NOT NULL DEFAULT 0);
    CREATE TABLE IF NOT EXISTS transfer_statement (account int, amount numeric, said_at timestamptz DEFAULT now());
"""


def transfer(unit: Unit) -> None:
    """Apply one batch of payments: three statements, whatever its size."""
    payments = [json.loads(message.value() or b"{}") for message in unit.messages]
    moves = [(p["from"], "-" + p["amount"]) for p in payments] + [(p["to"], p["amount"]) for p in payments]
    accounts, amounts = map(list, zip(*moves, strict=True))
    unit.execute(
        "INSERT INTO transfer_account SELECT DISTINCT unnest(%s::int[]) ON CONFLICT DO NOTHING",
        [accounts],
    )
    unit.execute(
        "UPDATE transfer_account SET balance = balance + moved.amount "
        "FROM (SELECT id, sum(amount) AS amount FROM unnest(%s::int[], %s::numeric[]) AS m(id, amount) GROUP BY id) "
        "AS moved WHERE transfer_account.id = moved.id",
        [accounts, amounts],
    )
    unit.copy("transfer_statement", ["account", "amount"], moves)


def main() -> None:
    """Run until a signal comes."""
    logging.basicConfig(level=logging.INFO)
    with psycopg.connect(os.environ["EXACTLY_ONCE_CONNINFO"], autocommit=True) as connection:
        connection.execute(TABLES)
    with ExactlyOnceConsumer(
        {"bootstrap.servers": os.environ["EXACTLY_ONCE_BOOTSTRAP_SERVERS"], "group.id": "transfers"},
        conninfo=os.environ["EXACTLY_ONCE_CONNINFO"],
        migrate=True,
    ) as consumer:
        consumer.subscribe(["transfers"], on_assign=tell)
        consumer.run(transfer)


def tell(consumer: ExactlyOnceConsumer, partitions: object) -> None:
    """Say what this worker got; called by the loop, with the real offsets."""
    logger.info("reading %s", partitions)


if __name__ == "__main__":
    main()
