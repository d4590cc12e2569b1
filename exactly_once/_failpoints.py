"""Failpoints: named moments of the protocol at which a test can injure the process.

Nothing is armed unless a test or the demo calls :func:`arm`; an unarmed failpoint is one look
into an empty dict.
"""

from __future__ import annotations

from collections.abc import Callable

# In the order in which every unit passes them.
OF_A_UNIT = ("polled", "begun", "handled", "guarded", "advanced", "committed", "positioned", "mirrored")
# All; the last ones are passed only by units that have to.
NAMES = (*OF_A_UNIT, "dead_lettered")

_armed: dict[str, Callable[[], None]] = {}


def arm(name: str, action: Callable[[], None]) -> None:
    """Run ``action`` each time the failpoint is passed.

    :raises ValueError: for a name that is not in :data:`NAMES`.
    """
    if name not in NAMES:
        raise ValueError(f"no failpoint {name!r}; there are {', '.join(NAMES)}")
    _armed[name] = action


def disarm() -> None:
    """Disarm every failpoint."""
    _armed.clear()


def is_armed(name: str) -> bool:
    """Tell whether something happens at this failpoint."""
    return name in _armed


def failpoint(name: str) -> None:
    """Mark the moment ``name``; do what was armed there."""
    if _armed and name in _armed:
        _armed[name]()
