"""Shape: certain fields of JSON objects, at any depth, as tuples by a msgspec decoder, or each as the JSON it is."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from operator import attrgetter
from typing import Any

from .changes import Row
from .errors import TableError, cut

try:
    import msgspec
except ImportError as error:
    raise ImportError(f"{error}\nJSON is decoded by msgspec: pip install 'kafka-exactly-once[sink]'") from error

# The type of fields that are left as they are.
Raw = msgspec.Raw
# What stands for a field that an object does not have.
UNSET = msgspec.UNSET

Path = tuple[str, ...]
# Field names to deeper trees, or to the column that is filled.
Tree = dict[str, "Tree | str"]
# Fields that no column takes, and the objects in which they are.
Left = dict[str, Any]

NULL = b"null"
# What a format writes where the source has a value and its message does not. No message has it by chance, and msgspec
# takes it for nothing but Raw, so that a reader looks at it.
UNAVAILABLE = b'[{"%b":0}]' % secrets.token_hex(16).encode()
# The same for a document that is null, which is a value of a column of JSON, and not the lack of one.
NULL_DOCUMENT = b'"%b"' % secrets.token_hex(16).encode()
# Beyond it the names may be data, such as ids, and each is another type.
_MOST_IGNORED = 100
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Return the fields of an object, each as the JSON that it is.
fields_in: Callable[[bytes], dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
# The column of fields that are dropped.
_NOWHERE = ""


class Shape:
    """Decodes the fields at certain paths; a field that is absent is null, or UNSET where ``tells`` names its column.

    The fields at the paths in ``drop`` go nowhere.

    :raises TableError: for paths that contradict each other.
    """

    def __init__(
        self, columns: Mapping[str, tuple[Path, Any]], *, tells: Collection[str] = (), drop: Collection[Path] = ()
    ) -> None:
        self._tells = tells
        self._types = {name: kind for name, (_, kind) in columns.items()}
        self._attributes: dict[str, str] = {}
        self._tree: Tree = {}
        for name, (path, _) in columns.items():
            _grow(self._tree, path, name)
        for path in drop:
            _grow(self._tree, path, _NOWHERE)
        self._ignored: list[str] = []
        # Names of further fields that :attr:`decode_known` takes, and what returns their JSON, nothing if absent.
        self.ignored: list[tuple[str, Callable[[Any], Raw]]] = []
        self.is_deep = any(isinstance(below, dict) for below in self._tree.values())
        # The row of an object that has none of the fields.
        self.empty = tuple(UNSET if name in tells else None for name in columns)
        # Decodes an object, of which :attr:`pick` takes the row; refuses one that has other fields too.
        self.decode_known = self._decoder(forbids=True)
        # The same for any object; None where msgspec knows not all the names, such as one with quotes.
        self.decode = self._decoder(forbids=False)
        names = [self._attributes[name] for name in columns] if self.decode is not None else []
        self.pick = _careful_picker(names, self.empty) if self.is_deep else _picker(names)

    def find(self, value: bytes) -> tuple[dict[str, bytes], Left]:
        """Return the JSON of each column that the object has a field for, and the fields that no column takes.

        :raises msgspec.DecodeError: for what is no object.
        :raises ValueError: for a field that is no object, and has fields that columns take.
        """
        found: dict[str, bytes] = {}
        left = _walk(self._tree, value, found, "")
        found.pop(_NOWHERE, None)
        return found, left

    def ignore(self, names: Collection[str]) -> bool:
        """Let :attr:`decode_known` take further fields; tell whether it can, which is so for few and simple names."""
        if self.is_deep or len(self._ignored) + len(names) > _MOST_IGNORED:
            return False
        self._ignored += [name for name in names if name not in self._ignored]
        decode = self._decoder(forbids=True)
        if decode is None:
            return False
        self.decode_known = decode
        self.ignored = [(name, attrgetter(f"i{number}")) for number, name in enumerate(self._ignored)]
        return True

    def left(self, value: bytes) -> Left:
        """Return the fields that no column takes."""
        if self.is_deep:
            return self.find(value)[1]
        return {name: part for name, part in fields_in(value).items() if name not in self._tree}

    def _decoder(self, *, forbids: bool) -> Callable[[bytes], Any] | None:
        self._numbers = count()  # the same names in both
        try:
            return msgspec.json.Decoder(self._struct(self._tree, "", forbids=forbids)).decode
        except ValueError:
            return None

    def _struct(self, tree: Tree, prefix: str, *, forbids: bool) -> type[msgspec.Struct]:
        """Make the type of an object; attributes get numbers for names, because any text can be a field's."""
        fields: list[Any] = []
        renamed = {}
        for field, below in tree.items():
            attribute = f"f{next(self._numbers)}"
            renamed[attribute] = field
            if isinstance(below, str):
                self._attributes[below] = prefix + attribute
                kind, is_told = self._types.get(below, msgspec.Raw), below in self._tells
                if kind is not msgspec.Raw:  # which takes null by itself, and nothing beside it in a union
                    kind = kind | None | msgspec.UnsetType if is_told else kind | None
                fields.append((attribute, kind, UNSET if is_told else None))
            else:
                inner = self._struct(below, f"{prefix}{attribute}.", forbids=forbids)
                fields.append((attribute, inner | None | msgspec.UnsetType, UNSET))
        if tree is self._tree and forbids:
            fields += [(f"i{number}", msgspec.Raw, msgspec.Raw()) for number in range(len(self._ignored))]
            renamed |= {f"i{number}": name for number, name in enumerate(self._ignored)}
        return msgspec.defstruct("Fields", fields, rename=renamed, gc=False, forbid_unknown_fields=forbids)


