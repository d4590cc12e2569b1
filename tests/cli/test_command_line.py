"""The command line itself: entry points, help, exit codes, and what is imported when."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

import pytest

import exactly_once
from exactly_once import cli
from exactly_once.cli.output import print_json
from exactly_once.cli.problems import EXIT_CODES, CommandParser
from tests.cli.conftest import Command
from tests.support.require import skip_unless

PACKAGE = Path(exactly_once.__file__).parent
WHERE = ("--bootstrap-servers", "--group-id", "--conninfo", "--schema", "--config", "--json", "--debug")
TARGETS = ("--topic", "--partition", "--to-earliest", "--to-latest", "--to-offset", "--to-time", "--reason")
OPTIONS = {
    "migrate": ("--sql", "--role"),
    "status": ("--check", "--watch", "--max-lag", "--max-dead-letters"),
    "reset": (*TARGETS, "--to-current", "--execute", "--force"),
    "adopt": (*TARGETS, "--keep-offsets", "--execute", "--force"),
    "hand-over": ("--to", "--topic", "--reason", "--execute"),
}


def python(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run an interpreter of its own."""
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_the_help_of_a_command_names_its_options_and_the_exit_codes(command: Command, name: str) -> None:
    result = command(name, "--help")
    assert result.code == 0
    for option in (*WHERE, *OPTIONS[name]):
        assert re.search(rf"{option}\b", result.out), option
    assert "exit codes:\n  0 " in result.out
    assert "EXACTLY_ONCE_CONNINFO" in result.out


def test_the_example_of_a_file_in_the_help_is_no_wider_than_a_terminal(command: Command) -> None:
    example = command("sink", "--help").out.partition("A file with two tables")[2]
    assert max(map(len, example.splitlines())) <= 80


def test_the_help_names_every_command_and_the_exit_codes(command: Command) -> None:
    result = command("--help")
    assert result.code == 0
    assert all(re.search(rf"^    {name}( |$)", result.out, re.MULTILINE) for name in cli.COMMANDS)
    assert "exit codes:" in result.out


def test_the_package_can_be_run_as_a_module() -> None:
    result = python("-m", "exactly_once", "--version")
    assert (result.returncode, result.stdout) == (0, f"kafka-exactly-once {exactly_once.__version__}\n")


def test_the_console_scripts_run_main() -> None:
    for script in ("exactly-once", "kafka-exactly-once"):
        path = Path(sys.executable).with_name(script)
        skip_unless("scripts", None if path.exists() else "the package is not installed with its scripts")
        result = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=200, check=False)
        assert (result.returncode, result.stdout) == (0, f"kafka-exactly-once {exactly_once.__version__}\n")


@pytest.mark.parametrize("args", [[], ["no-such-command"], ["status", "--no-such-option"], ["reset", "--topic", "t"]])
def test_a_wrong_command_line_is_one_line_and_exits_with_2(command: Command, args: list[str]) -> None:
    result = command(*args)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("exactly-once: error: ")
    assert result.err.count("\n") == 1


def test_options_cannot_be_abbreviated(command: Command) -> None:
    """An abbreviation in a script would break, or change its meaning, when an option is added."""
    assert command("reset", "--topic", "t", "--to-cur").code == 2


def test_an_error_has_a_traceback_only_with_debug(conninfo: str) -> None:
    args = ["-m", "exactly_once", "status", "--conninfo", conninfo, "--schema", "no_such_schema"]
    plain = python(*args)
    assert plain.returncode == 1
    assert plain.stderr.count("\n") == 1
    debug = python(*args, "--debug")
    assert debug.returncode == 1
    assert debug.stderr.startswith("Traceback")
    assert debug.stderr.endswith(plain.stderr)


