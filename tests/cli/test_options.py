"""Where settings come from: the command line, then the environment, then a file."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exactly_once import cli
from exactly_once.cli.problems import CommandParser, one_line
from exactly_once.errors import ConfigurationError
from tests.cli.conftest import Command

NOWHERE = "host=127.0.0.1 port=1 dbname=nowhere"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a test puts its configuration."""
    return tmp_path / "exactly-once.toml"


def test_a_file_gives_everything(
    command: Command, consumed: str, file: Path, conninfo: str, bootstrap_servers: str
) -> None:
    file.write_text(
        f'conninfo = "{conninfo}"\nbootstrap_servers = "{bootstrap_servers}"\ngroup_id = "{consumed}"\n'
        'schema = "exactly_once"\n[kafka]\n"socket.timeout.ms" = 7000\nsecurity.protocol = "PLAINTEXT"\n'
        "enable.auto.commit = false\n"
    )
    result = command("status", "--config", file, "--json")
    assert (result.code, result.err) == (0, "")
    assert [(p["group_id"], p["lag"]) for p in result.partitions] == [(consumed, 0), (consumed, 0)]


def test_a_consumers_own_settings_can_be_pasted_under_kafka(
    command: Command, consumed: str, file: Path, conninfo: str, bootstrap_servers: str
) -> None:
    file.write_text(
        f'conninfo = "{conninfo}"\n[kafka]\n"bootstrap.servers" = "{bootstrap_servers}"\n"group.id" = "{consumed}"\n'
        '"max.poll.interval.ms" = 60000\n"partition.assignment.strategy" = "range"\n'
    )
    result = command("status", "--config", file, "--json")
    assert (result.code, result.err) == (0, "")
    assert [p["lag"] for p in result.partitions] == [0, 0]


def test_the_environment_goes_before_the_file_and_the_command_line_before_both(
    command: Command, consumed: str, file: Path, conninfo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(f'conninfo = "{NOWHERE}"\ngroup_id = "of-the-file"\nschema = "of_the_file"\n')
    monkeypatch.setenv("EXACTLY_ONCE_CONNINFO", conninfo)
    monkeypatch.setenv("EXACTLY_ONCE_GROUP_ID", "of-the-environment")
    args = ("status", "--config", file, "--schema", "exactly_once")
    assert command(*args).out == "the ledger has no rows of group of-the-environment\n"
    assert len(command(*args, "--json", "--group-id", consumed).partitions) == 2
    monkeypatch.delenv("EXACTLY_ONCE_CONNINFO")
    assert "127.0.0.1:1/nowhere" in command(*args).err
    assert "schema 'of_the_file'" in command("status", "--config", file, "--conninfo", conninfo).err


def test_brokers_can_come_from_the_environment(
    command: Command, consumed: str, conninfo: str, bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXACTLY_ONCE_BOOTSTRAP_SERVERS", bootstrap_servers)
    result = command("status", "--conninfo", conninfo, "--group-id", consumed, "--json")
    assert [p["log_end"] for p in result.partitions] == [10, 10]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('conn_info = "x"\ngroup = "y"\n', "unknown key conn_info, group; there are bootstrap_servers, "),
        ("group_id = 5\n", "group_id must be a string"),
        ('kafka = "x"\n', "kafka must be a table"),
        ('[kafka]\n"debug" = ["all"]\n', "debug in [kafka] must be a string"),
        ('conninfo = "x\n', "is not TOML (at line 1"),
        ("\xff", "is not TOML"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(command: Command, file: Path, text: str, complaint: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    result = command("status", "--config", file, "--conninfo", NOWHERE)
    assert (result.code, result.out) == (2, "")
    assert complaint in result.err
    assert str(file) in result.err or "[kafka]" in result.err


def test_the_sinks_file_serves_other_commands_with_a_byte_order_mark_too(
    command: Command, consumed: str, file: Path, conninfo: str
) -> None:
    text = f'conninfo = "{conninfo}"\r\ngroup_id = "{consumed}"\r\n[run]\r\nworkers = 2\r\n'
    file.write_bytes(b"\xef\xbb\xbf" + f'{text}[[sink]]\r\ntopics = ["t"]\r\ntable = "t"\r\n'.encode())
    result = command("status", "--config", file, "--json")
    assert (result.code, result.err) == (0, "")
    assert {p["group_id"] for p in result.partitions} == {consumed}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "there is no topic t; create it, or pass wait_for_topics=True",
            "there is no topic t; create it",
        ),
        ('on_poison="dead-letter"; say key=, start=', "--on-poison dead-letter; say --key , start="),
        ("Run: exactly-once migrate --conninfo ..., or pass migrate=True", "Run: exactly-once migrate --conninfo ..."),
        ("on_tombstone='delete' needs mode='upsert'", "--on-tombstone delete needs --mode upsert"),
        ('on_tombstone = "skip" passes over such', "--on-tombstone skip passes over such"),
        ('say start="latest"; see also on_out_of_range=.', "say --start latest; see also --on-out-of-range."),
        ('start="committed", but none: leave start= out', "--start committed, but none: leave --start out"),
    ],
)
def test_errors_are_told_in_the_words_of_the_command_line(said: str, told: str) -> None:
    assert one_line(ConfigurationError(said)) == told


def test_a_file_that_is_not_there_is_named(command: Command, file: Path) -> None:
    result = command("status", "--config", file)
    assert result.code == 2
    assert f"cannot read --config {file}: No such file or directory" in result.err


def test_a_setting_that_librdkafka_does_not_know_is_refused_by_name(
    command: Command, file: Path, conninfo: str
) -> None:
    file.write_text(f'conninfo = "{conninfo}"\nbootstrap_servers = "127.0.0.1:1"\n[kafka]\nsasl.pasword = "x"\n')
    result = command("status", "--config", file)
    assert result.code == 2
    assert 'No such configuration property: "sasl.pasword"' in result.err


@pytest.mark.parametrize(
    ("args", "missing"),
    [
        (["status"], "--conninfo, or set EXACTLY_ONCE_CONNINFO, or conninfo in the file of --config"),
        (["reset", "--topic", "t", "--to-current", "--conninfo", NOWHERE], "--group-id, or set EXACTLY_ONCE_GROUP_ID"),
        (
            ["adopt", "--topic", "t", "--keep-offsets", "--conninfo", NOWHERE, "--group-id", "g"],
            "--bootstrap-servers, or set EXACTLY_ONCE_BOOTSTRAP_SERVERS",
        ),
    ],
)
def test_what_is_missing_is_named_with_the_places_to_say_it(command: Command, args: list[str], missing: str) -> None:
    result = command(*args)
    assert result.code == 2
    assert missing in result.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["status", "--group-id", "g\udcfc"], "group_id is no text in utf-8"),
        (["dead-letters", "list", "--topic", "t\udcfc"], "--topic is no text in utf-8"),
        (["sink", "--topic", "t", "--table", "t\udcfc"], "--table is no text in utf-8"),
        (["sink", "--topic", "t", "--table", "t", "--group-id", "g\udcfc"], "group_id is no text in utf-8"),
        (["sink", "--topic", "t", "--table", "t", "--group-id", " g"], "group.id=' g' is not possible"),
    ],
)
def test_what_the_environment_cannot_decode_is_refused(command: Command, args: list[str], said: str) -> None:
    """A client of Kafka ends the process for such a group, and the text of others is an error of Python's."""
    result = command(*args, "--conninfo", NOWHERE, "--bootstrap-servers", "127.0.0.1:1")
    assert (result.code, result.out) == (2, "")
    assert said in result.err


