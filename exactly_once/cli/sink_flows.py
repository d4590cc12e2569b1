"""Flows of the sink command: which topics go to which table, how; from the command line and a TOML file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from exactly_once.writer.decoding import Decoder
from exactly_once.writer.sink import TableSink
from exactly_once.writer.statements import Mode

from .problems import UsageError

FORMATS = ("json", "raw")
MODES = get_args(Mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One table and what fills it; also the keys of a ``[[sink]]`` in the file."""

    topics: tuple[str, ...]
    table: str
    mode: str = "append"
    key: tuple[str, ...] | None = None
    format: str = "json"
    update: tuple[str, ...] | None = None
    newest_by: str | None = None
    missing: str = "null"
    fields: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    epoch: Mapping[str, Any] = field(default_factory=dict)
    rest: str | None = None
    lax: bool = False
    naive_timestamps: str = "refuse"
    on_tombstone: str | None = None

    def decoder(self) -> Decoder:
        """Make the decoder; msgspec is imported only here."""
        if self.format == "raw":
            from exactly_once.writer.raw import RawDecoder  # noqa: PLC0415

            return RawDecoder(metadata=self.metadata)
        from exactly_once.writer.from_json import JsonDecoder  # noqa: PLC0415 - an extra

        options: dict[str, Any] = {
            "missing": "null" if self.missing == "null" else "apart",
            "naive_timestamps": self.naive_timestamps,
            "on_tombstone": self.on_tombstone,
        }
        return JsonDecoder(
            self.fields, metadata=self.metadata, rest=self.rest, epoch=self.epoch, lax=self.lax, **options
        )

    def sink(self) -> TableSink:
        """Make the sink."""
        return TableSink(
            self.table,
            decoder=self.decoder(),
            mode=self.mode,
            key=self.key,
            update=self.update,
            newest_by=self.newest_by,
            missing=self.missing,
            naive_timestamps=self.naive_timestamps,
        )


def read_flows(args: argparse.Namespace, stored: Sequence[Mapping[str, Any]]) -> list[Flow]:
    """Put the flows together: those of the file, or the one of the command line.

    :raises UsageError: for a key that nobody knows, and where topic or table are missing.
    """
    given = {name: getattr(args, name) for name in ("topics", "table", "mode", "key", "format")}
    given = {name: value for name, value in given.items() if value is not None}
    if stored and given:
        raise UsageError("the file has [[sink]] tables; say --topic, --table, --mode, --key and --format there")
    flows = [_flow(one) for one in stored or [given]]
    topics = [topic for flow in flows for topic in flow.topics]
    if len(set(topics)) < len(topics):
        raise UsageError("a topic goes to one table only; it is named twice")
    return flows


def _flow(given: Mapping[str, Any]) -> Flow:
    known = {f.name for f in fields(Flow)}
    if unknown := sorted(set(given) - known):
        raise UsageError(f"[[sink]]: unknown key {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if not given.get("topics") or not given.get("table"):
        raise UsageError("say --topic and --table, or topics and table in a [[sink]] of the file of --config")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    if isinstance(values["topics"], str):
        values["topics"] = (values["topics"],)
    flow = Flow(**values)
    for name, value, choices in (("mode", flow.mode, MODES), ("format", flow.format, FORMATS)):
        if value not in choices:
            raise UsageError(f"{name} {value!r} is not possible; choose one of {', '.join(choices)}")
    return flow
