"""Registry: the wire format of a Schema Registry (a zero byte, the id of a schema, the data) becomes JSON.

Avro and Protobuf become what Connect's JsonConverter writes, schema and payload, so that logical types are read in one
place; JSON Schema is JSON already. Schemas are asked for once.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from io import BytesIO
from typing import Any, TypeGuard
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import msgspec
from confluent_kafka import Message

from exactly_once.errors import ConfigurationError

from .decoding import remade
from .errors import BadRow, RegistryAway, TableError, cut
from .formats import to_json
from .json_shape import refuse_malformed
from .logical import Schema

# Makes JSON of what comes behind the id.
Read = Callable[[bytes], bytes]

_HEADER_BYTES = 5
# How long an answer is waited for; then the batch comes again.
_TIMEOUT_SECONDS = 10.0
_UNKNOWN_SCHEMA = 40403
# For so long no schema is asked for that a key seemed to name: keys of numbers would cost a request each.
_UNKNOWN_SECONDS = 60.0
# So many of them are known at a time: some megabytes.
_MOST_NUMBERS = 50_000
_NOT_NOW, _SERVER_ERROR = (408, 429), 500
# What refuses any schema, by a password that has expired, say; 403 may be one's own.
_NOBODY = 401
_SETTINGS = {"url", "basic.auth.user.info", "bearer.auth.token"}
_SETTINGS |= {f"ssl.{name}" for name in ("ca.location", "certificate.location", "key.location", "key.password")}
_PRIMITIVES = {"int": "int32", "long": "int64", "enum": "string", "fixed": "bytes", "record": "struct"}
# Avro's logical types, by the names of those that stand for the same.
_LOGICAL = {
    "date": "org.apache.kafka.connect.data.Date",
    "time-millis": "org.apache.kafka.connect.data.Time",
    "time-micros": "io.debezium.time.MicroTime",
    "timestamp-millis": "avro.timestamp-millis",
    "timestamp-micros": "avro.timestamp-micros",
    "timestamp-nanos": "avro.timestamp-nanos",
    "local-timestamp-millis": "org.apache.kafka.connect.data.Timestamp",
    "local-timestamp-micros": "io.debezium.time.MicroTimestamp",
    "local-timestamp-nanos": "io.debezium.time.NanoTimestamp",
    "decimal": "org.apache.kafka.connect.data.Decimal",
    "uuid": "io.debezium.data.Uuid",
    "uuid-fixed": "avro.uuid-fixed",
}
# The types that they can be of; of any other, Avro has them be nothing.
_KINDS = {"decimal": ("bytes", "fixed"), "uuid": ("string", "fixed")}
_UUID_BYTES = 16


class Registry:
    """Reads keys and values by the schemas of a registry; a key that is not in the wire format stays as it is.

    ``settings`` have the names of confluent-kafka's client: ``url`` (several with commas), ``basic.auth.user.info`` or
    ``bearer.auth.token``, ``ssl.ca.location``, ``ssl.certificate.location``, ``ssl.key.location``,
    ``ssl.key.password``. (That client itself brings fifteen packages, and keeps one form of a schema only.)

    :raises ConfigurationError: for other settings, and for values that cannot be.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if unknown := settings.keys() - _SETTINGS:
            raise ConfigurationError(
                f"schema_registry: there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(_SETTINGS))}"
            )
        given = {name: str(value) for name, value in settings.items()}
        self._urls: list[str] = []
        user = given.get("basic.auth.user.info")
        for url in given.get("url", "").split(","):
            parts = urlsplit(url.strip().rstrip("/"))
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigurationError("schema_registry: say url = http://... or https://...")
            own, _, host = parts.netloc.rpartition("@")
            user = user or unquote(own)
            self._urls.append(urlunsplit(parts._replace(netloc=host)))
        self.url = ", ".join(self._urls)
        self._headers = {"Accept": "application/vnd.schemaregistry.v1+json"}
        if token := given.get("bearer.auth.token"):
            self._headers["Authorization"] = f"Bearer {token}"
        elif user:
            self._headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        try:
            context = ssl.create_default_context(cafile=given.get("ssl.ca.location"))
            if certificate := given.get("ssl.certificate.location"):
                context.load_cert_chain(certificate, given.get("ssl.key.location"), given.get("ssl.key.password"))
        except OSError as error:  # of ssl, too
            raise ConfigurationError(f"schema_registry: the files of ssl cannot be read: {error}") from error
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
        self._readers: dict[int, Read] = {}
        # Numbers in keys that named no schema, and until when none is asked for.
        self._no_schemas: dict[int, float] = {}

    def opened(self, message: Message, *, opens_key: bool = True) -> Message:
        """Return the message with its value in JSON, and its key unless nobody reads it.

        :raises BadRow: for a value that is not in the wire format though its key is not either, is not as its schema
            says, or of an unknown one.
        :raises RegistryAway: when the registry does not answer.
        :raises TableError: when it refuses to.
        """
        key, value = message.key(), message.value()
        if opens_key and _is_framed(key):
            key = self._read_key(key)
        if _is_framed(value):
            value = self._read(value)
        elif value is not None:
            if key is message.key():  # else only the keys of the topic are in that format
                raise BadRow(f"the value is not in the wire format of a Schema Registry: {cut(value)}")
            try:
                value = _json(value)
            except msgspec.DecodeError as error:
                raise BadRow(f"the value is neither of the wire format of a registry nor JSON: {error}") from error
        return remade(message, key, value)

    def _read_key(self, key: bytes) -> bytes:
        """Read a key; it stays as it is where it is none of the wire format: eight bytes of a number, say.

        Who needs the key refuses it then.
        """
        number = int.from_bytes(key[1:_HEADER_BYTES])
        if time.monotonic() < self._no_schemas.get(number, 0.0):
            return key
        try:
            return self._read(key)
        except (BadRow, TableError) as error:
            why = error.__cause__
            if isinstance(why, ImportError) or (isinstance(why, urllib.error.HTTPError) and why.code == _NOBODY):
                raise  # not of this schema alone
            if number not in self._readers:
                if len(self._no_schemas) >= _MOST_NUMBERS:
                    self._no_schemas.clear()
                self._no_schemas[number] = time.monotonic() + _UNKNOWN_SECONDS
            return key

    def _read(self, data: bytes) -> bytes:
        number = int.from_bytes(data[1:_HEADER_BYTES])
        if (read := self._readers.get(number)) is None:
            read = self._readers[number] = self._reader(number)
        try:
            return read(data[_HEADER_BYTES:])
        except Exception as error:
            raise BadRow(f"the data is not as schema {number} says: {str(error) or type(error).__name__}") from error

    def _reader(self, number: int) -> Read:
        schema = self._ask(f"schemas/ids/{number}", number)
        kind = schema.get("schemaType") or "AVRO"
        references = [] if kind == "JSON" else list(self._references(schema, number))
        what = f"schema {number} of the Schema Registry {self.url}"
        try:
            if kind == "JSON":
                return _json
            if kind == "AVRO":
                return _avro(schema["schema"], [found["schema"] for _, found in references])
            if kind == "PROTOBUF":
                files = [(name, self._serialized(found["id"])) for name, found in references]
                return _protobuf(self._serialized(number), files, self.url)
        except (BadRow, RegistryAway, TableError):
            raise
        except ImportError as error:  # which is no message's fault
            raise TableError(f"schema {number}: {error}: pip install 'kafka-exactly-once[registry]'") from error
        except Exception as error:
            raise BadRow(f"{what} cannot be read: {type(error).__name__}: {error}") from error
        raise TableError(f"{what} is of kind {kind}, which is not read")

    def _references(self, schema: Mapping[str, Any], number: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the schemas that one refers to, those first that others need."""
        for each in schema.get("references") or ():
            found = self._ask(f"subjects/{quote(each['subject'], safe='')}/versions/{each['version']}", number)
            yield from self._references(found, number)
            yield each["name"], found

    def _serialized(self, number: int) -> str:
        return str(self._ask(f"schemas/ids/{number}?format=serialized", number)["schema"])

    def _ask(self, path: str, number: int) -> Mapping[str, Any]:
        """Return an answer of the first server that gives one.

        :raises BadRow: when the registry knows no such schema.
        :raises RegistryAway: when none answers, or not for now.
        :raises TableError: when it refuses to.
        """
        where = f"the Schema Registry {self.url}"
        reasons = []
        for url in self._urls:
            request = urllib.request.Request(f"{url}/{path}", headers=self._headers)  # noqa: S310 - http, as was checked
            try:
                with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
                    found = json.loads(text := answer.read())
                if isinstance(found, dict) and isinstance(found.get("schema"), str):
                    return found
                reasons.append(f"it is no schema: {cut(text)}")  # of a gateway in front of it, perhaps
            except urllib.error.HTTPError as error:
                with error:
                    text = error.read().decode(errors="replace")
                if f'"error_code":{_UNKNOWN_SCHEMA}' in text.replace(" ", ""):
                    raise BadRow(f"{where} knows no schema {number}") from error
                if error.code < _SERVER_ERROR and error.code not in _NOT_NOW:
                    what = f"{where} refuses to give schema {number}: {error}: {cut(text)}"
                    hint = "; basic.auth.user.info or bearer.auth.token lets one in" if error.code == _NOBODY else ""
                    raise TableError(what + hint) from error
                reasons.append(str(error))
            except (OSError, http.client.HTTPException, ValueError) as error:
                reasons.append(f"{type(error).__name__}: {error}")
        raise RegistryAway(f"{where} does not answer for schema {number}: {'; '.join(reasons)}")


def _is_framed(data: Any) -> TypeGuard[bytes]:
    """Whether these are a zero byte, the id of a schema, and its data."""
    return isinstance(data, bytes) and data.startswith(b"\0") and len(data) >= _HEADER_BYTES


def _json(data: bytes) -> bytes:
    refuse_malformed(data)
    return b'{"payload":%b}' % data


def _with_schema(schema: Schema) -> bytes:
    return b'{"schema":%b,"payload":' % msgspec.json.encode(schema)


def _avro(text: str, references: list[str]) -> Read:
    import fastavro  # noqa: PLC0415 - an extra, and of the three kinds of schemas this one only

    known: dict[str, Schema] = {}
    named: dict[str, Any] = {}
    for each in references:
        document = json.loads(each)
        _schema_of_avro(document, "", known)
        fastavro.parse_schema(_bare(document), named_schemas=named)
    document = json.loads(text)
    start = _with_schema(_schema_of_avro(document, "", known))
    parsed = fastavro.parse_schema(_bare(document), named_schemas=named)

    def read(data: bytes) -> bytes:
        source = BytesIO(data)
        value = fastavro.schemaless_reader(source, parsed, None)
        if left := len(data) - source.tell():
            raise ValueError(f"{left} bytes are left")
        return start + to_json(value) + b"}"

    return read


def _bare(schema: Any) -> Any:
    """Leave out logical types, so that what was sent comes: they are read where those of Connect are."""
    if isinstance(schema, dict):
        return {key: _bare(value) for key, value in schema.items() if key != "logicalType"}
    return [_bare(each) for each in schema] if isinstance(schema, list) else schema


def _schema_of_avro(schema: Any, space: str, known: dict[str, Schema]) -> Schema:
    """Write a schema of Avro as one of Connect; ``known`` are the named types so far, by their full names."""
    if isinstance(schema, list):
        others = [each for each in schema if each != "null"]
        return _schema_of_avro(others[0], space, known) if len(others) == 1 else Schema("union")
    if isinstance(schema, str):
        found = known.get(schema if "." in schema else f"{space}.{schema}", known.get(schema))
        return found or Schema(_PRIMITIVES.get(schema, schema))
    kind = schema["type"]
    if isinstance(kind, (dict, list)):
        return _schema_of_avro(kind, space, known)
    if (full := schema.get("name")) is not None and kind in ("record", "enum", "fixed", "error"):
        space = full.rpartition(".")[0] if "." in full else schema.get("namespace", space)
        full = full if "." in full or not space else f"{space}.{full}"
        known[full] = Schema(_PRIMITIVES.get(kind, kind))  # for one that holds itself
    logical = schema.get("logicalType")
    is_no_uuid = logical == "uuid" and schema.get("size", _UUID_BYTES) != _UUID_BYTES
    if is_no_uuid or kind not in _KINDS.get(logical, ("int", "long")):
        logical = None
    name = schema.get("connect.name") or _LOGICAL.get("uuid-fixed" if (logical, kind) == ("uuid", "fixed") else logical)
    parameters = dict(schema.get("connect.parameters") or {})
    if logical == "decimal":
        parameters["scale"] = str(schema.get("scale", 0))
    result = Schema(
        _PRIMITIVES.get(kind, kind),
        name=name,
        fields=tuple(
            msgspec.structs.replace(_schema_of_avro(field["type"], space, known), field=field["name"])
            for field in schema.get("fields", ())
        ),
        items=_schema_of_avro(schema["items"], space, known) if kind == "array" else None,
        values=_schema_of_avro(schema["values"], space, known) if kind == "map" else None,
        parameters=parameters or None,
    )
    if full is not None and kind in ("record", "enum", "fixed", "error"):
        known[full] = result
    return result


# Connect's types, and the numbers of Protobuf's.
_PROTOBUF = {
    "int32": (5, 15, 17),
    "int64": (3, 16, 18, 13, 7),  # the 32 bits without a sign, too
    "uint64": (4, 6),
    "double": (1,),
    "float": (2,),
    "boolean": (8,),
    "string": (9, 14),
    "bytes": (12,),
}


def _protobuf(text: str, references: list[tuple[str, str]], url: str) -> Read:
    from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory  # noqa: PLC0415
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    pool = descriptor_pool.DescriptorPool()

    def add(name: str, serialized: bytes) -> Any:
        file = descriptor_pb2.FileDescriptorProto.FromString(serialized)
        file.name = name or file.name
        for needed in file.dependency:
            try:
                pool.FindFileByName(needed)
            except KeyError:  # of those to which no schema refers
                add(needed, _built_in(needed))
        pool.Add(file)
        return file

    try:
        for name, each in references:
            add(name, base64.b64decode(each, validate=True))
        file = add("", base64.b64decode(text, validate=True))
    except (ValueError, DecodeError) as error:
        what = f"the Schema Registry {url} does not give schemas of Protobuf in their binary form (format=serialized)"
        raise TableError(what) from error
    kinds: dict[tuple[int, ...], tuple[Any, bytes]] = {}

    def read(data: bytes) -> bytes:
        path, data = _message_path(data)
        if path not in kinds:
            found, names = file.message_type[path[0]], [file.package] if file.package else []
            names.append(found.name)
            for index in path[1:]:
                found = found.nested_type[index]
                names.append(found.name)
            descriptor = pool.FindMessageTypeByName(".".join(names))
            start = _with_schema(_schema_of_protobuf(descriptor))
            kinds[path] = message_factory.GetMessageClass(descriptor), start
        kind, start = kinds[path]
        found = kind.FromString(data)
        size = found.ByteSize()
        found.DiscardUnknownFields()  # which JSON has no names for
        if found.ByteSize() != size:
            what = "fields, or numbers of an enum, that the schema does not"
            raise ValueError(f"it has {what}: register the one that it was written with")
        told = json_format.MessageToJson(
            found,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,  # a zero is sent as nothing
            indent=None,
            descriptor_pool=pool,
        )
        # Of proto2's text that is no UTF-8 it writes how Python shows the bytes, which does not read back the same.
        is_odd = "\"b'" in told or '"b\\"' in told
        if is_odd and json_format.Parse(told, kind(), descriptor_pool=pool) != found:
            raise ValueError("a text in it is not UTF-8")
        return start + str(told).encode() + b"}"

    return read


def _built_in(name: str) -> bytes:
    """Return a file that schemas import without a reference, as every registry knows it.

    :raises TableError: for one of Google's types whose package is not installed.
    :raises LookupError: for any other file.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool  # noqa: PLC0415

    if name.startswith("google/"):
        try:
            import_module(f"{name.removesuffix('.proto').replace('/', '.')}_pb2")
        except ImportError as error:
            raise TableError(f"a schema imports {name}: pip install googleapis-common-protos") from error
        known: bytes = descriptor_pool.Default().FindFileByName(name).serialized_pb
        return known
    file = descriptor_pb2.FileDescriptorProto(name=name, syntax="proto3")
    if name == "confluent/type/decimal.proto":
        file.package = "confluent.type"
        decimal = file.message_type.add(name="Decimal")
        for number, (field, kind) in enumerate((("value", 12), ("precision", 13), ("scale", 5)), 1):
            decimal.field.add(name=field, number=number, type=kind, label=1)
    elif name != "confluent/meta.proto":  # which holds options only, and they change no value
        raise LookupError(f"it imports {name}, to which it has no reference")
    made: bytes = file.SerializeToString()
    return made


def _message_path(data: bytes) -> tuple[tuple[int, ...], bytes]:
    """Read which message of the file it is: the indexes of the one and those around it, as zigzag numbers.

    :raises ValueError: for a negative one, which would count from the end.
    """
    numbers: list[int] = []
    position = 0
    while not numbers or len(numbers) <= numbers[0]:
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if value & 1:
            raise ValueError("the index of its message is negative")
        numbers.append(value >> 1)
    return tuple(numbers[1:]) or (0,), data[position:]


def _schema_of_protobuf(descriptor: Any) -> Schema:
    """Tell the types of a message's fields; objects in it are not looked into, since Protobuf's JSON says it all."""
    kinds = {number: kind for kind, numbers in _PROTOBUF.items() for number in numbers}

    def one(field: Any) -> Schema:
        inner = field.message_type
        if inner is not None and inner.full_name == "google.protobuf.Timestamp":
            return Schema("string", name="io.debezium.time.ZonedTimestamp")
        if inner is not None and inner.full_name == "google.protobuf.Duration":
            return Schema("string", name="io.debezium.time.Interval")
        if inner is not None and inner.full_name == "confluent.type.Decimal":
            return Schema("struct", name="io.debezium.data.VariableScaleDecimal")
        if inner is not None and inner.file.name == "google/protobuf/wrappers.proto":
            return one(inner.fields_by_name["value"])
        return Schema(kinds.get(field.type, "map"))

    def of(field: Any) -> Schema:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        is_list = field.is_repeated and not is_map
        return msgspec.structs.replace(Schema("array", items=one(field)) if is_list else one(field), field=field.name)

    return Schema("struct", fields=tuple(map(of, descriptor.fields)))
