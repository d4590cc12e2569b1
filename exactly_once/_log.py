"""Logs: what a record carries besides its text, so that a collector need not parse it."""

from __future__ import annotations

from collections.abc import Iterable

from ._model import Advance, Partition

# What a record may carry, see :func:`about`.
FIELDS = ("action", "group", "topic", "partition", "offset", "owner_epoch", "partitions")
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def about(
    action: str,
    *,
    group: str | None = None,
    partition: Partition | None = None,
    offset: int | None = None,
    owner_epoch: int | None = None,
    several: Iterable[Advance | Partition] = (),
) -> dict[str, object]:
    """Return the ``extra`` of a record: ``action`` names what happened, the rest where; what is unknown is left out.

    Of ``several`` places one is written as if it were given; more become the list ``partitions``.
    """
    places = list(several)
    if len(places) == 1:
        (place,) = places
        if isinstance(place, Advance):
            partition, offset, owner_epoch = place.partition, place.expected, place.epoch
        else:
            partition = place
    names = [str(place.partition if isinstance(place, Advance) else place) for place in places]
    topic, number = (None, None) if partition is None else partition
    values = (action, group, topic, number, offset, owner_epoch, names if len(names) > 1 else None)
    return {key: value for key, value in zip(FIELDS, values, strict=True) if value is not None}


def text_of(error: object) -> str:
    """Return what an error says; one of an application may fail at that, and then has still to be told by name.

    A group says only how many errors it has: theirs go with it.
    """
    try:
        parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        return "; ".join([str(error).strip(), *map(named, parts)])
    except Exception as trouble:  # noqa: BLE001 - whatever it is, it is the application's
        return f"<its text cannot be made: {type(trouble).__name__}>"


def named(error: BaseException | None) -> str:
    """Return the class of an error and what it says, if it says anything."""
    return ": ".join(filter(None, (type(error).__name__, text_of(error))))


def ago(seconds: float | None) -> str | None:
    """Return how long ago something was, in its largest unit."""
    if seconds is None:
        return None
    for size, name in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {name} ago"
    # Below 0 where the server's clock was set back.
    return f"{max(seconds, 0):.1f} s ago"
