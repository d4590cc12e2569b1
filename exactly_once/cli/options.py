"""Options: what every command takes, from the command line, the environment and a TOML file."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from exactly_once.errors import ConfigurationError
from exactly_once.kafka.settings import admin_settings
from exactly_once.ledger.migrate import check_schema_name
from exactly_once.ledger.session import Connection, connector

from .named import Named, NamedConnect
from .problems import EXIT_CODES, UsageError

N = TypeVar("N", int, float)
_SHOWN = 40  # characters of a text that is no number
# What columns of Postgres and fields of Kafka's protocol hold.
INT32, INT64 = 2**31 - 1, 2**63 - 1
DAY_SECONDS, YEAR_SECONDS = 86_400.0, 31_536_000.0  # longer than anybody means, and no overflow of a timer
_KEYS = ("bootstrap_servers", "group_id", "conninfo", "schema")
_OF_SINK = ("sink", "run", "schema_registry")  # one file may serve the sink and the commands that look after it
_IN_FILE = (*_KEYS, "connect")  # a function has no place on a command line or in the environment
_ENVIRONMENT = {key: f"EXACTLY_ONCE_{key.upper()}" for key in ("bootstrap_servers", "group_id", "conninfo")}
_IN_KAFKA = {"bootstrap_servers": "bootstrap.servers", "group_id": "group.id"}
# Settings of confluent-kafka that are functions: a file cannot hold one, and a command needs none of these.
_CALLBACKS = ("error_cb", "stats_cb", "throttle_cb", "on_commit", "on_delivery", "partitioner_callback", "logger")
# A shorter secret, such as a piece of a password, stands in every sentence: hiding it would show it.
_SHORTEST = 4
# Too many rather than too few: a value that is hidden without need costs nothing.
_SECRET_KEY = re.compile(r"password|passphrase|secret|token|jaas|oauthbearer\.config|key\.pem|private\.key")

EPILOG = f"""\
The command line goes before the environment, which goes before the file. A file:
  # better without a password: ~/.pgpass, PGPASSFILE
  conninfo = "postgresql://bank@db.example:5432/bank"
  bootstrap_servers = "kafka.example:9092"
  group_id = "accounts"
  [kafka]    # any setting of librdkafka
  security.protocol = "SASL_SSL"
Where passwords expire, functions take their place: instead of conninfo  connect = "package.module:function"
which returns a psycopg.Connection; in [kafka]  oauth_cb = "package.module:function"  which returns a token.

{EXIT_CODES}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Which servers, group and schema a command is about. What may hold a secret is not in its repr."""

    schema: str
    group_id: str | None = None
    bootstrap_servers: str | None = None
    conninfo: str | None = field(default=None, repr=False)
    connect: NamedConnect | None = None
    """A function of the file that opens connections in the place of ``conninfo``."""
    kafka: Mapping[str, Any] = field(default_factory=dict, repr=False)
    secrets: frozenset[str] = field(default=frozenset(), repr=False)
    more: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The file's keys for the sink command alone."""

    def required(self, key: str) -> str:
        """Return a setting that the command cannot do without.

        :raises UsageError: naming the three places where it can be given.
        """
        value: str | None = getattr(self, key)
        if value:
            return value
        raise UsageError(
            f"pass --{key.replace('_', '-')}, or set {_ENVIRONMENT[key]}, or {key} in the file of --config"
        )

    def opener(self) -> Callable[[], Connection]:
        """Return what opens connections to Postgres.

        :raises UsageError: when nothing was given for it, or no connection string.
        """
        if self.connect is not None:
            return self.connect
        try:
            return connector(self.required("conninfo"))
        except ConfigurationError as error:
            raise UsageError(str(error)) from None

    def admin(self) -> dict[str, Any]:
        """Return the settings of a Kafka client that only asks and logs nothing by itself."""
        # librdkafka's own lines on stderr would stand between the command's one line and its reader.
        return {"log_level": 0, **admin_settings(self.kafka), "bootstrap.servers": self.required("bootstrap_servers")}


def add_common(parser: argparse.ArgumentParser, *, json: str = "print one JSON document") -> None:
    """Add the options that every command takes; ``json`` is the help of ``--json``."""
    group = parser.add_argument_group("where")
    brokers = _help("Kafka's brokers", "bootstrap_servers")
    group.add_argument("--bootstrap-servers", metavar="HOST:PORT,...", help=brokers)
    group.add_argument("--group-id", metavar="GROUP", help=_help("the consumer group", "group_id"))
    database = "connection string of Postgres; others can see a command line, so give a password elsewhere"
    group.add_argument("--conninfo", metavar="CONNINFO", help=_help(database, "conninfo"))
    group.add_argument("--schema", metavar="SCHEMA", help="schema of the ledger (exactly_once)")
    file = "file with any of these, see below"
    group.add_argument("--config", action=Once, metavar="FILE.toml", type=Path, help=file)
    look = parser.add_argument_group("how")
    look.add_argument("--json", action="store_true", help=json)
    look.add_argument("--debug", action="store_true", help="on an error print the traceback, too")


