"""Sent: a batch as the broker sent it, whatever a handler does to the messages that it is given."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Message

from exactly_once.consumer import buffer
from exactly_once.consumer.buffer import HeadersUnreadable, Sent

BAD = 4


def message(offset: int, *, topic: str = "a", headers: Any = None, **more: Any) -> Message:
    return Message(topic=topic, partition=1, offset=offset, key=b"k", value=b"%d" % offset, headers=headers, **more)


def all_of(given: Message) -> tuple[Any, ...]:
    names = ("topic", "partition", "offset", "key", "value", "headers", "timestamp", "latency", "leader_epoch")
    found = {name: getattr(given, name)() for name in names}
    return tuple(list(value) if isinstance(value, list) else value for value in found.values())


def spoil(given: Message) -> None:
    if isinstance(headers := given.headers(), list):
        headers.append(("more", b""))
    given.set_key(b"other")
    given.set_value(b"other")
    given.set_headers([("other", b"")])


@pytest.mark.parametrize("only_topic", [None, "a"])
def test_what_a_handler_sets_does_not_come_again(only_topic: str | None) -> None:
    given = [
        message(3, headers=[("h", b"1")], timestamp=(1, 1000), latency=0.5, leader_epoch=7),
        message(4),
        message(5, topic=only_topic or "b", headers=[]),
    ]
    before = list(map(all_of, given))
    sent = Sent(given, only_topic=only_topic)
    assert (len(sent), sent.messages) == (3, tuple(given))
    for each in given:
        spoil(each)
    for _ in range(2):
        again = sent.again()
        assert list(map(all_of, again)) == before
        for each in again:
            spoil(each)
    assert [all_of(sent.of(each)) for each in given] == before
    assert sent.of(again[0]) is again[0], "none of the batch"


def test_the_message_before_one_is_that_of_its_partition() -> None:
    given = [message(7), message(3), message(5, topic="b"), message(4), message(9)]
    sent = Sent(given)
    assert [sent.before(each) for each in given] == [4, None, None, 3, 7]
    assert sent.before(message(5, topic="c")) is None


class Client(Message):
    """What the client does with a header whose name is no UTF-8, which only a broker can give to it."""

    refusal: BaseException
    cause: BaseException | None = None

    def headers(self) -> Any:
        if self.offset() == BAD and Message.headers(self) is not None:
            raise Client.refusal from Client.cause
        return Message.headers(self)


NO_TEXT = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


@pytest.mark.parametrize(("error", "cause"), [(NO_TEXT, None), (SystemError("returned a result"), NO_TEXT)])
def test_a_message_whose_headers_cannot_be_read_says_so_where_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, cause: BaseException | None
) -> None:
    """``tests/integration/test_bad_messages.py`` has a broker send one."""
    monkeypatch.setattr(buffer, "Message", Client)
    monkeypatch.setattr(Client, "refusal", error, raising=False)
    monkeypatch.setattr(Client, "cause", cause)
    sent = Sent([message(n, headers=[("h", b"%d" % n)]) for n in (3, BAD, 5)])
    for each in (sent.messages, sent.again()):
        assert [m.value() for m in each] == [b"3", b"4", b"5"]
        assert [m.headers() for m in each if m.offset() != BAD] == [[("h", b"3")], [("h", b"5")]]
        with pytest.raises(HeadersUnreadable, match=r"^a\[1\] offset 4: the name of a header is no UTF-8") as raised:
            each[1].headers()
        assert (raised.value.topic, raised.value.partition, raised.value.offset) == ("a", 1, BAD)


def test_another_error_of_the_client_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "Message", Client)
    monkeypatch.setattr(Client, "refusal", SystemError("of another kind"), raising=False)
    with pytest.raises(SystemError, match="of another kind"):
        Sent([message(BAD, headers=[("h", b"")])])
