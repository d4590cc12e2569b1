"""Shape: a msgspec decoder for certain fields of JSON objects, at any depth, as tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from operator import attrgetter
from typing import Any

from .changes import Row
from .errors import TableError

try:
    import msgspec
except ImportError as error:
    raise ImportError(f"{error}\nJSON is decoded by msgspec: pip install 'kafka-exactly-once[sink]'") from error

UNSET = msgspec.UNSET
"""What stands for a field that an object does not have."""

Path = tuple[str, ...]
Tree = dict[str, "Tree | str"]
"""Field names to deeper trees, or to the column that is filled."""


class Shape:
    """Decodes the fields at certain paths; a field that is absent is null, or UNSET if it tells what is missing."""

    def __init__(
        self, columns: Mapping[str, tuple[Path, Any]], *, lax: bool = False, tells_missing: bool = False
    ) -> None:
        self._tells_missing = tells_missing
        self._types = {name: kind for name, (_, kind) in columns.items()}
        self._attributes: dict[str, str] = {}
        self._numbers = count()
        tree: Tree = {}
        for name, (path, _) in columns.items():
            _grow(tree, path, name)
        self._known = set(tree)
        self._decoder = msgspec.json.Decoder(self._struct(tree, ""), strict=not lax)
        self._all: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
        attributes = [self._attributes[name] for name in columns]
        is_flat = not any("." in a for a in attributes)
        self._pick = _picker(attributes) if is_flat else _careful_picker(attributes)

    def rows(self, values: Iterator[bytes]) -> Iterator[Row]:
        """Decode values one by one, as they are asked for."""
        return map(self._pick, map(self._decoder.decode, values))

    def rest(self, value: bytes) -> bytes:
        """Return the fields that no column takes, as JSON text."""
        fields = self._all.decode(value)
        return msgspec.json.encode({name: raw for name, raw in fields.items() if name not in self._known})

    def _struct(self, tree: Tree, prefix: str) -> type[msgspec.Struct]:
        """Make the type of an object; attributes get numbers for names, because any text can be a field's."""
        fields: list[Any] = []
        renamed = {}
        for field, below in tree.items():
            attribute = f"f{next(self._numbers)}"
            renamed[attribute] = field
            if isinstance(below, str):
                self._attributes[below] = prefix + attribute
                kind = self._types[below]
            else:
                kind = self._struct(below, f"{prefix}{attribute}.")
            fields.append(self._field(attribute, kind))
        try:
            return msgspec.defstruct("Fields", fields, rename=renamed, gc=False)
        except ValueError as error:
            raise TableError(f"a field's name that msgspec cannot decode: {error}") from error

    def _field(self, attribute: str, kind: Any) -> tuple[str, Any, Any]:
        if self._tells_missing:
            return attribute, kind | None | msgspec.UnsetType, UNSET
        return attribute, kind | None, None


def _grow(tree: Tree, path: Path, column: str) -> None:
    *above, last = path
    for name in above:
        below = tree.setdefault(name, {})
        if isinstance(below, str):
            raise TableError(f"field {name!r} cannot be both a value (column {below}) and an object (column {column})")
        tree = below
    if last in tree:
        raise TableError(f"field {'.'.join(path)!r} fills column {column} and something else")
    tree[last] = column


def _picker(attributes: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(attributes) == 1:
        pick_one = attrgetter(attributes[0])
        return lambda decoded: (pick_one(decoded),)
    if not attributes:
        return lambda decoded: ()
    return attrgetter(*attributes)


def _careful_picker(attributes: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Pick from objects in objects, any of which may be absent."""
    pick_all = _picker(attributes)
    paths = [a.split(".") for a in attributes]

    def pick(decoded: Any) -> tuple[Any, ...]:
        try:
            return pick_all(decoded)
        except AttributeError:
            return tuple(_follow(decoded, path) for path in paths)

    return pick


def _follow(decoded: Any, path: list[str]) -> Any:
    for attribute in path:
        if decoded is None or decoded is UNSET:
            return decoded
        decoded = getattr(decoded, attribute)
    return decoded
