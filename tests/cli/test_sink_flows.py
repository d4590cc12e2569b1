"""The file and the command line of the sink are checked by one schema; what is wrong is told by name. No servers."""

from __future__ import annotations

import argparse
import fcntl
import tempfile
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import pytest

from exactly_once.cli.options import Settings
from exactly_once.cli.problems import UsageError
from exactly_once.cli.sink import add_parser
from exactly_once.cli.sink_flows import Flow, Run, Task, read_flows, read_run
from exactly_once.cli.sink_worker import _named
from exactly_once.errors import ConfigurationError
from exactly_once.writer.ddl import parts_of
from exactly_once.writer.formats import FormatName


def parsed(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["sink", *given])


def flows_of(text: str, *given: str) -> list[Flow]:
    return read_flows(parsed(*given), tomllib.loads(text).get("sink", ()))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('tabel = "t"', "unknown key tabel; did you mean table?"),
        ('naive_timestamp = "utc"', "did you mean naive_timestamps?"),
        ("xyz = 1", "unknown key xyz; there are binary, claim, "),
        ('fields = "id"', "fields: Expected object | null, got str"),
        ("epoch = 5", "epoch: Expected object, got int"),
        ("epoch = { at = 5 }", "epoch[...]: Expected str, got int"),
        ('key = "id"', "key: Expected array | null, got str"),
        ('lax = "false"', "lax: Expected bool, got str"),
        ('on_tombstone = "ignore"', "choose one of delete, refuse, skip"),
        ('mode = "replace"', "choose one of append, insert-ignore, upsert"),
        ('missing = "nul"', "choose one of default, keep, null"),
        ('binary = { v = "b64" }', "choose one of base64, hex"),
        ('format = "debezum"', "choose one of canal, cloudevents, connect, csv, debezium, json, maxwell, msgpack, raw"),
        ('metadata = { o = "offest" }', "there is no offest; there are topic, partition, "),
        ('metadata = { o = "header:" }', "there is no header:; there are topic, "),
        ('metadata = { o = "offset" }\nconstants = { o = 1 }', "o is filled by metadata and is a constant"),
        ('fields = { a = "b" }\nrename = { c = "d" }', "so there is no rename"),
        ("where = { a = [[1]] }", "where[...][0]: Expected bool | int | float | str, got array"),
        ('fields = { a = "b" }\nevolve = "add-columns"', "so there is no evolve"),
        ('format = "raw"\nevolve = "add-columns"', "so there is no evolve with it"),
        ("flaten = true", "did you mean flatten?"),
        ('format = "raw"\nrest = "more"\nlax = true', "no rest, lax with it"),
        ('csv_delimiter = ";"', 'are about format = "csv"'),
        ('format = "csv"\nschema_registry = "http://x"', "messages of format csv name no schema of a registry"),
    ],
)
def test_a_key_of_the_file_that_is_wrong_is_told_by_name(line: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        flows_of(f'[[sink]]\ntopics = ["a"]\ntable = "t"\n{line}')
    assert str(caught.value).startswith("[[sink]]: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[sink]\ntopics = ["a"]\ntable = "t"', "write [[sink]] with two brackets"),
        ('sink = "t"', "write [[sink]] with two brackets"),
        ('sink = ["t"]', "must be tables"),
        ('[[sink]]\ntable = "t"', "say --topic and --table"),
        ('[[sink]]\ntopics = []\ntable = "t"', "say --topic and --table"),
    ],
)
def test_a_file_that_is_not_of_the_form_is_told(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        flows_of(text)
    assert said in str(caught.value)


def test_what_the_file_says_is_not_said_on_the_command_line_too() -> None:
    with pytest.raises(UsageError, match="say --topic, --mode, --field there"):
        flows_of('[[sink]]\ntopics = ["a"]\ntable = "t"', "--topic", "b", "--mode", "upsert", "--field", "a=b")


def test_the_command_line_goes_before_the_file() -> None:
    stored = tomllib.loads(
        'workers = 3\nmax_messages = 5\non_poison = "dead-letter"\ndead_letter_window = 9\nuntil_end = true'
    )
    run = read_run(parsed("--max-messages", "7"), stored)
    assert (run.workers, run.max_messages, run.on_poison, run.dead_letter_window) == (3, 7, "dead-letter", 9)
    assert run.until_end
    assert read_run(parsed(), {}) == Run()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_each_of_several_workers_has_a_name_of_its_own(protocol: str) -> None:
    kafka = {"bootstrap.servers": "a:1", "group.id": uuid4().hex, "group.protocol": protocol, "group.instance.id": "x"}
    for workers, expected in ((2, ["x-0", "x-1"]), (1, ["x", "x"])):
        task = Task(flows=(), kafka=kafka, settings=Settings(schema="s"), run=Run(workers=workers))
        with _named(task) as one, _named(task) as other:
            assert [one["group.instance.id"], other["group.instance.id"]] == expected


def test_the_files_of_names_are_gone_with_their_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One stayed for each group and worker. A worker that finds one in the moment of its removal makes its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kafka = {"bootstrap.servers": "a:1", "group.id": "g"}
    task = Task(flows=(), kafka=kafka, settings=Settings(schema="s"), run=Run())

    def remove_first(file: int, operation: int) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        (path,) = tmp_path.iterdir()
        path.unlink()
        fcntl.flock(file, operation)

    for _ in range(2):
        with _named(task) as one, _named(task) as other:
            assert [each["group.instance.id"][-2:] for each in (one, other)] == ["-0", "-1"]
            assert len(list(tmp_path.iterdir())) == 2
        assert list(tmp_path.iterdir()) == []
        monkeypatch.setattr(fcntl, "flock", remove_first)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--schema-registry", "http://x", "--format", "csv"), "messages of format csv name no schema"),
        (("--schema-registry", "http://x", "--format", "raw"), "messages of format raw name no schema"),
        (("--constant", "a=1", "--constant", "a=2"), "--constant names a twice"),
        (("--field", "a=x", "--field", "a=y"), "--field names a twice"),
        (("--rename", "a=x", "--rename", "a=y"), "--rename names a twice"),
        (("--flatten", ""), "flatten has no text between names"),
        (("--flatten", "false"), "false would be part of them"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_flows(parsed("--topic", "t", "--table", "t", *given), ())
    assert said in str(caught.value)


@pytest.mark.parametrize("names", ["a,b,a", "a,,b"])
def test_each_field_of_a_line_has_a_name_of_its_own(names: str) -> None:
    (flow,) = read_flows(parsed("--topic", "t", "--table", "t", "--format", "csv", "--csv-columns", names), ())
    with pytest.raises(ConfigurationError, match="a name of its own"):
        flow.decoder()


@pytest.mark.parametrize(
    ("name", "parts"), [("Bank.Pay", ["bank", "pay"]), ("Ümsatz", ["Ümsatz"]), ('"A"."B"', ["A", "B"])]
)
def test_names_are_folded_as_postgres_folds_them(name: str, parts: list[str]) -> None:
    assert parts_of(name) == parts


def test_a_blank_in_a_name_needs_quotes() -> None:
    """Postgres takes no such name; made with quotes, the table would not be found afterwards."""
    with pytest.raises(UsageError, match=r'needs double quotes, as in SQL: "Odd Name"'):
        read_flows(parsed("--topic", "t", "--table", "bank.Odd Name"), ())
    for name in ('"Odd Name"', 'bank . "a ""b"" c"', " bank.t "):
        read_flows(parsed("--topic", "t", "--table", name), ())


def test_fields_of_lines_need_an_order() -> None:
    stored = [{"topics": ["t"], "table": "t", "format": "csv", "fields": {"b": "b", "a": "a"}}]
    with pytest.raises(UsageError, match="only csv_columns says in which order"):
        read_flows(parsed(), stored)
    (flow,) = read_flows(parsed(), [{**stored[0], "csv_columns": ["a", "b"]}])
    assert flow.csv_columns == ("a", "b")


@pytest.mark.parametrize(
    ("given", "stored", "said"),
    [
        (("--workers", "0"), {}, "workers (--workers): Expected int >= 1"),
        (("--metrics-port", "99999"), {}, "metrics_port (--metrics-port): Expected int <= 65535"),
        (("--max-messages", "0"), {}, "max_messages (--max-messages)"),
        ((), {"workers": "2"}, "workers (--workers): Expected int, got str"),
        ((), {"worker": 2}, "unknown key worker; did you mean workers?"),
        ((), {"on_poison": "ignore"}, "choose one of dead-letter, stop"),
        ((), [], "run in the file must be a table"),
    ],
)
def test_how_to_run_is_checked(given: tuple[str, ...], stored: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_run(parsed(*given), stored)
    assert said in str(caught.value)


def test_every_way_to_run_can_be_said_in_both_places() -> None:
    options = vars(parsed())
    assert {f.name for f in fields(Run)} <= set(options)
    assert {f.name for f in fields(Flow)} <= set(options)
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    add_parser(subparsers)
    for action in subparsers.choices["sink"]._actions:
        if action.dest in (default := {f.name: f.default for f in fields(Run)}) and default[action.dest]:
            assert f"({default[action.dest]})" in (action.help or "")
        if action.dest == "format":
            assert tuple(action.choices or ()) == ("json", *get_args(FormatName), "raw")


def test_what_the_file_says_can_be_said_on_the_command_line() -> None:
    (stored,) = flows_of("""[[sink]]
        topics = ["a", "b"]
        table = "t"
        mode = "upsert"
        key = ["id", "tenant"]
        rename = { id = "meta.id", city = "address.city=x" }
        metadata = { trace = "header:trace-id", own = "key:id" }
        constants = { tenant = "x" }
        types = { amount = "numeric(12,2)" }
        where = { type = ["paid", "refunded"], "meta.test" = "false" }
        where_not = { kind = "heartbeat" }
        drop = ["secret", "meta.junk"]
        flatten = "__"
        epoch = { at = "ms" }
        decimal = { price = 2 }
        json_text = ["doc"]
        update = ["city", "at"]
        newest_by = "at"
        nul = "strip"
        naive_timestamps = "utc"
        on_tombstone = "delete"
        on_truncate = "skip"
        missing = "keep"
        lax = true
    """)
    text = """--topic a --topic b --table t --mode upsert --key id --key tenant --rename id=meta.id
        --rename city=address.city=x --metadata trace=header:trace-id --metadata own=key:id --constant tenant=x
        --type amount=numeric(12,2) --where type=paid --where type=refunded --where meta.test=false
        --where-not kind=heartbeat --drop secret --drop meta.junk --flatten __ --epoch at=ms --decimal price=2
        --json-text doc --update city --update at --newest-by at --nul strip --naive-timestamps utc
        --on-tombstone delete --on-truncate skip --missing keep --lax"""
    (given,) = read_flows(parsed(*text.split()), ())
    assert given == stored


@pytest.mark.parametrize("wrong", [("--rename", "x"), ("--where", "=x"), ("--decimal", "a=b"), ("--epoch", "a")])
def test_a_pair_that_is_none_is_refused(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*wrong)
    assert wrong[0] in capsys.readouterr().err
