"""Servers whose passwords expire: commands connect by functions of the user's, which a file names."""

# ruff: noqa: PLR0917 - fixtures and parameters are positional

from __future__ import annotations

import base64
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from textwrap import dedent
from typing import Any

import psycopg
import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from exactly_once import BrokerUnreachable, ExactlyOnceConsumer
from exactly_once.embedded import Kafka
from tests.cli.conftest import Command
from tests.conftest import MakeConsumer
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "managed_services"
HOW_TO = ROOT / "docs" / "how-to" / "managed-services.md"
LOGIN = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"


def token(config: str) -> tuple[str, float]:
    """Make an unsigned token, which Kafka takes where no keys are configured."""
    return token_for(60)  # a machine that stands still meanwhile must not let it expire


def token_for(seconds: float) -> tuple[str, float]:
    expires = time.time() + seconds
    parts = ({"alg": "none"}, {"sub": "bank", "iat": time.time(), "exp": expires})
    return ".".join(
        [*(base64.urlsafe_b64encode(json.dumps(p).encode()).decode().rstrip("=") for p in parts), ""]
    ), expires


LOGIN_SETTINGS: dict[str, Any] = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "OAUTHBEARER",
    "log_level": 0,
}


@pytest.fixture(scope="module")
def oauth_servers() -> Iterator[str]:
    """A broker that takes tokens only, and a topic "letters" of 30 messages."""
    properties = {
        "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "sasl.enabled.mechanisms": "OAUTHBEARER",
        "sasl.mechanism.inter.broker.protocol": "OAUTHBEARER",
        "listener.name.plaintext.oauthbearer.sasl.jaas.config": f'{LOGIN} required unsecuredLoginStringClaim_sub="us";',
        "connections.max.reauth.ms": "4000",
    }
    with closing(Kafka(properties=properties)) as kafka:
        kafka.start(wait=False)  # how it waits has no token
        settings = {**LOGIN_SETTINGS, "bootstrap.servers": kafka.bootstrap_servers, "oauth_cb": token}
        admin = AdminClient(settings)
        until(lambda: _answers(admin), 120, "the broker")
        admin.create_topics([NewTopic("letters", 2, 1)])["letters"].result(60)
        producer = Producer(settings)
        for number in range(30):
            producer.produce("letters", json.dumps({"id": number}), partition=number % 2)
        assert producer.flush(60) == 0
        yield kafka.bootstrap_servers


def _answers(admin: AdminClient) -> bool:
    try:
        return bool(admin.list_topics(timeout=2).brokers)
    except KafkaException:
        return False


def _describes(consumer: ExactlyOnceConsumer, topic: str) -> bool:
    """Ask once: a connection that the broker has just closed is an error, which the consumer waits out."""
    try:
        return topic in consumer._cluster.describe([topic])
    except BrokerUnreachable:
        return False


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conninfo: str, name: str) -> str:
    """A module of the user's in the working directory; its name is no other test's."""
    (tmp_path / f"{name}.py").write_text(
        dedent(f"""\
        import psycopg
        from psycopg.rows import dict_row
        from tests.cli.test_managed_services import token

        def connect():
            with open("asked", "a") as file:
                file.write(".")
            return psycopg.connect({conninfo!r}, row_factory=dict_row)

        def nothing():
            return "a pool, perhaps"

        def nobody():
            return psycopg.connect("host=127.0.0.1 port=1 dbname=nowhere")

        number = 7
        """)
    )
    monkeypatch.chdir(tmp_path)
    return name


@pytest.fixture
def file(tmp_path: Path, functions: str, oauth_servers: str, name: str) -> Path:
    """A configuration without any password."""
    path = tmp_path / "bank.toml"
    path.write_text(
        f'connect = "{functions}:connect"\nbootstrap_servers = "{oauth_servers}"\ngroup_id = "{name}"\n'
        '[kafka]\nsecurity.protocol = "SASL_PLAINTEXT"\nsasl.mechanism = "OAUTHBEARER"\nsession.timeout.ms = 6000\n'
        f'oauth_cb = "{functions}:token"\n'
    )
    return path


