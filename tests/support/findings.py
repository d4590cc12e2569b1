"""A check over many names as one test: what is wrong is listed, all of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def nothing(found: Iterable[object] | Mapping[str, object], wrong: str) -> None:
    """Fail with a line for each item found; of a mapping, those with something behind their names.

    `wrong` says what is wrong with them. A plain ``assert found == []`` shows the first only.
    """
    if isinstance(found, Mapping):
        found = [f"{name}: {about}" for name, about in found.items() if about]
    lines = [str(each) for each in found]
    assert not lines, "\n  ".join([f"{wrong}:", *lines])
