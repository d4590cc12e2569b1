"""Topics to test with: created, and filled with numbered messages."""

from __future__ import annotations

import ctypes
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition, cimpl
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewPartitions, NewTopic

from tests.support.waiting import until

_NOT_YET = {
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._TRANSPORT,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._UNKNOWN_TOPIC,
}
"""What is answered for a partition that was made a moment ago, and by a client that has not connected again yet."""


def create_topic(
    bootstrap_servers: str, partitions: int, *, name: str | None = None, replication: int = 1, **config: str
) -> str:
    """Create a topic and return its name once the leader of every partition answers.

    `config` is the topic's, with underscores for dots: `cleanup_policy="compact"`.
    """
    name = name or f"topic-{uuid4().hex[:12]}"
    settings = {key.replace("_", "."): value for key, value in config.items()}
    topic = NewTopic(name, num_partitions=partitions, replication_factor=replication, config=settings)
    with AdminClient({"bootstrap.servers": bootstrap_servers}) as admin:
        until(lambda: _is_made(admin, topic), 60, f"brokers that are not fenced, for {name}")
        until(lambda: _answers(admin, name, partitions), 30, f"leaders of {partitions} partitions of {name}")
    return name


def _is_made(admin: AdminClient, topic: NewTopic) -> bool:
    """Make a topic, unless brokers are fenced: on a busy machine one is, until its next heartbeat comes."""
    try:
        admin.create_topics([topic])[topic.topic].result(timeout=60)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.INVALID_REPLICATION_FACTOR:
            raise
        return False
    return True


def add_partitions(bootstrap_servers: str, name: str, total: int) -> None:
    """Give a topic more partitions, and return once the leader of each answers."""
    with AdminClient({"bootstrap.servers": bootstrap_servers}) as admin:
        admin.create_partitions([NewPartitions(name, total)])[name].result(timeout=60)
        until(lambda: _answers(admin, name, total), 30, f"leaders of {total} partitions of {name}")


def until_in_sync(bootstrap_servers: str, name: str) -> None:
    """Wait until every replica has everything, so that another broker may go."""
    with AdminClient({"bootstrap.servers": bootstrap_servers}) as admin:

        def in_sync() -> bool:
            partitions = admin.list_topics(name, timeout=60).topics[name].partitions.values()
            return bool(partitions) and all(len(p.isrs) == len(p.replicas) and p.leader >= 0 for p in partitions)

        until(in_sync, 120, f"the replicas of {name}")


def delete_topic(bootstrap_servers: str, name: str) -> None:
    """Delete a topic, so that another module of tests may have one of the same name."""
    with AdminClient({"bootstrap.servers": bootstrap_servers}) as admin:
        admin.delete_topics([name])[name].result(timeout=60)
        until(lambda: name not in admin.list_topics(timeout=60).topics, 30, f"{name} to be gone")


def delete_records(bootstrap_servers: str, topic: str, before: int, partition: int = 0) -> None:
    """Move the start of a log, as retention does."""
    place = TopicPartition(topic, partition, before)
    with AdminClient({"bootstrap.servers": bootstrap_servers}) as admin:
        admin.delete_records([place])[place].result(60)


def end_of(bootstrap_servers: str, topic: str) -> int:
    """Where partition 0 ends for who reads committed messages."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "looks"})
    try:
        return consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=60)[1]
    finally:
        consumer.close()


def until_end(bootstrap_servers: str, topic: str, end: int) -> None:
    """Wait until partition 0 ends there: a marker comes after the answer to the producer that ends its transaction."""
    until(lambda: end_of(bootstrap_servers, topic) == end, 60, f"the marker before offset {end} of {topic}")


def produce(bootstrap_servers: str, topic: str, n: int, partitions: int, *, start: int = 0) -> None:
    """Produce `n` messages over the partitions in turn; key and value are the numbers from `start` on."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "linger.ms": 5})
    failures: list[KafkaError] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            failures.append(error)

    for number in range(start, start + n):
        text = str(number).encode()
        while True:
            try:
                producer.produce(topic, text, text, partition=number % partitions, on_delivery=delivered)
                break
            except BufferError:  # the queue is full: serve reports until there is room
                producer.poll(1)
        producer.poll(0)
    unsent = producer.flush(60)
    assert not failures, f"{len(failures)} messages failed, the first: {failures[0]}"
    assert not unsent, f"{unsent} messages were not sent within a minute"


def produce_header_name(bootstrap_servers: str, topic: str, value: bytes, name: bytes) -> None:
    """Append a message with a header whose name is any bytes, as clients of other languages can."""
    client = ctypes.CDLL(cimpl.__file__)
    for made in (client.rd_kafka_conf_new, client.rd_kafka_new, client.rd_kafka_headers_new):
        made.restype = ctypes.c_void_p
    said = ctypes.create_string_buffer(500)
    settings = ctypes.c_void_p(client.rd_kafka_conf_new())
    client.rd_kafka_conf_set(settings, b"bootstrap.servers", bootstrap_servers.encode(), said, len(said))
    producer = ctypes.c_void_p(client.rd_kafka_new(0, settings, said, len(said)))
    headers = ctypes.c_void_p(client.rd_kafka_headers_new(ctypes.c_size_t(1)))
    size = ctypes.c_ssize_t
    client.rd_kafka_header_add(headers, name, size(len(name)), b"x", size(1))
    # RD_KAFKA_VTYPE_: TOPIC 1, PARTITION 3, VALUE 4, MSGFLAGS 7 (2: copy), HEADERS 10, END 0.
    parts = (1, topic.encode(), 3, 0, 4, value, ctypes.c_size_t(len(value)), 7, 2, 10, headers, 0)
    assert client.rd_kafka_producev(producer, *parts) == 0
    assert client.rd_kafka_flush(producer, 30_000) == 0
    client.rd_kafka_destroy(producer)


def _answers(admin: AdminClient, topic: str, partitions: int) -> bool:
    # The metadata names a leader before that broker knows: it refuses with "not leader for partition", and not every
    # request is repeated by the client.
    asked = {TopicPartition(topic, n): OffsetSpec.earliest() for n in range(partitions)}  # type: ignore[no-untyped-call]
    try:
        found = admin.list_topics(topic, timeout=60).topics[topic].partitions.values()
        if len(found) != partitions or not all(p.leader >= 0 and p.error is None for p in found):
            return False
        for answer in admin.list_offsets(asked, request_timeout=60).values():
            answer.result(timeout=60)
    except KafkaException as error:
        if error.args[0].code() in _NOT_YET:
            return False
        raise
    return True
