"""The topic of the demo and of ``verify`` where a broker misses a heartbeat."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from confluent_kafka import KafkaError, KafkaException

from exactly_once.demo import payments


class Admin:
    """Stands for the client: no real broker misses a heartbeat when it is asked to."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    def __call__(self, _: object) -> Admin:
        return self

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def create_topics(self, _: object) -> dict[str, Future[None]]:
        future: Future[None] = Future()
        if self.codes:
            future.set_exception(KafkaException(KafkaError(self.codes.pop(0))))
        else:
            future.set_result(None)
        return {"t": future}


def test_a_broker_that_seems_to_be_away_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    admin = Admin(*2 * [KafkaError.INVALID_REPLICATION_FACTOR])
    monkeypatch.setattr(payments, "AdminClient", admin)
    payments.create_topic("127.0.0.1:1", "t")
    assert admin.codes == []
    assert [record.getMessage() for record in caplog.records] == [
        "too few brokers are there for topic t; waits up to 15 s"
    ]
    admin.codes = [KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.TOPIC_ALREADY_EXISTS]
    with pytest.raises(KafkaException, match="TOPIC_ALREADY_EXISTS"):
        payments.create_topic("127.0.0.1:1", "t")
    assert admin.codes == [KafkaError.TOPIC_ALREADY_EXISTS]