def found_at(row: Mapping[str, Raw], path: Sequence[str]) -> bytes | None:
    """Find a value; a field whose own name has dots, such as ``service.name``, comes before one in an object."""
    for length in range(len(path), 0, -1):
        if (name := ".".join(path[:length])) in row:
            raw = bytes(row[name])
            if length == len(path) or raw == UNAVAILABLE:
                return raw
            if raw.startswith(b"{") and (found := found_at(fields_in(raw), path[length:])) is not None:
                return found
    return None


def refuse_malformed(text: bytes) -> None:
    """Refuse what is no JSON in UTF-8, which would make all that it is put into so; its numbers may be of any size.

    :raises ValueError: for what is malformed.
    """
    msgspec.json.decode(text.decode(), type=Raw)


def names_in(left: Left, prefix: str = "") -> list[str]:
    """Return the names of fields, with dots for objects in objects."""
    names = []
    for name, part in left.items():
        names += names_in(part, f"{prefix}{name}.") if isinstance(part, dict) and part else [prefix + name]
    return names


def as_json(left: Left) -> bytes:
    """Write fields that no column takes, each as it was."""
    return msgspec.json.encode(left).replace(NULL_DOCUMENT, NULL)


def merged(old: bytes, new: bytes) -> bytes:
    """Write the fields of two objects, each as it was; of one name the new one's."""
    version = b"\1" if new.startswith(b"\1") else b""  # with which the binary form of jsonb begins
    older, newer = (fields_in(each.removeprefix(version)) for each in (old, new))
    return version + msgspec.json.encode(older | newer)


def _walk(tree: Tree, value: bytes, found: dict[str, bytes], prefix: str) -> Left:
    left: Left = {}
    for name, part in fields_in(value).items():
        below = tree.get(name)
        if below is None:
            left[name] = part
            continue
        raw = bytes(part)
        if isinstance(below, str):
            found[below] = raw
        elif raw in (NULL, UNAVAILABLE):
            found.update(dict.fromkeys(_leaves(below), raw))
            left[name] = part
        elif not raw.startswith(b"{"):
            if any(_leaves(below)):
                raise ValueError(f"field {prefix}{name} is no object: {cut(raw)}")
            left[name] = part  # nothing but fields to drop would be in it
        elif (inner := _walk(below, raw, found, f"{prefix}{name}.")) or raw == b"{}":
            left[name] = inner
    return left


def _leaves(tree: Tree) -> list[str]:
    return [leaf for below in tree.values() for leaf in ([below] if isinstance(below, str) else _leaves(below))]


def _grow(tree: Tree, path: Path, column: str) -> None:
    *above, last = path
    for name in above:
        below = tree.setdefault(name, {})
        if isinstance(below, str):
            raise _both(name, below, path, column)
        tree = below
    if last in tree:
        if isinstance(below := tree[last], dict):
            raise _both(last, column, path, next(iter(_leaves(below))))
        raise TableError(f"field {'.'.join(path)!r} fills column {column or 'nothing'} and something else")
    tree[last] = column


def _both(name: str, column: str, path: Path, inner: str) -> TableError:
    if not inner:
        text = f"column {column} takes field {name!r} whole, so that nothing within it can be dropped"
        return TableError(f"{text}, as {'.'.join(path)!r} is; drop {name!r}, or give its fields columns of their own")
    value = f"column {column}" if column else "nothing"
    return TableError(f"field {name!r} cannot be both a value ({value}) and an object (column {inner})")


def _picker(attributes: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(attributes) == 1:
        pick_one = attrgetter(attributes[0])
        return lambda decoded: (pick_one(decoded),)
    if not attributes:
        return lambda decoded: ()
    return attrgetter(*attributes)


def _careful_picker(attributes: list[str], empty: Row) -> Callable[[Any], tuple[Any, ...]]:
    """Pick from objects in objects, any of which may be absent."""
    pick_all = _picker(attributes)
    paths = [a.split(".") for a in attributes]

    def pick(decoded: Any) -> tuple[Any, ...]:
        try:
            return pick_all(decoded)
        except AttributeError:
            row = []
            for path, absent in zip(paths, empty, strict=True):
                value = decoded
                for attribute in path:
                    if value is not None and value is not UNSET:
                        value = getattr(value, attribute)
                row.append(absent if value is UNSET else value)
            return tuple(row)

    return pick
