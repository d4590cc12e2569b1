"""Generated mutants that change nothing, and why: by module, then by name."""

from __future__ import annotations

_NO_BOUND = "what is not above 0 is no bound"
_SET_BEFORE = "failed() and named() set it before it is read"

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