def test_an_unexpected_error_is_one_line_too(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server shows such an error: it stands for a defect of ours."""

    def fail(*_: object) -> None:
        raise KeyError("no\nsuch key")

    monkeypatch.setattr("exactly_once.cli.status.open_database", fail)
    result = command("status", "--conninfo", "host=127.0.0.1")
    assert (result.code, result.out) == (1, "")
    assert result.err == "exactly-once: error: KeyError: 'no\\nsuch key' (--debug shows where)\n"


def test_a_reader_that_leaves_early_is_no_error(conninfo: str) -> None:
    read, write = os.pipe()
    os.close(read)
    args = [sys.executable, "-m", "exactly_once", "status", "--conninfo", conninfo, "--json"]
    result = subprocess.run(args, stdout=write, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize("words", [["--help"], ["sink", "--help"], ["migrate", "--sql"], ["demo"]])
def test_a_closed_or_full_output_is_no_defect(words: list[str]) -> None:
    """The demo starts servers, but not before it has written its first line."""
    command = [sys.executable, "-m", "exactly_once", *words]
    read, write = os.pipe()
    os.close(read)
    left = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    os.close(write)
    assert (left.returncode, left.stderr) == (141, "")
    with Path("/dev/full").open("w") as full:
        none = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    assert none.returncode == (3 if words == ["demo"] else 1)
    assert none.stderr == "exactly-once: error: [Errno 28] No space left on device\n"
    if "--help" in words:
        shell = ["bash", "-c", f"{shlex.join(command)} >&-"]
        closed = subprocess.run(shell, capture_output=True, text=True, timeout=200, check=False)
        assert (closed.returncode, closed.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "but"),
    [
        (["migrate"], r", but nothing to do, version \d+ is there"),
        (["migrate", "--sql"], ""),
        (["status", "--json"], ""),
    ],
)
def test_a_result_that_a_closed_output_has_lost_is_told_of(words: list[str], but: str, conninfo: str) -> None:
    to = [] if "--sql" in words else ["--conninfo", conninfo]
    command = shlex.join([sys.executable, "-m", "exactly_once", *words, *to])
    done = subprocess.run(["bash", "-c", f"{command} >&-"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert re.fullmatch(rf"exactly-once: error: stdout is closed: the result is not written{but}\n", done.stderr)


def test_the_exit_code_is_the_same_where_nobody_reads_the_error() -> None:
    """For `verify` the interpreter's own would be a verdict."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "exactly_once", "status"]
    left = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=write, timeout=200, check=False)
    os.close(write)
    assert left.returncode == 2


@pytest.mark.parametrize("columns", ["40", None, "150"])
def test_help_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: str | None) -> None:
    width = 80
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
        width = int(columns)
    parser = CommandParser(prog="exactly-once", epilog=EXIT_CODES)
    commands = parser.add_subparsers(parser_class=CommandParser)
    for name in cli.COMMANDS:
        importlib.import_module(f"exactly_once.cli.{name.replace('-', '_')}").add_parser(commands)
    texts = list(helps(parser))
    assert len(texts) > 15
    for text in texts:
        lines = text.splitlines()
        # In a narrow terminal an option and a line of code are not broken.
        prose = (
            lines
            if width >= 80
            else [line for line in lines if line[:1].strip() not in ("", "f") or line.startswith(" " * 24)]
        )
        assert [line for line in prose if len(line) > width and " " in line.strip()] == []
    assert max(len(line) for text in texts for line in text.splitlines()) > width - 10


