"""No secret is shown: not by results, nor by errors, tracebacks or representations."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from exactly_once._redaction import without_secrets
from exactly_once.cli import options
from exactly_once.embedded import Postgres
from tests.cli.conftest import Command, Result

SECRET = "Xq7!geheim"
PIECES = ("Xq7", "geheim")
NOWHERE = "127.0.0.1:1"


def checked(result: Result) -> Result:
    """Look through everything that a command printed."""
    for piece in PIECES:
        assert piece not in result.out + result.err
    return result


@pytest.fixture(scope="module")
def guarded(own_servers: None) -> Iterator[str]:
    """Host and port of a Postgres that asks for passwords."""
    with Postgres() as postgres:
        with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            connection.execute("CREATE ROLE careful LOGIN PASSWORD 'another'")
            rules = postgres.data_directory / "pg_hba.conf"
            rules.write_text("host all careful 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
            connection.execute("SELECT pg_reload_conf()")
        yield f"127.0.0.1:{postgres.port}"


@pytest.mark.parametrize("debug", [[], ["--debug"]])
@pytest.mark.parametrize("place", ["command line", "pairs", "environment", "file"])
def test_a_wrong_password_is_told_without_the_password(
    command: Command, guarded: str, place: str, debug: list[str], request: pytest.FixtureRequest
) -> None:
    uri = f"postgresql://careful:{SECRET}@{guarded}/postgres"
    host, port = guarded.split(":")
    args = ["status", *debug]
    if place == "command line":
        args += ["--conninfo", uri]
    elif place == "pairs":
        args += ["--conninfo", f"user=careful password='{SECRET}' host={host} port={port} dbname=postgres"]
    elif place == "environment":
        request.getfixturevalue("monkeypatch").setenv("EXACTLY_ONCE_CONNINFO", uri)
    else:
        file = request.getfixturevalue("tmp_path") / "file.toml"
        file.write_text(f'conninfo = "{uri}"\n')
        args += ["--config", str(file)]
    result = checked(command(*args))
    assert result.code == 1
    assert 'password authentication failed for user "careful"' in result.err
    assert guarded in result.err


@pytest.mark.parametrize(
    "conninfo",
    [
        f"postgresql://u:{SECRET}@{NOWHERE}/db",
        f"postgresql://u@{NOWHERE}/db?password={SECRET}",
        f"host=127.0.0.1 port=1 password='{SECRET}'",
        "postgresql://u:Xq7@geheim@127.0.0.1:1/db",  # libpq takes what is behind the first @ for the host
        "postgresql://u:Xq7/geheim@127.0.0.1:1/db",  # and what is before a / for a port
        "postgresql://u:Xq7#geheim?@127.0.0.1:1/db",
        "postgresql://u:%58q7%20geheim@127.0.0.1:1/db",
        f"postgresql://u:{SECRET}@[127.0.0.1:1/db",
        f"password={SECRET} and nonsense",
        f"host=127.0.0.1 port=1 no_such_keyword={SECRET}",
    ],
)
@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_a_connection_string_that_leads_nowhere_is_not_repeated(
    command: Command, conninfo: str, debug: list[str]
) -> None:
    result = checked(command("status", *debug, "--conninfo", conninfo))
    assert result.code in (1, 2)
    assert result.err.splitlines()[-1].startswith("exactly-once: error: ")
    if not debug:
        assert result.err.count("\n") == 1


def test_an_unreachable_database_is_named_by_host_and_port(command: Command) -> None:
    result = checked(command("status", "--conninfo", f"postgresql://u:{SECRET}@{NOWHERE}/db"))
    assert result.code == 1
    assert "no connection to Postgres at 127.0.0.1:1/db" in result.err


@pytest.mark.parametrize(
    "args",
    [
        ["status", "--coninfo", f"postgresql://u:{SECRET}@h/db"],
        ["status", f"postgresql://u:{SECRET}@h/db"],
        ["status", f"password={SECRET}"],
        [f"postgresql://u:{SECRET}@h/db"],
    ],
)
def test_a_misplaced_connection_string_is_not_repeated(command: Command, args: list[str]) -> None:
    assert checked(command(*args)).code == 2


KAFKA = {
    "a login": f"""
        security.protocol = "SASL_PLAINTEXT"
        sasl.mechanism = "PLAIN"
        sasl.username = "u"
        sasl.password = "{SECRET}"
    """,
    "a key": f"""
        security.protocol = "SSL"
        "ssl.key.pem" = "{SECRET}"
    """,
    "a key store": f"""
        security.protocol = "SSL"
        ssl.keystore.location = "/nowhere"
        ssl.keystore.password = "{SECRET}"
    """,
    "a token": f"""
        security.protocol = "SASL_SSL"
        sasl.mechanism = "OAUTHBEARER"
        sasl.oauthbearer.config = "{SECRET}"
    """,
    "an unknown setting": f"""
        sasl.password = "{SECRET}"
        no.such.setting = 1
    """,
    "a list": f"""
        ssl.key.password = ["{SECRET}"]
    """,
}


@pytest.mark.parametrize("debug", [[], ["--debug"]])
@pytest.mark.parametrize("what", KAFKA)
def test_secrets_of_the_kafka_client_are_not_shown(
    operate: Command, what: str, debug: list[str], tmp_path: Path
) -> None:
    """The broker speaks neither SASL nor TLS, so each of these fails at another step."""
    file = tmp_path / "file.toml"
    file.write_text(f"[kafka]\n{KAFKA[what]}")
    result = checked(operate("status", "--config", file, *debug))
    assert result.code in (1, 2)


def test_a_file_that_is_not_toml_is_not_repeated(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "file.toml"
    for text in (
        f'conninfo = "postgresql://u:{SECRET}@h/db\n',
        f"password {SECRET}\n",
        f"[kafka]\nsasl.password = {SECRET}\n",
    ):
        file.write_text(text)
        assert checked(command("status", "--config", file)).code == 2


def test_a_password_that_is_right_is_not_shown_either(
    command: Command, consumed: str, conninfo: str, bootstrap_servers: str
) -> None:
    role = f"{consumed}_role"
    with psycopg.connect(conninfo, autocommit=True) as connection:
        statement = psycopg.sql.SQL("CREATE ROLE {} LOGIN SUPERUSER PASSWORD {}")
        connection.execute(statement.format(psycopg.sql.Identifier(role), SECRET))
    given = psycopg.conninfo.make_conninfo(conninfo, user=role, password=SECRET)
    where = ("--conninfo", given, "--bootstrap-servers", bootstrap_servers, "--group-id", consumed)
    for args in (
        ["migrate"],
        ["migrate", "--sql"],
        ["status"],
        ["reset", "--topic", consumed, "--to-earliest", "--execute"],
        ["adopt", "--topic", consumed, "--to-earliest"],
    ):
        for json in ([], ["--json"]):
            result = checked(command(*args, *json, *where))
            assert result.code == (args[0] == "adopt")


def test_the_settings_show_no_secret_in_their_repr(tmp_path: Path) -> None:
    file = tmp_path / "file.toml"
    file.write_text(f'[kafka]\nsasl.password = "{SECRET}"\n')
    parser = argparse.ArgumentParser()
    options.add_common(parser)
    args = parser.parse_args(["--config", str(file), "--conninfo", f"postgresql://u:{SECRET}@h/db"])
    settings = options.settings(args)
    assert settings.kafka == {"sasl.password": SECRET}
    assert "geheim" not in repr(settings)
    assert SECRET in settings.secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p@h/db", "postgresql://u:***@h/db"),
        ("at postgres://u:a@b@h", "at postgres://u:***@h"),
        ("password=p host=h", "password=*** host=h"),
        ("sslpassword = 'a b\\' c' host=h", "sslpassword = *** host=h"),
        ("password authentication failed", "password authentication failed"),
        ("failed to resolve host 'a@h'", "failed to resolve host '***@h'"),
        ('database "a@h:1/b" does not exist', 'database "***@h:1/b" does not exist'),
        (
            'invalid integer value "p" for connection option "port"',
            'invalid integer value "***" for connection option "port"',
        ),
        ("127.0.0.1:5432/db", "127.0.0.1:5432/db"),
    ],
)
def test_what_looks_like_a_password_is_hidden_without_knowing_it(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_short_pieces_of_a_password_do_not_make_the_remedy_unreadable(command: Command) -> None:
    shown = command("status", "--conninfo", "postgresql://u:p@ss@w@127.0.0.1:1/x")
    assert shown.code == 2
    assert "the host, the port or the database" in shown.err
    assert "p@ss@w" not in shown.err
