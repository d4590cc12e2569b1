"""A forked child with its parent's producer: it cannot use it, does not hang, and leaves the messages alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.publish.test_producer import values
from tests.support.topics import create_topic

PARENT = """
import gc, os, sys, time
from exactly_once.errors import ConfigurationError
from exactly_once.publish import DedupProducer, SequenceFilter, TransactionalProducer, WindowFilter

servers, topic, kind, use = sys.argv[1:]
settings = {"bootstrap.servers": servers}

if kind == "transactions":
    producer = TransactionalProducer({**settings, "transactional.id": topic}, dedup=lambda _: WindowFilter(keys=10))
    producer._turn.acquire()  # as another thread that publishes just now
    def publish():
        with producer.transaction() as transaction:
            transaction.produce(topic, b"0", dedup_key=0)
else:
    dedup = SequenceFilter if kind == "numbers" else lambda: WindowFilter(keys=10)
    producer = DedupProducer(settings, dedup=lambda _: dedup(), producer_name=topic)
    identity = {"sequence": 0} if kind == "numbers" else {"dedup_key": 0}
    delivery = producer.produce(topic, b"0", **identity)
    publish = lambda: producer.produce(topic, b"0", **identity)
if use in ("free", "exit") and kind != "transactions":
    delivery.result(60)  # or the client refers to it
refused = {
    "produce": publish,
    "poll": lambda: producer.poll(0),
    "flush": lambda: producer.flush(1),
    "len": lambda: len(producer),
    "result": lambda: delivery.result(1),
    "another topic": lambda: producer.last_sequence_id("another"),
    "resolve": lambda: producer.resolve(topic),
}

child = os.fork()
if child == 0:
    if use in refused:
        try:
            refused[use]()
        except ConfigurationError as error:
            os._exit(0 if "after the fork" in str(error) else 3)
        os._exit(4)
    elif use == "close":
        producer.close()
    elif use == "exit":
        del delivery
    else:
        producer = delivery = publish = refused = None
        gc.collect()
    if use == "exit":
        del producer, publish, refused
        sys.exit(0)
    os._exit(0)

for _ in range(600):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
    os.waitpid(child, 0)
    sys.exit("the child has not ended")
assert os.waitstatus_to_exitcode(status) == 0, status
if kind == "transactions":
    producer._turn.release()
    publish()
producer.close()
"""
USES = ("produce", "poll", "flush", "len", "result", "another topic", "resolve", "close", "free", "exit")


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        *(("keys", use) for use in USES),
        *(("numbers", use) for use in USES),
        *(("transactions", use) for use in ("produce", "poll", "flush", "close", "free")),
    ],
)
def test_a_child_leaves_its_parents_producer_alone(bootstrap_servers: str, kind: str, use: str) -> None:
    topic = create_topic(bootstrap_servers, 1)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PARENT, bootstrap_servers, topic, kind, use]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert values(bootstrap_servers, topic) == {b"0": 1}
