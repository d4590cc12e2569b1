"""``exactly-once sink``: copy topics into tables, each message once, without code; its options."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from exactly_once._model import RangePolicy

from . import options

_DESCRIPTION = """\
Copy the messages of topics into a table: one batch, one transaction, together with the offsets, so that each
message is there once whatever dies when. Several topics and tables: a [[sink]] for each in the file."""
_EXAMPLE = """
A file with two tables; options of a pair are tables there, by the same names:
  [run]                                   # the options of "run", with _ for -
  workers = 2
  [[sink]]
  topics = ["payments"]
  table = "bank.payment"
  metadata = { kafka_offset = "offset" }
  where = { type = ["paid", "refunded"] }
  [[sink]]
  topics = ["customers"]
  table = "customer"
  mode = "upsert"
  fields = { id = "id", city = "address.city" }
  constants = { source = "shop" }
"""
_FORMATS = ("json", "debezium", "connect", "maxwell", "canal", "cloudevents", "csv", "msgpack", "raw")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "sink", help="copy topics into tables", description=_DESCRIPTION, epilog=options.EPILOG + "\n" + _EXAMPLE
    )
    what = parser.add_argument_group("what")
    what.add_argument("--topic", action="append", dest="topics", metavar="TOPIC", help="may be said several times")
    what.add_argument("--topics-regex", metavar="REGEX", help="instead: all topics of such names, new ones too")
    what.add_argument(
        "--table",
        action=options.Once,
        metavar="TABLE",
        help='as in SQL: payment, bank.payment, "Odd Name"; with a pattern also bank.{topic}, or {1} for a group of it',
    )
    what.add_argument(
        "--mode", choices=("append", "upsert", "insert-ignore"), help="append (default); upsert by key; insert-ignore"
    )
    what.add_argument("--key", action="append", metavar="COLUMN", help="of an upsert (the primary key)")
    what.add_argument(
        "--format",
        choices=_FORMATS,
        metavar="FORMAT",
        help=f"what messages are: {', '.join(_FORMATS)}; JSON by default, and raw has the columns key and value",
    )
    what.add_argument("--schema-registry", metavar="URL", help="where the schemas of Avro, Protobuf, JSON Schema are")
    what.add_argument(
        "--csv-columns",
        type=lambda text: [name.strip() for name in text.split(",")],
        metavar="A,B",
        help="names of the fields (the table's columns)",
    )
    what.add_argument("--csv-delimiter", metavar="C", help="between fields (,)")
    what.add_argument(
        "--create-table", action="store_true", help="make a table that is not there, from a sample, with a column rest"
    )
    what.add_argument("--add-columns", action="store_true", help="add columns for fields of a sample; drops nothing")
    what.add_argument(
        "--evolve",
        choices=("add-columns",),
        help="add columns for fields that come while it runs, as the table's owner",
    )
    _add_shape(parser)
    run_ = parser.add_argument_group("run")
    run_.add_argument(
        "--start", metavar="WHERE", help="for a group without offsets: earliest, latest, committed, a time"
    )
    # How much is too much is up to what reads the file: it has the same keys.
    seconds = options.number(float, "must be a number of seconds, 0 or more", least=0, most=options.YEAR_SECONDS)
    for option, kind, name, text in (
        ("workers", options.whole, "N", "processes of the group (1)"),
        ("max-messages", options.whole, "N", "in a transaction (10000)"),
        ("linger-seconds", seconds, "S", "wait so long for a transaction to fill (0.05)"),
        ("stop-seconds", seconds, "S", "what the transaction in hand may take after SIGTERM (20.0)"),
        ("dead-letter-limit", options.whole, "N", "stop after so many in a row (10)"),
        ("dead-letter-window", options.whole, "N", "or after so many of the group in an hour (1000)"),
        ("claims-window", seconds, "S", "hold the keys of --claim at least so long (for ever)"),
        ("metrics-port", options.whole, "PORT", "serve /metrics, /livez and /readyz"),
        ("metrics-host", str, "HOST", "at this address (127.0.0.1)"),
    ):
        run_.add_argument(f"--{option}", type=kind, metavar=name, help=text)
    run_.add_argument("--until-end", action="store_true", default=None, help="stop where the topics end now")
    run_.add_argument("--on-poison", choices=("stop", "dead-letter"), help="(stop)")
    run_.add_argument(
        "--on-out-of-range",
        choices=get_args(RangePolicy),
        help="where the log has lost the next offset: leave the partition unread, or go to an end of the log (fail)",
    )
    run_.add_argument("--name", help="of the owner, as status shows it")
    run_.add_argument("--dry-run", action="store_true", help="decode 100 messages and show the rows")
    options.add_common(parser, json="write records as JSON, one in a line; with --dry-run print one JSON document")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what becomes of fields; those with a pair may be said several times."""
    scale = options.number(int, "must be a whole number, 0 or more", least=0, most=options.INT32)
    shape = parser.add_argument_group("fields and columns; a PATH has dots for objects in objects")
    for option, form, text in (
        ("field", "COLUMN=PATH", "fill only these columns"),
        ("rename", "COLUMN=PATH", "fill these so, the others by their names"),
        ("metadata", "COLUMN=SOURCE", "topic, partition, offset, timestamp, key, headers, header:NAME, key:PATH"),
        ("constant", "COLUMN=VALUE", "fill a column always alike"),
        ("type", "COLUMN=TYPE", "of a column that is made, whatever the sample says"),
        ("where", "PATH=VALUE", "only messages with this; several of one path: any of them"),
        ("where-not", "PATH=VALUE", "no messages with this"),
        ("epoch", "COLUMN=UNIT", "times that are numbers: s, ms, us, ns, days"),
        ("decimal", "COLUMN=SCALE", "numbers that are base64 of their bytes"),
        ("binary", "COLUMN=FORM", "bytes that are text: base64 (the default) or hex"),
    ):
        read = partial(_pair, read=scale) if option == "decimal" else _pair
        names = {"field": "fields", "constant": "constants", "type": "types"}
        dest = names.get(option, option.replace("-", "_"))
        shape.add_argument(f"--{option}", dest=dest, action="append", type=read, metavar=form, help=text)
    for option, form, text in (
        ("drop", "PATH", "a field that goes nowhere, not into rest either"),
        ("json-text", "COLUMN", "text in a json column holds JSON"),
        ("update", "COLUMN", "in an upsert only these change in a row that exists"),
    ):
        shape.add_argument(f"--{option}", action="append", metavar=form, help=text)
    shape.add_argument(
        "--flatten", nargs="?", const=True, metavar="BETWEEN", help='objects become their fields: a_b, with "_" between'
    )
    shape.add_argument(
        "--claim",
        metavar="PATH",
        help="the id of an event, whose first row is stored: a field, header:NAME, key:PATH, or key: for a whole key",
    )
    shape.add_argument("--rest", metavar="COLUMN", help='jsonb column for fields without a column; "" for none')
    shape.add_argument(
        "--missing", choices=("null", "default", "keep"), help="where a field is missing (its default, or null)"
    )
    shape.add_argument("--lax", action="store_true", default=None, help="take numbers that are text")
    shape.add_argument("--nul", choices=("refuse", "strip"), help="what becomes of NUL in text (refuse)")
    shape.add_argument("--naive-timestamps", choices=("refuse", "utc"), help="what times without a zone are (refuse)")
    shape.add_argument("--newest-by", metavar="COLUMN", help="ignore a row that is older than the stored one")
    shape.add_argument(
        "--on-tombstone", choices=("delete", "refuse", "skip"), help="a message without a value (delete in an upsert)"
    )
    shape.add_argument(
        "--on-truncate", choices=("refuse", "skip"), help="an event that the source was emptied (refuse)"
    )


def _pair(text: str, read: Callable[[str], Any] = str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} has no = with a name before it")
    return name, read(value)


def run(args: argparse.Namespace) -> int:
    """Do it.

    :raises ImportError: naming the extra that it needs.
    """
    return int(importlib.import_module(".sink_run", __package__).run(args))
