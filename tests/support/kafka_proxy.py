"""A TCP proxy before one Kafka broker that can aim a fault at one kind of request.

The interesting faults of a transaction lie on either side of one request, EndTxn: a test can hold it, so that the
client gives up and the broker gets it late; or lose its answer, so that the broker has done it and the client never
hears of it. The broker advertises the proxy, so all its clients come through here; what no fault is aimed at passes.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

OFFSET_COMMIT = 8
END_TXN = 26
INIT_PRODUCER_ID = 22

_RECEIVE_BYTES = 1 << 16


class Fault:
    """One armed fault: it strikes once, at the next request of its kind."""

    def __init__(self, api_key: int, *, after: bool, cut_client: bool = False, code: int | None = None) -> None:
        self.api_key = api_key
        self.code = code
        self.after = after
        self.cut_client = cut_client
        self.fired = threading.Event()
        """Set once it has struck; for a fault after the request: once the broker has answered."""
        self._released = threading.Event()
        self.answered = threading.Event()
        """Set once the broker has answered what was held and released."""
        self.answer = b""

    def wait(self, timeout: float = 60) -> None:
        """Wait until it has struck; raise AssertionError if it does not."""
        assert self.fired.wait(timeout), f"no request {self.api_key} within {timeout:g} s"

    def release(self) -> None:
        """Let the held request go to the broker, whatever has become of the client."""
        self._released.set()

    def error_code(self, timeout: float = 60) -> int:
        """Return what the broker has answered to an EndTxn; 0 is success."""
        assert self.answered.wait(timeout), f"no answer within {timeout:g} s"
        (code,) = struct.unpack_from(">h", self.answer, 12)  # after length, correlation id and throttle time
        return int(code)

    def strike(self, timeout: float = 60) -> None:
        """Fire, and stand still until released."""
        self.fired.set()
        self._released.wait(timeout)


class KafkaProxy:
    """Stands before a broker that runs with ``advertised.listeners=proxy.listener``; then ``upstream`` is its port."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.listener = f"PLAINTEXT://127.0.0.1:{self.port}"
        self.bootstrap_servers = f"127.0.0.1:{self.port}"
        self.upstream = 0
        self.requests: list[int] = []
        """The kinds of all requests that came by, in order."""
        self._lock = threading.Lock()
        self._armed: list[Fault] = []
        self._open: set[socket.socket] = set()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="kafka-proxy", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._listener.close()
            for each in self._open:
                _end(each)

    def hold(self, api_key: int = END_TXN, *, cut_client: bool = False) -> Fault:
        """Keep the next such request from the broker until it is released; the client is cut off or kept in silence."""
        return self._arm(Fault(api_key, after=False, cut_client=cut_client))

    def lose_answer(self, api_key: int = END_TXN) -> Fault:
        """Keep the answer to the next such request from the client until it is released."""
        return self._arm(Fault(api_key, after=True))

    def refuse(self, api_key: int, code: int) -> Fault:
        """Have the client told that the last partition of the next such request was refused, whatever was answered."""
        return self._arm(Fault(api_key, after=True, code=code))

    def disarm(self) -> None:
        """Take back what has not struck."""
        with self._lock:
            self._armed.clear()

    def struck_by(self, api_key: int) -> Fault | None:
        """Return the fault that strikes at this request, if there is one."""
        with self._lock:
            self.requests.append(api_key)
            found = next((fault for fault in self._armed if fault.api_key == api_key), None)
            if found is not None:
                self._armed.remove(found)
            return found

    def _arm(self, fault: Fault) -> Fault:
        with self._lock:
            self._armed.append(fault)
        return fault

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection(("127.0.0.1", self.upstream))
            except OSError:
                client.close()  # the broker is not there yet
                continue
            with self._lock:
                self._open |= {client, broker}
            link = _Link(self, client, broker)
            for run in (link.to_broker, link.to_client):
                threading.Thread(target=run, name=f"kafka-proxy {run.__name__}", daemon=True).start()


class _Link:
    """One connection. The broker answers the requests of a connection in order."""

    def __init__(self, proxy: KafkaProxy, client: socket.socket, broker: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._broker = broker
        self._awaited: dict[int, Fault] = {}
        """By correlation id: faults that wait for an answer."""

    def to_broker(self) -> None:
        """Pass on requests. A client that goes away in the meantime does not take a held request with it."""
        for frame in _frames(self._client):
            api_key, _, correlation_id = struct.unpack_from(">hhi", frame, 4)
            fault = self._proxy.struck_by(api_key)
            if fault is not None:
                self._awaited[correlation_id] = fault
                if fault.cut_client:
                    _end(self._client)
                if not fault.after:
                    fault.strike()
            with suppress(OSError):
                self._broker.sendall(frame)
        if not self._awaited:
            _end(self._broker)

    def to_client(self) -> None:
        """Pass on answers."""
        for frame in _frames(self._broker):
            (correlation_id,) = struct.unpack_from(">i", frame, 4)
            fault = self._awaited.pop(correlation_id, None)
            sent = frame
            if fault is not None:
                fault.answer = frame
                fault.answered.set()
                if fault.code is not None:
                    # An answer ends in the code, and the empty tags of the partition, of its topic and of the whole.
                    sent = frame[:-5] + struct.pack(">h", fault.code) + frame[-3:]
                    fault.fired.set()
                elif fault.after:
                    fault.strike()
            with suppress(OSError):
                self._client.sendall(sent)
        _end(self._client)


def _frames(source: socket.socket) -> Iterator[bytes]:
    """Yield whole messages with their length in front, until the other side ends."""
    data = b""
    with suppress(OSError):
        while received := source.recv(_RECEIVE_BYTES):
            data += received
            while len(data) >= 4 and len(data) >= (size := 4 + int.from_bytes(data[:4], "big")):
                yield data[:size]
                data = data[size:]


def _end(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