def asked(file: Path) -> int:
    """How often the function has opened a connection."""
    path = file.with_name("asked")
    return len(path.read_text()) if path.exists() else 0


@pytest.mark.parametrize("workers", [1, 2])
def test_the_sink_and_what_looks_at_its_group_need_no_password(
    workers: int, command: Command, file: Path, name: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are processes of their own: the functions get there by their names."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    db.execute(f"CREATE TABLE {name} (id int)")
    sink = ["sink", "--config", file, "--topic", "letters", "--table", name, "--workers", workers]
    result = command(*sink, "--start", "earliest", "--until-end")
    assert result.code == 0, result.err
    assert db.execute(f"SELECT count(*), count(DISTINCT id) FROM {name}").fetchone() == (30, 30)
    before = asked(file)
    shown = command("status", "--config", file, "--json")
    assert [(p["next_offset"], p["lag"]) for p in shown.partitions] == [(15, 0), (15, 0)]
    assert asked(file) == before + 1
    assert command("reset", "--config", file, "--topic", "letters", "--to-earliest", "--execute").code == 0
    assert "there is nothing to adopt" in command("adopt", "--config", file, "--topic", "letters", "--to-latest").err
    assert command("hand-over", "--config", file, "--to", "spark").code == 0
    assert [p["lag"] for p in command("status", "--config", file, "--json").partitions] == [15, 15]
    db.execute(
        "INSERT INTO exactly_once.dead_letter (group_id, topic, partition, message_offset, timestamp_type, "
        "timestamp_ms, error_class, error, attempts) VALUES (%s, 'letters', 0, 3, 0, 0, 'E', 'e', 1)",
        (name,),
    )
    (group,) = command("status", "--config", file, "--json").json["groups"]
    assert (group["group_id"], group["dead_letters"]) == (name, 1)
    again = command(*sink, "--until-end")
    assert again.code == 0, again.err
    assert db.execute(f"SELECT count(*), count(DISTINCT id) FROM {name}").fetchone() == (60, 30)


def test_a_consumer_outlives_its_tokens(oauth_servers: str, make_consumer: MakeConsumer, name: str) -> None:
    """The broker asks again every four seconds who is there, and closes connections whose token has expired."""
    made: list[float] = []

    def short_lived(config: str) -> tuple[str, float]:
        made.append(time.time())
        return token_for(1.5)

    settings = {**LOGIN_SETTINGS, "bootstrap.servers": oauth_servers, "oauth_cb": token}
    admin = AdminClient(settings)
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(60)
    consumer = make_consumer(settings | {"oauth_cb": short_lived}, start="earliest")
    consumer.subscribe([name])
    producer = Producer(settings)
    for _ in range(2):
        before = len(made)
        # Two clients, whose tokens live for a second and a half: each has had another one by then.
        until(lambda: not list(consumer.units(idle_seconds=3)) and len(made) >= before + 4, 120, "more tokens")  # noqa: B023
        producer.produce(name, b"late")
        assert producer.flush(60) == 0
        with next(consumer.units()) as unit:
            assert [m.value() for m in unit.messages] == [b"late"]
    until(lambda: _describes(consumer, name), 120, "the consumer's own questions to be answered")


def test_commands_that_need_the_database_only_connect_by_the_function(command: Command, file: Path) -> None:
    assert command("migrate", "--config", file).code == 0
    assert command("dead-letters", "list", "--config", file).code == 0
    assert asked(file) == 2


def test_a_sample_is_read_with_a_token(command: Command, file: Path) -> None:
    result = command(
        "sink", "--config", file, "--topic", "letters", "--table", "of_letters", "--create-table", "--dry-run"
    )
    assert "30 rows for of_letters" in result.out, result.err


def test_the_command_line_goes_before_the_function(command: Command, file: Path, conninfo: str) -> None:
    assert command("dead-letters", "list", "--config", file, "--conninfo", conninfo).code == 0
    assert asked(file) == 0


@pytest.mark.parametrize(
    ("text", "code", "complaint"),
    [
        ('connect = "{0}"\n', 2, "connect {0}: write it as package.module:function"),
        ('connect = "no_such_{0}:connect"\n', 2, "connect no_such_{0}:connect: No module named"),
        ('connect = "{0}:number"\n', 2, "connect {0}:number: {0} has no function number"),
        ('connect = "{0}:connect"\nconninfo = "dbname=x"\n', 2, "conninfo and connect are two ways to one database"),
        ('connect = "{0}:nothing"\n', 1, "connect {0}:nothing: it must return a psycopg.Connection, and returned str"),
        ('connect = "{0}:nobody"\n', 1, "no connection to Postgres by connect {0}:nobody"),
        ('conninfo = "dbname=x"\n[kafka]\noauth_cb = "{0}:number"\n', 2, "oauth_cb {0}:number: {0} has no function"),
        ('conninfo = "dbname=x"\n[kafka]\nerror_cb = "{0}:connect"\n', 2, "error_cb in [kafka] is a function"),
    ],
)
def test_a_name_that_is_no_function_is_refused_by_name(
    command: Command, functions: str, tmp_path: Path, text: str, code: int, complaint: str
) -> None:
    path = tmp_path / "bank.toml"
    path.write_text(text.format(functions))
    result = command("status", "--config", path)
    assert result.code == code
    assert complaint.format(functions) in result.err


AWS = {
    "boto3": """
        class client:
            def __init__(self, service): assert service == "rds"
            def generate_db_auth_token(self, host, port, user): return f"token of {user} for {host}:{port + 0}"
        """,
    "aws_msk_iam_sasl_signer": """
        from tests.cli.test_managed_services import token
        class MSKAuthTokenProvider:
            def generate_auth_token(region):
                assert region == "eu-west-1"
                made, expires = token("")
                return made, expires * 1000
        """,
}
GOOGLE = {
    "google.auth": """
        class Credentials:
            token = None
            def refresh(self, request): self.token = "now"
        def default(scopes): return Credentials(), "project"
        """,
    "google.auth.transport.requests": "class Request: pass",
}


def stand_in(place: Path, modules: dict[str, str]) -> None:
    """Write modules that stand for a cloud's own packages: there is no cloud to ask."""
    for name, text in modules.items():
        path = place.joinpath(*name.split("."))
        path.mkdir(parents=True)
        (path / "__init__.py").write_text(dedent(text))


@pytest.fixture
def clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conninfo: str) -> Iterator[None]:
    """The packages and the environment that the how-to's functions need."""
    stand_in(tmp_path, AWS | GOOGLE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("BANK_DATABASE", make_conninfo("", **conninfo_to_dict(conninfo)))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in {"aws", "google_cloud", *AWS} or name.startswith("google."):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "password"), [("aws", "token of {user} for {host}:{port}"), ("google_cloud", "now")]
)
def test_the_file_and_the_functions_of_the_how_to_connect(
    module: str,
    password: str,
    clouds: None,
    command: Command,
    file: Path,
    oauth_servers: str,
    conninfo: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[object] = []
    connect = psycopg.connect

    def noting(conninfo: str, *, password: str, **options: Any) -> psycopg.Connection[Any]:
        given.append(password)
        return connect(conninfo, **options)

    monkeypatch.setattr(psycopg, "connect", noting)
    shown = re.search(r"^```toml\n(.*?)^```", HOW_TO.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert shown is not None
    text = re.sub(r"b-1[\w.:-]+", oauth_servers, shown[1]).replace("aws:connect", f"{module}:connect")
    file.write_text(text.replace("SASL_SSL", "SASL_PLAINTEXT"))
    result = command("reset", "--config", file, "--topic", "letters", "--to-earliest")
    assert (result.code, result.err) == (0, "")
    assert "group accounts, topic letters" in result.out
    assert given == [password.format(**conninfo_to_dict(conninfo))]
