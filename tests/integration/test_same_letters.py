"""A message is a dead letter once, and another one at its place is none the less one. Without Kafka."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import uuid4

import psycopg
from confluent_kafka import Message

from exactly_once._model import Advance, Partition
from exactly_once.ledger.dead_letters import settle, store


def test_a_letter_that_was_settled_or_is_of_another_topic_of_the_name_is_another_one(
    db: psycopg.Connection[Any], name: str
) -> None:
    message = Message(topic=name, partition=0, offset=7, value=b"x", timestamp=(1, 1_767_225_600_000))
    advance = Advance(
        partition=Partition(name, 0), token=uuid4(), epoch=1, topic_id="a", expected=7, next_offset=8, leader_epoch=None
    )

    def dies(topic_id: str) -> bool:
        at = replace(advance, topic_id=topic_id)
        where: Any = {"schema": "exactly_once", "group_id": name, "after_offset": 7, "attempts": 1, "once": True}
        return store(db, message, ValueError("bad"), advance=at, **where)

    assert [dies("a"), dies("a")] == [True, False]
    assert [dies("b"), dies("b")] == [True, False], "the topic was made again"
    ids = "SELECT id FROM exactly_once.dead_letter WHERE group_id = %s AND topic_id = 'a'"
    ((letter,),) = db.execute(ids, (name,)).fetchall()
    assert settle(db, letter, "replayed", schema="exactly_once") is not None
    assert dies("a"), "its replay went, and it dies again"
