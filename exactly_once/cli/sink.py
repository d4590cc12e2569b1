"""``exactly-once sink``: copy topics into tables, each message once, without code; its options."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from . import options

_DESCRIPTION = """\
Copy the messages of topics into a table: one batch, one transaction, together with the offsets, so that each
message is there once whatever dies when. Several topics and tables: a [[sink]] for each in the file."""
_EXAMPLE = """
A file with two tables; what only the file can say is shown here once:
  [run]                                    # what stands under "run" above, with _ for -
  workers = 2
  [[sink]]
  topics = ["payments"]
  table = "bank.payment"
  metadata = { kafka_offset = "offset" }   # topic, partition, offset, timestamp, key, headers
  epoch = { paid = "ms" }                  # timestamps that are numbers: s, ms, us, ns
  naive_timestamps = "utc"                 # or "refuse": times without a zone
  [[sink]]
  topics = ["customers"]
  table = "customer"
  mode = "upsert"
  fields = { id = "id", city = "address.city" }   # only these are filled
  update = ["city"]                        # of a row that exists only these change
  newest_by = "changed"                    # a row older than the stored one is ignored
  on_tombstone = "delete"                  # or "refuse", "skip": a message without a value
"""
_FORMATS = ("json", "debezium", "connect", "maxwell", "canal", "cloudevents", "csv", "msgpack", "raw")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "sink", help="copy topics into tables", description=_DESCRIPTION, epilog=options.EPILOG + "\n" + _EXAMPLE
    )
    what = parser.add_argument_group("what")
    what.add_argument("--topic", action="append", dest="topics", metavar="TOPIC", help="may be said several times")
    what.add_argument("--table", metavar="TABLE", help='as in SQL: payment, bank.payment, "Odd Name"')
    what.add_argument(
        "--mode", choices=("append", "upsert", "insert-ignore"), help="append (default); upsert by key; insert-ignore"
    )
    what.add_argument("--key", action="append", metavar="COLUMN", help="of an upsert (the primary key)")
    what.add_argument(
        "--format", choices=_FORMATS, help="what messages are: JSON (default), or raw: columns key and value"
    )
    what.add_argument("--schema-registry", metavar="URL", help="where the schemas of Avro, Protobuf, JSON Schema are")
    what.add_argument("--csv-columns", type=_names, metavar="A,B", help="names of the fields (the table's columns)")
    what.add_argument("--csv-delimiter", metavar="C", help="between fields (,)")
    what.add_argument("--rest", metavar="COLUMN", help='jsonb column for fields without a column; "" for none')
    what.add_argument(
        "--missing", choices=("null", "default", "keep"), help="where a field is missing (its default, or null)"
    )
    what.add_argument("--lax", action="store_true", default=None, help="take numbers that are text")
    what.add_argument(
        "--create-table", action="store_true", help="make a table that is not there, from a sample, with a column rest"
    )
    what.add_argument("--add-columns", action="store_true", help="add columns for fields of a sample; drops nothing")
    run_ = parser.add_argument_group("run")
    run_.add_argument(
        "--start", metavar="WHERE", help="for a group without offsets: earliest, latest, committed, a time"
    )
    for option, kind, name, text in (
        ("workers", int, "N", "processes of the group (1)"),
        ("max-messages", int, "N", "in a transaction (10000)"),
        ("linger-seconds", float, "S", "wait so long for a transaction to fill (0.05)"),
        ("stop-seconds", float, "S", "what the transaction in hand may take after SIGTERM (20.0)"),
        ("dead-letter-limit", int, "N", "stop after so many in a row (10)"),
        ("dead-letter-window", int, "N", "or after so many of the group in an hour (1000)"),
        ("metrics-port", int, "PORT", "serve /metrics, /livez and /readyz"),
        ("metrics-host", str, "HOST", "at this address (127.0.0.1)"),
    ):
        run_.add_argument(f"--{option}", type=kind, metavar=name, help=text)
    run_.add_argument("--until-end", action="store_true", default=None, help="stop where the topics end now")
    run_.add_argument("--on-poison", choices=("stop", "dead-letter"), help="(stop)")
    run_.add_argument("--dry-run", action="store_true", help="decode 100 messages and show the rows")
    options.add_common(parser, json="write records as JSON, one in a line; with --dry-run print one JSON document")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Do it.

    :raises ImportError: naming the extra that it needs.
    """
    return int(importlib.import_module(".sink_run", __package__).run(args))
