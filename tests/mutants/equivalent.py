"""Generated mutants that change nothing, and why: by module, then by name."""

from __future__ import annotations

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
}