def helps(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from helps(command)


def test_the_commands_import_nothing_beyond_the_core() -> None:
    """The demo, the sink and what they need are imported only when the command line names them."""
    allowed = {*sys.stdlib_module_names, "exactly_once", "confluent_kafka", "psycopg", "tenacity"}
    for path in (PACKAGE / "cli").glob("*.py"):
        if path.name.startswith(("demo", "sink_")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(str(node.module))
            assert {name.split(".")[0] for name in names} <= allowed, path
    script = (
        "import sys; from exactly_once.cli import main; main(['migrate', '--sql']);"
        "sys.exit('exactly_once.cli.demo' in sys.modules or 'rich' in sys.modules or 'msgspec' in sys.modules)"
    )
    assert python("-c", script).returncode == 0


def test_a_demo_without_its_extra_names_the_extra() -> None:
    script = (
        "import sys; sys.modules['exactly_once.cli.demo'] = None; from exactly_once.cli import main;"
        "sys.exit(main(sys.argv[1:]))"
    )
    named = python("-c", script, "demo")
    assert named.returncode == 3
    assert "pip install 'kafka-exactly-once[demo]'" in named.stderr
    assert named.stderr.count("\n") == 1
    listed = python("-c", script, "--help")
    assert listed.returncode == 0
    assert "kafka-exactly-once[demo]" in listed.stdout


def test_the_other_distribution_of_that_name_is_told_apart(tmp_path: Path) -> None:
    """Installed last, it puts its own ``__init__.py`` over ours and leaves our ``cli`` beside it."""
    other = tmp_path / "exactly_once"
    other.mkdir()
    (other / "__init__.py").write_text('"""Somebody else\'s."""\n')
    (other / "cli").symlink_to(PACKAGE / "cli")
    script = "import sys; from exactly_once.cli import main; sys.exit(main())"  # as the console script has it
    for args in (["status"], ["--help"], ["demo"]):
        result = python("-c", script, *args, cwd=tmp_path)
        assert result.returncode == 1
        assert result.stderr.startswith("exactly-once: error: the package exactly_once in ")
        assert "is not kafka-exactly-once" in result.stderr
        assert "pip uninstall -y exactly-once" in result.stderr
        assert result.stderr.count("\n") == 1


def test_every_command_that_an_error_of_the_library_names_is_accepted(command: Command) -> None:
    """Literals of the sources, f-strings with their fields filled in; --help ends a command that is."""
    named = set()
    for path in PACKAGE.rglob("*.py"):
        if "cli" not in path.relative_to(PACKAGE).parts:
            named |= _named_in(path)
    assert {name.split()[0] for name in named} == {"migrate", "reset", "adopt", "hand-over"}
    complete = {name for name in named if " --t" in name}
    assert any("hand-over --to" in name for name in complete)
    for name in sorted(complete):
        result = command(
            *name.replace("--to-offset N", "--to-offset 5").replace("--to 7", "--to spark").split(), "--help"
        )
        assert (result.code, result.err) == (0, ""), name
        for option in re.findall(r"--[a-z-]+", name):
            assert re.search(rf"{option}\b", result.out), name


def _named_in(path: Path) -> set[str]:
    """Every `exactly-once ...` in the strings of a module, and the literals of what makes one."""
    found = set()
    nodes = list(ast.walk(ast.parse(path.read_text())))
    pieces = {id(value) for node in nodes if isinstance(node, ast.JoinedStr) for value in node.values}
    for node in nodes:
        if id(node) in pieces:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "7" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("command"):
            # Group, schema and topic come before the options.
            words = [str(p.value) if isinstance(p, ast.Constant) else "7" for p in node.args]
            text = " ".join(["exactly-once", *words[:1], *dropwhile(lambda word: word[:2] != "--", words[1:])])
        else:
            continue
        found |= set(
            re.findall(r"exactly-once ((?:migrate|reset|adopt|status|hand-over)(?: --[a-z-]+(?: [\w.]+)?)*)", text)
        )
    return found


def test_numbers_that_json_does_not_have_are_texts(capsys: pytest.CaptureFixture[str]) -> None:
    """They were printed as NaN and Infinity, which no other reader of JSON takes. A row of a dry run stands for it."""
    print_json({"rows": [(1.5, float("nan")), [{"x": float("-inf")}]], "deletes": float("inf")})

    def refuse(text: str) -> None:
        raise AssertionError(text)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"rows": [[1.5, "NaN"], [{"x": "-Infinity"}]], "deletes": "Infinity"}
