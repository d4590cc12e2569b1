"""TLS and passwords to both servers, and roles that may do what is documented and nothing else."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, LiteralString, NamedTuple

import psycopg
import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from confluent_kafka.cimpl import NewTopic

from exactly_once.cli import main
from exactly_once.ledger import migrate
from exactly_once.ledger.sql import grants
from tests.docker import certificates
from tests.support import journal
from tests.support.docker import ROOT, Stack, local_image, stack
from tests.support.topics import create_topic, produce
from tests.support.worker import Crew

MESSAGES = 600
HERE = Path(__file__).parent
DOCUMENT = ROOT / "docs" / "how-to" / "deploy.md"
OWNER, WORKER = "ledger_owner", "bank_worker"
POOLER = {
    "bank = host=db.example.org": "postgres = host=postgres",
    "/etc/pgbouncer/": "/certificates/",
    "/etc/ssl/bank-ca.crt": "/certificates/ca.crt",
}
"""What the how-to's PgBouncer is called here."""
EFFECTS = f"""
    GRANT USAGE ON SCHEMA journal TO {WORKER};
    GRANT INSERT ON journal.entries TO {WORKER};
    GRANT SELECT, INSERT, UPDATE ON journal.counter TO {WORKER};
"""
"""What the handler of these tests needs; every application grants its own."""


