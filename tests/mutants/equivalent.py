"""Generated mutants that change nothing, and why: by module, then by name."""

from __future__ import annotations

_NO_BOUND = "what is not above 0 is no bound"
_SET_BEFORE = "failed() and named() set it before it is read"
_COUNTED_ANEW = "next_batch() counts the spans anew, which only takes longer"
_POSITIONED = "only what is owned is positioned"
_OF_A_ROW = "only of a row that is there"
_RISES = "of two runs of a partition the later one has the higher offsets"
_ONE_BY_ONE = "where it matters each message is looked at, with the same result"
_BETWEEN = "what waits is between both offsets, or none of it is: they are the same once a partition was positioned"

EQUIVALENT: dict[str, dict[str, str]] = {
    "exactly_once/consumer/bisection.py": {
        "Bisection.__init__: 0 -> 1 #2": _SET_BEFORE,
        "Bisection.__init__: 0 -> -1 #2": _SET_BEFORE,
        "Bisection.__init__: self._full = 0 -> pass": _SET_BEFORE,
        "Bisection.__init__: 0 -> 1 #3": _SET_BEFORE,
        "Bisection.__init__: 0 -> -1 #3": _SET_BEFORE,
        "Bisection.named: 0 -> 1": "a batch that failed has at least one message",
        "Bisection.named: 0 -> -1": "a batch that failed has at least one message",
    },
    "exactly_once/consumer/buffer.py": {
        "Sent.__init__: repeat(only_topic) if only_topic else list(map(Message.topic, messages)) -> "
        "list(map(Message.topic, messages))": "repeat() is only cheaper",
        "Sent.__init__: headers.count(None) < len(headers) -> headers.count(None) <= len(headers)": (
            "where no message has headers there is nothing to copy"
        ),
        "_remade: 1.0 -> 2.0": "the client shows no latency below 0",
        "_remade: 1 -> 2": "the client shows no leader epoch below 0",
        "FetchBuffer.__init__: 0 -> -1": _NO_BOUND,
        "FetchBuffer.__init__: 0 -> -1 #3": _NO_BOUND,
        "FetchBuffer._take_in: is_taken and state is not None -> is_taken": "without a state nothing is taken",
        "FetchBuffer._take_in: self._spans = None if self._waiting else spans -> pass": _COUNTED_ANEW,
        "FetchBuffer._take_in: None if self._waiting else spans -> None": _COUNTED_ANEW,
        "FetchBuffer._take_in: self._waiting + taken if self._waiting else taken -> self._waiting + taken": (
            "a copy of the list"
        ),
        "FetchBuffer.next_batch: max_messages - len(batch) -> max_messages + len(batch)": "_cut() bounds it again",
        "FetchBuffer.next_batch: spans = None if self._waiting else self._spans -> pass": _COUNTED_ANEW,
        "FetchBuffer.next_batch: None if self._waiting else self._spans -> None": _COUNTED_ANEW,
        "FetchBuffer._is_current: 0 -> -1": _BETWEEN,
        "FetchBuffer._is_current: 1 -> 0": _BETWEEN,
        "FetchBuffer._in_order: 0 -> -1": _ONE_BY_ONE,
        "FetchBuffer._in_order: 1 -> 0": _ONE_BY_ONE,
        "FetchBuffer._in_order: last - first -> last + first": _ONE_BY_ONE,
        "FetchBuffer._in_order: 1 -> 2 #2": _ONE_BY_ONE,
        "FetchBuffer._runs: [(self.only_topic, messages)] if self.only_topic else groupby(messages, Message.topic) -> "
        "groupby(messages, Message.topic)": "the name is only asked of each message",
        "FetchBuffer._runs: number or 0 -> number": "what was fetched has a partition",
        "FetchBuffer._cut: len(messages) <= count -> len(messages) < count": _ONE_BY_ONE,
        "FetchBuffer._cut: size >= self._weighs_from > 0 or bytes_of(messages) <= size -> "
        "size >= self._weighs_from > 0": _ONE_BY_ONE,
        "_extend: end, leader_epoch = max((end, leader_epoch), (known.end, known.leader_epoch), "
        "key=lambda it: it[0]) -> pass": _RISES,
        "_extend: 0 -> 1 #2": _RISES,
        "_extend: 0 -> -1 #2": _RISES,
        "FetchBuffer._cut: 0 -> 1": "it is 0, or a multiple of 1,024",
        "FetchBuffer._cut: bytes_of(messages) <= size -> bytes_of(messages) < size": _ONE_BY_ONE,
    },
    "exactly_once/consumer/partitions.py": {
        "PartitionState.invalidate: 1 -> 2": "no end of a log is below 0",
        "PartitionState.invalidate: 1 -> 0": "an end at 0 is that of a log without messages",
        "PartitionState.is_at_end: self.phase is Phase.OWNED and self.positioned and (self.unreadable is None) and "
        "(self.applied > self.next_offset) -> "
        "self.positioned and self.unreadable is None and (self.applied > self.next_offset)": _POSITIONED,
        "PartitionState.is_at_end: self.phase is Phase.OWNED and self.positioned and (self.unreadable is None) and "
        "(self.applied > self.next_offset) -> "
        "self.phase is Phase.OWNED and self.unreadable is None and (self.applied > self.next_offset)": (
            "without a position no end of the log is known"
        ),
        "Ownership.acquired: state.invalidate() -> pass": "what is pending was not positioned",
        "Ownership.classify: conflict is Conflict.OK and row is not None -> conflict is Conflict.OK": _OF_A_ROW,
        "Ownership.classify: conflict in (Conflict.AHEAD, Conflict.REWOUND) and row is not None -> "
        "conflict in (Conflict.AHEAD, Conflict.REWOUND)": _OF_A_ROW,
        "Ownership.deliverable: state is not None and state.phase is Phase.OWNED and state.positioned -> "
        "state is not None and state.positioned": _POSITIONED,
        "Ownership._move_on: after >= advance.next_offset -> after > advance.next_offset": (
            "a unit does not end at the first message behind a gap"
        ),
        "Ownership._go_to: state.next_offset = state.in_flight_until = state.position = row.next_offset -> "
        "state.next_offset = state.in_flight_until = row.next_offset": "positioned() sets it before it is read",
    },
    "exactly_once/ledger/outcome.py": {
        "Patience.committed: self.tries, self.by_statement, self._batch, self._seconds, self._last = "
        "(0, 0, None, 0.0, None) -> self.tries, self.by_statement, self._seconds, self._last = (0, 0, 0.0, None)": (
            "what is counted of a batch is 0 already"
        ),
        "is_mistaken: driver is None or not isinstance(driver, psycopg.OperationalError) -> "
        "not isinstance(driver, psycopg.OperationalError)": "None is no such error either",
        "is_mistaken: True -> False": "split() gives two parts for each attempt",
    },
    "exactly_once/publish/window.py": {
        "Generations.age: 2 -> 3": "after two turns no key is left, and turns are compared with each other only",
        "WindowFilter.__init__: 0 -> -1": "neither is above 0",
    },
}
