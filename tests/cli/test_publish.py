"""``exactly-once publish status``: owners, windows, chains, and sequences in a topic."""

from __future__ import annotations

from typing import Any

import pytest

from exactly_once.publish import (
    DedupProducer,
    Link,
    PostgresChain,
    PostgresWindow,
    PublishOwner,
    SequenceFilter,
    Store,
)
from exactly_once.publish.headers import with_sequence
from tests.cli.conftest import Command
from tests.support.topics import create_topic, delete_records


def test_the_status_shows_what_filters_hold(
    operate: Command, conninfo: str, bootstrap_servers: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = {"bootstrap.servers": bootstrap_servers}
    topic = create_topic(bootstrap_servers, 1, name=f"{name}-numbers")
    with DedupProducer(kafka, dedup=SequenceFilter(), producer_name=name) as producer:
        for number in (1, 2):
            producer.produce(topic, b"x", sequence=number)
        producer.flush(60)
        # One that names a predecessor which never came: it lies beyond a gap.
        producer._client.produce(topic, b"x", headers=with_sequence(None, name, 3, 4))
    store = Store(conninfo)
    PostgresChain(store).confirm_many([Link(name, number) for number in (0, 1, 5)])
    store.close()
    # The other one's lease runs for a century.
    with PublishOwner(conninfo, name=name) as owner, PublishOwner(conninfo, lease_seconds=3.2e9) as other:
        window = PostgresWindow(owner, scope=name, seconds=3600)
        window.reserve_many(["a", "b", "c"])
        window.confirm("a")
        window.mark_unknown("b")
        result = operate("publish", "status", "--json", "--topic", topic)
        text = operate("publish", "status").out
        monkeypatch.setenv("COLUMNS", "80")
        narrow = operate("publish", "status").out
    assert (result.code, result.err) == (0, "")
    found = result.json
    assert set(found) == {"window", "owners", "scopes", "chains", "sequences"}
    (mine,) = [each for each in found["owners"] if each["name"] == name]
    assert (mine["id"], mine["in_flight"], mine["ended"]) == (owner.id, 1, False)
    assert 0 < mine["lease_seconds"] <= 60
    assert [each["lease_seconds"] for each in found["owners"] if each["id"] == other.id] == [pytest.approx(3.2e9)]
    scopes: list[dict[str, Any]] = [each for each in found["scopes"] if each["scope"] == name]
    assert scopes == [{"scope": name, "confirmed": 1, "in_flight": 1, "unknown": 1}]
    assert [c for c in found["chains"] if c["chain"] == name] == [{"chain": name, "last_seen": 5, "gaps": 1}]
    assert found["sequences"] == [{"topic": topic, "producer": name, "persisted": 2, "beyond_a_gap": 1}]
    assert max(map(len, narrow.splitlines())) <= 80, "it took no notice of COLUMNS"
    assert all(part in text for part in ("window: ", "owners:", "scopes:", "chains:", name))


def test_numbers_are_shown_without_a_database(command: Command, bootstrap_servers: str, name: str) -> None:
    topic = create_topic(bootstrap_servers, 1)
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=SequenceFilter(), producer_name=name) as made:
        made.produce(topic, b"x", sequence=1)
    where = ("--bootstrap-servers", bootstrap_servers)
    done = command("publish", "status", "--topic", topic, *where, "--json")
    sequence = {"topic": topic, "producer": name, "persisted": 1, "beyond_a_gap": 0}
    assert (done.code, done.json) == (0, {"sequences": [sequence]})
    assert name in command("publish", "status", "--topic", topic, *where).out
    assert "--conninfo" in command("publish", "status", *where).err


def test_numbers_that_retention_has_removed_are_told_of(
    command: Command, bootstrap_servers: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = create_topic(bootstrap_servers, 1)
    with DedupProducer({"bootstrap.servers": bootstrap_servers}, dedup=SequenceFilter(), producer_name=name) as made:
        for number in range(10):
            made.produce(topic, b"x", sequence=number)
    delete_records(bootstrap_servers, topic, 4)
    caplog.clear()
    done = command("publish", "status", "--topic", topic, "--bootstrap-servers", bootstrap_servers, "--json")
    assert done.json["sequences"][0]["persisted"] == -1
    assert f"retention has removed messages, {topic}[0] below offset 4: of producers the rest is shown" in caplog.text