def documented_sql() -> list[str]:
    """The statements of the page of deployment, a text for each of its blocks."""
    found = re.findall(r"^```sql\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) == 4
    return found


class Secured(NamedTuple):
    """The servers, and the ways in."""

    servers: Stack
    folder: Path
    passwords: dict[str, str]

    @property
    def operator_servers(self) -> str:
        return self.servers.bootstrap_servers("KAFKA_PORT")

    def conninfo(self, user: str, **changes: str) -> str:
        """How a user gets into the database: over TLS, checking who the server is, with a password."""
        fields = {
            "host": "localhost",
            "hostaddr": "127.0.0.1",
            "port": str(self.servers.ports["POSTGRES_PORT"]),
            "dbname": "postgres",
            "user": user,
            "password": self.passwords[user],
            "sslmode": "verify-full",
            "sslrootcert": str(self.folder / "ca.crt"),
            **changes,
        }
        return " ".join(f"{name}={value}" for name, value in fields.items())

    def kafka(self, **changes: str) -> dict[str, Any]:
        """How the worker gets into Kafka."""
        settings = {
            "bootstrap.servers": f"localhost:{self.servers.ports['KAFKA_SECURE_PORT']}",
            "broker.address.family": "v4",
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": WORKER,
            "sasl.password": self.passwords[WORKER],
            "ssl.ca.location": str(self.folder / "ca.crt"),
            "ssl.endpoint.identification.algorithm": "https",
        }
        return settings | {name.replace("_", "."): value for name, value in changes.items()}


@pytest.fixture(scope="module")
def secured(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A broker and a Postgres that ask for TLS and passwords, with the documented roles."""
    folder = tmp_path_factory.mktemp("certificates")
    certificates.make(folder)
    passwords = {name: secrets.token_urlsafe(16) for name in ("postgres", OWNER, WORKER)}
    ports = ["KAFKA_PORT", "POSTGRES_PORT", "KAFKA_SECURE_PORT", "PGBOUNCER_PORT"]
    environment = {"CERTIFICATES": str(folder), "POSTGRES_PASSWORD": passwords["postgres"]}
    environment |= local_image("POSTGRES_IMAGE", "postgres:15")  # the other local one was built without TLS
    with stack("minimal", ["kafka", "postgres"], ports, environment, [HERE / "secure.yaml"]) as servers:
        found = Secured(servers, folder, passwords)
        _make_roles(found)
        _make_user(found)
        yield found


@pytest.fixture
def make_crew(secured: Secured, name: str) -> Iterator[Callable[..., Crew]]:
    """Make the crew of a topic: the tests look with the superuser's account, the workers have their own."""
    crews: list[Crew] = []

    def make(topic: str) -> Crew:
        _allow(secured, ResourceType.TOPIC, topic)
        _allow(secured, ResourceType.GROUP, name)
        crew = Crew(
            secured.operator_servers,
            secured.conninfo("postgres"),
            name,
            [topic],
            kafka=secured.kafka(),
            workers_conninfo=secured.conninfo(WORKER),
        )
        crews.append(crew.__enter__())
        return crew

    yield make
    for crew in crews:
        crew.__exit__(None, None, None)


@pytest.fixture
def topic(secured: Secured) -> str:
    """A topic with messages, made by the operator."""
    made = create_topic(secured.operator_servers, 3)
    produce(secured.operator_servers, made, MESSAGES, 3)
    return made


@pytest.fixture(scope="module")
def pooled(secured: Secured) -> str:
    """The worker's way through the PgBouncer of the how-to, with TLS on both sides of it."""
    (settings,) = re.findall(r"^```ini\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for theirs, ours in POOLER.items():
        assert theirs in settings
        settings = settings.replace(theirs, ours)
    with psycopg.connect(secured.conninfo("postgres")) as connection:
        kept = connection.execute("SELECT rolpassword FROM pg_authid WHERE rolname = %s", [WORKER]).fetchone()
    assert kept is not None
    (secured.folder / "userlist.txt").write_text(f'"{WORKER}" "{kept[0]}"\n')
    (secured.folder / "pgbouncer.ini").write_text(settings)
    secured.servers.compose("up", "--detach", "pooler")
    secured.servers.until_ready("pooler")
    return secured.conninfo(WORKER, port=str(secured.servers.ports["PGBOUNCER_PORT"]))


def test_documented_grants_are_those_that_the_command_gives() -> None:
    """And nothing is missing there that was added here; no engine is needed to see that."""
    given = grants("exactly_once", WORKER).as_string(None).splitlines()
    assert documented_sql()[1].splitlines() == [line for line in given if not line.startswith("--")]


def test_worker_with_the_least_rights_applies_every_message_once(topic: str, make_crew: Callable[..., Crew]) -> None:
    """Killed in the middle, so that its heir has to acquire the rows and not only to find them new."""
    crew = make_crew(topic)
    first = crew.start(options={"max_messages": 50}, failpoint=["advanced", "kill", 3])
    first.wait_exit()
    crew.start(options={"max_messages": 50}, until_end=True).finish()
    crew.assert_exact()


def test_worker_with_the_least_rights_ends_a_frozen_owner(topic: str, make_crew: Callable[..., Crew]) -> None:
    """It may, because both have the same role; the frozen one holds the row that each unit needs."""
    crew = make_crew(topic)
    frozen = crew.start(options={"max_messages": 50}, failpoint=["handled", "stop", 3])
    frozen.wait("failpoint")
    frozen.wait_stopped()
    heir = crew.start(options={"max_messages": 50})
    crew.until_applied(MESSAGES)
    frozen.cont()
    frozen.wait("redelivered")
    crew.end_well(heir, frozen)
    crew.assert_exact()


def test_worker_goes_through_a_pooler_with_tls_on_both_sides(
    secured: Secured, pooled: str, topic: str, make_crew: Callable[..., Crew]
) -> None:
    crew = make_crew(topic)
    crew.start(conninfo=pooled, options={"max_messages": 50}, failpoint=["advanced", "kill", 3]).wait_exit()
    frozen = crew.start(conninfo=pooled, options={"max_messages": 50}, failpoint=["handled", "stop", 3])
    frozen.wait("failpoint")
    frozen.wait_stopped()
    heir = crew.start(conninfo=pooled, options={"max_messages": 50})
    crew.until_applied(MESSAGES)
    frozen.cont()
    crew.end_well(heir, frozen)
    crew.assert_exact()
    query = (
        "SELECT current_user, ssl, host(client_addr) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE pid = %s"
    )
    with psycopg.connect(pooled, prepare_threshold=None) as connection:
        (pid,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (None,)
        row = connection.execute(query, [pid]).fetchone()
    assert row == (WORKER, True, secured.servers["pooler"].address())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sslmode": "disable", "sslrootcert": ""}, "SSL required"),
        ({"password": "a-guess"}, "password authentication failed|SASL authentication failed"),
        ({"user": OWNER}, "password authentication failed|SASL authentication failed"),
        ({"channel_binding": "require"}, "channel binding"),
    ],
)
def test_pooler_lets_nobody_in_by(secured: Secured, pooled: str, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(psycopg.OperationalError, match=reason):
        psycopg.connect(psycopg.conninfo.make_conninfo(pooled, **changes))


def test_worker_with_the_least_rights_sets_a_message_aside(topic: str, make_crew: Callable[..., Crew]) -> None:
    crew = make_crew(topic)
    crew.start(mode="run", until_end=True, poison=[7]).finish()
    dead = crew.look("SELECT partition, message_offset FROM exactly_once.dead_letter WHERE group_id = %s")
    assert sorted(dead) == [(0, 7), (1, 7), (2, 7)]
    assert sorted((lost.partition, lost.offset) for lost in crew.verdict(topic).lost) == sorted(dead)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM exactly_once.ledger",
        "TRUNCATE exactly_once.ledger",
        "UPDATE exactly_once.audit SET reason = ''",
        "DELETE FROM exactly_once.audit",
        "UPDATE exactly_once.dead_letter SET error = ''",
        "DELETE FROM exactly_once.dead_letter",
        "UPDATE exactly_once.version SET version = 0",
        "ALTER TABLE exactly_once.ledger ADD COLUMN mine int",
        "DROP TABLE exactly_once.ledger",
        "CREATE TABLE exactly_once.mine (n int)",
        "CREATE SCHEMA mine",
        "SELECT * FROM journal.entries",
        f"SET ROLE {OWNER}",
        "SELECT pg_read_file('postgresql.conf')",
    ],
)
def test_worker_may_not(secured: Secured, statement: LiteralString) -> None:
    with psycopg.connect(secured.conninfo(WORKER)) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(statement)


def test_worker_may_not_end_sessions_of_others(secured: Secured) -> None:
    with (
        psycopg.connect(secured.conninfo(OWNER)) as other,
        psycopg.connect(secured.conninfo(WORKER)) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute("SELECT pg_terminate_backend(%s)", [other.info.backend_pid])


def test_worker_may_not_migrate_an_older_schema(secured: Secured) -> None:
    """Only the owner may, in a schema that is not there yet as in one that is behind."""
    with (
        psycopg.connect(secured.conninfo(WORKER), autocommit=True) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        migrate.migrate(connection, "another")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sslmode": "disable", "sslrootcert": ""}, "no encryption"),
        ({"sslrootcert": "other-ca.crt"}, "certificate verify failed"),
        ({"host": "elsewhere.example"}, "does not match host name"),
        ({"password": "a-guess"}, "password authentication failed"),
    ],
)
def test_database_lets_nobody_in_by(secured: Secured, changes: dict[str, str], reason: str) -> None:
    if changes.get("sslrootcert"):
        changes = {**changes, "sslrootcert": str(secured.folder / changes["sslrootcert"])}
    with pytest.raises(psycopg.OperationalError, match=reason):
        psycopg.connect(secured.conninfo(WORKER, **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sasl.password": "a-guess"}, "[Aa]uthentication failed"),
        ({"ssl.ca.location": "other-ca.crt"}, "certificate verify failed"),
        ({"security.protocol": "SASL_PLAINTEXT"}, "transport failure"),
    ],
)
def test_worker_says_why_kafka_does_not_let_it_in(
    secured: Secured, topic: str, make_crew: Callable[..., Crew], changes: dict[str, str], reason: str
) -> None:
    if "ssl.ca.location" in changes:
        changes = {**changes, "ssl.ca.location": str(secured.folder / changes["ssl.ca.location"])}
    crew = make_crew(topic)
    kafka = {**crew.kafka, **changes}
    worker = crew.start(ready=False, kafka=kafka, options={"startup_seconds": 20})
    failed = worker.wait("failed")
    assert failed["error"] == "BrokerUnreachable"
    assert re.search(reason, failed["text"]), failed["text"]


def test_worker_may_neither_write_to_its_topic_nor_make_one(secured: Secured, topic: str) -> None:
    _allow(secured, ResourceType.TOPIC, topic)
    producer = Producer(secured.kafka())
    errors: list[Any] = []
    producer.produce(topic, b"mine", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(60) == 0
    assert "TOPIC_AUTHORIZATION_FAILED" in errors[0].name()
    admin = AdminClient(secured.kafka())
    with pytest.raises(KafkaException, match="AUTHORIZATION_FAILED"):
        admin.create_topics([NewTopic("mine", num_partitions=1)])["mine"].result(60)


def _make_roles(secured: Secured) -> None:
    """Do what docs/how-to/deploy.md says, with its commands."""
    journal.create(secured.conninfo("postgres"))
    roles = documented_sql()[0].replace("DATABASE bank", "DATABASE postgres")
    for role, variable in ((OWNER, "owner"), (WORKER, "worker")):
        roles = roles.replace(f":'{variable}_password'", f"'{secured.passwords[role]}'")
    with psycopg.connect(secured.conninfo("postgres"), autocommit=True) as connection:
        connection.execute(roles.encode())
        connection.execute(EFFECTS)
    assert main(["migrate", "--role", WORKER, "--conninfo", secured.conninfo(OWNER)]) == 0


def _make_user(secured: Secured) -> None:
    """Give the worker an account at the broker."""
    admin = AdminClient({"bootstrap.servers": secured.operator_servers})
    credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
    password = secured.passwords[WORKER].encode()
    for future in admin.alter_user_scram_credentials(
        [UserScramCredentialUpsertion(WORKER, credential, password)]
    ).values():
        future.result(60)


def _allow(secured: Secured, kind: ResourceType, name: str) -> None:
    """Let the worker read one topic or use one group."""
    admin = AdminClient({"bootstrap.servers": secured.operator_servers})
    rule = (f"User:{WORKER}", "*", AclOperation.READ, AclPermissionType.ALLOW)
    for future in admin.create_acls([AclBinding(kind, name, ResourcePatternType.LITERAL, *rule)]).values():
        future.result(60)