@pytest.mark.parametrize(
    "words",
    [
        ["reset", "--topic", "{}", "--to-current"],
        ["adopt", "--topic", "{}", "--keep-offsets"],
        ["dead-letters", "drop", "--topic", "{}"],
        ["dead-letters", "list", "--partition", "{}"],
        ["sink", "--topic", "t", "--table", "{}"],
    ],
)
def test_of_two_names_for_what_is_changed_the_last_does_not_win(command: Command, words: list[str]) -> None:
    """`sink --topic a --table a --topic b --table b` filled b from both topics."""
    at = words.index("{}")
    twice = [word for value in "01" for word in (words[at - 1], value)]
    result = command(*words[: at - 1], *twice, *words[at + 1 :])
    assert (result.code, result.out) == (2, "")
    assert f"{words[at - 1]} is given twice" in result.err
    alike = command(*words[: at - 1], *([words[at - 1], "0"] * 2), *words[at + 1 :])
    assert (alike.code, "twice" in alike.err) == (2, False)  # it lacks the servers only


def test_a_schema_that_is_no_name_is_refused(command: Command) -> None:
    assert "is not the name of a schema" in command("migrate", "--sql", "--schema", "x" * 64).err


def numeric_options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, Callable[[str], Any]]]:
    """Yield every option whose type takes 7 or column=7, with that text and its type."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from numeric_options(command)
        elif callable(action.type):
            for text in ("7", "column=7"):
                try:
                    value = action.type(text)
                except (ValueError, argparse.ArgumentTypeError):
                    continue
                if isinstance(value, (int, float)) or 7 in (value if isinstance(value, tuple) else ()):
                    yield f"{parser.prog} {action.metavar or action.dest}", text, action.type


@pytest.mark.parametrize("wrong", ["nan", "inf", "-inf", "1e999", "-1e999", "-5", "9" * 5000, "", "seven"])
def test_no_option_takes_a_number_that_is_none_or_has_no_bounds(wrong: str) -> None:
    """Compared with NaN nothing is above or below: `soak --minutes nan` injected no fault and found nothing lost."""
    parser = CommandParser(prog="exactly-once")
    commands = parser.add_subparsers(parser_class=CommandParser)
    for name in cli.COMMANDS:
        importlib.import_module(f"exactly_once.cli.{name.replace('-', '_')}").add_parser(commands)
    options = list(numeric_options(parser))
    assert len(options) > 25
    for name, text, kind in options:
        with pytest.raises(argparse.ArgumentTypeError, match=r"must be|is not"):
            pytest.fail(f"{name} took {wrong[:10]} as {kind(text.replace('7', wrong))!r}")


@pytest.mark.parametrize("option", ["--minutes=nan", "--minutes=1e999", "--minutes=-1", "--minutes=0", "--brokers=0"])
def test_a_number_that_is_refused_is_named_with_its_bounds(command: Command, option: str) -> None:
    result = command("soak", option)
    assert (result.code, result.out) == (2, "")
    assert option.split("=", maxsplit=1)[0] in result.err
    assert "must be" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["status", "--config", "a.toml", "--config", "b.toml"],
        ["reset", "--topic", "t", "--to-offset", "5", "--to-offset", "7"],
        ["migrate", "--role", "a", "--role", "b"],
    ],
)
def test_of_two_values_for_one_option_none_is_left_out(command: Command, words: list[str]) -> None:
    """The last one won without a word."""
    refused = command(*words)
    assert refused.code == 2
    assert f"{words[-2]} is given twice, and takes one" in refused.err