class Once(argparse.Action):
    """An option that takes one value, and may be taken for one that is given for each: the last would win."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) not in (None, values):
            parser.error(f"{option_string} is given twice, and takes one: run the command for each")
        setattr(namespace, self.dest, values)


def number(kind: type[N], complaint: str, *, least: N, most: N) -> Callable[[str], N]:
    """Return a type of argparse: a number within bounds. ``complaint`` follows a text that is none.

    There is no number without bounds: `float` reads "nan", which compares with nothing, and "inf".
    """

    def read(text: str) -> N:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text[:_SHOWN] or 'an empty text'} {complaint}")

    return read


whole = number(int, "must be a whole number, 0 or more", least=0, most=INT64)
positive = number(int, "must be a whole number above 0", least=1, most=INT32)
partition = number(int, "is not the number of a partition", least=0, most=INT32)


def add_execute(parser: argparse.ArgumentParser, *, does: str = "do it", has_reason: bool = False) -> None:
    """Add the option without which a command that changes something is a dry run, and why it is done."""
    if has_reason:
        parser.add_argument("--reason", default="no reason was given", help="kept in the audit table")
    parser.add_argument(
        "--execute", action="store_true", help=f"{does}; without it the command only shows what it would do"
    )


def settings(args: argparse.Namespace) -> Settings:
    """Put together what was given; leaves in ``args`` what no output may show.

    :raises UsageError: for an unknown key, or a value of the wrong kind.
    """
    stored: dict[str, Any] = {}
    # Values of the file are never repeated in a complaint.
    try:
        if args.config is not None:
            # Some editors begin a file with a byte order mark, which TOML does not know.
            stored = tomllib.loads(args.config.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read --config {args.config}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        where = re.search(r"at line \d+, column \d+|at end of document", str(error))
        raise UsageError(f"--config {args.config} is not TOML{f' ({where[0]})' if where else ''}") from None
    if unknown := sorted(set(stored) - {*_IN_FILE, "kafka", *_OF_SINK}):
        known = f"{', '.join(_IN_FILE)} and the tables [kafka], [run], [[sink]] and [schema_registry]"
        raise UsageError(f"--config {args.config}: unknown key {', '.join(unknown)}; there are {known}")
    for key, value in stored.items():
        if key not in _OF_SINK and not isinstance(value, dict if key == "kafka" else str):
            raise UsageError(f"--config {args.config}: {key} must be a {'table' if key == 'kafka' else 'string'}")
    kafka = undotted(stored.pop("kafka", {}))
    if misplaced := next((key for key in kafka if key in _CALLBACKS), None):
        raise UsageError(f"--config: {misplaced} in [kafka] is a function of a program; a file can name oauth_cb only")
    if "oauth_cb" in kafka:
        kafka["oauth_cb"] = Named("oauth_cb", str(kafka["oauth_cb"]))
    found: dict[str, str | None] = {}
    for key in _KEYS:
        environment = os.environ.get(_ENVIRONMENT.get(key, ""))
        # In the order of precedence; an empty value counts as none, as an unset variable of a template does.
        given = (getattr(args, key), environment, stored.get(key), kafka.get(_IN_KAFKA.get(key, "")))
        found[key] = next((str(value) for value in given if value), None)
    options = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items()}
    for name, value in (found | options).items():
        # Bytes that the environment cannot decode are no text that servers can be sent.
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        if any(text.encode(errors="replace").decode() != text for text in texts):
            raise UsageError(f"{name} is no text in {sys.getfilesystemencoding()}, the encoding of this environment")
    connect = NamedConnect("connect", stored["connect"]) if "connect" in stored else None
    if connect is not None and "conninfo" in stored:
        raise UsageError(f"--config {args.config}: conninfo and connect are two ways to one database; give one")
    result = Settings(
        schema=found["schema"] or "exactly_once",
        group_id=found["group_id"],
        bootstrap_servers=found["bootstrap_servers"],
        conninfo=found["conninfo"],
        connect=connect if found["conninfo"] is None else None,
        kafka=kafka,
        secrets=_secrets(found["conninfo"], kafka),
        more={key: stored[key] for key in _OF_SINK if key in stored},
    )
    # Before anything below can fail: from here on errors are shown without them.
    args.secrets = result.secrets
    try:
        check_schema_name(result.schema)
    except ConfigurationError as error:
        raise UsageError(str(error)) from None
    return result


def _help(what: str, key: str) -> str:
    return f"{what} ({_ENVIRONMENT[key]})"


def undotted(table: Mapping[str, Any], prefix: str = "", *, where: str = "kafka") -> dict[str, Any]:
    """Undo what TOML makes of a dotted key that is not quoted: ``sasl.password = ...`` is a table in a table."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= undotted(value, f"{prefix}{key}.", where=where)
        elif isinstance(value, (str, int, float)):
            flat[prefix + key] = value
        else:
            raise UsageError(f"--config: {prefix}{key} in [{where}] must be a string, a number, true or false")
    return flat


def _secrets(conninfo: str | None, kafka: Mapping[str, Any]) -> frozenset[str]:
    """Collect every text that must not be shown, also in the pieces that libpq may take it for."""
    found = {str(value) for key, value in kafka.items() if _SECRET_KEY.search(key)}
    found |= {line for value in found for line in value.splitlines()}
    found.add(os.environ.get("PGPASSWORD", ""))
    if conninfo:
        try:
            given = conninfo_to_dict(conninfo)
        except psycopg.Error:
            given = {}
        found |= {str(given[key]) for key in ("password", "sslpassword", "oauth_client_secret") if given.get(key)}
        # An "@" or "/" that should have been written %40 or %2F makes the rest of a password a host's name.
        if password := re.match(r"\w+://[^:/@]*:(.*)@", conninfo):
            pieces = {password[1], *re.split(r"[@/?#:]", password[1])}
            found |= pieces | {unquote(piece) for piece in pieces}
    return frozenset(text for text in found if len(text) >= _SHORTEST)
