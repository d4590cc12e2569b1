"""A TCP proxy before Postgres that understands enough of the protocol to aim a fault at one statement.

Generic proxies cut a wire at a time; the interesting faults of a transaction lie on either side of one
message: COMMIT. The proxy reads the client's messages, so a test can say "lose the answer of the next COMMIT"
and know, once the fault has fired, on which side of it the server stands.

A connection has two threads, one per direction. The client's one knows which statement is about to run; the
server's one counts ReadyForQuery, of which the server sends exactly one for each Query and each Sync, and so
knows which answer belongs to that statement, also when several are under way (pipeline mode). The exception
is a COPY started by the extended protocol, which swallows a Sync; psycopg always starts COPY with a Query.
"""

# ruff: noqa: SLF001  (its classes are one mechanism: proxy, fault and link know each other)
from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeAlias
from urllib.parse import urlsplit, urlunsplit

Match: TypeAlias = str | re.Pattern[str] | Callable[[str], object]

# A COMMIT alone, or as the last statement of several in one Query.
COMMIT = re.compile(r"(?:^|;)\s*COMMIT(?:\s+(?:WORK|TRANSACTION))?\s*;?\s*$", re.IGNORECASE)
# What moves the ledger and makes a transaction of ours durable.
ADVANCE_AND_COMMIT = r"advance\((.|\n)*COMMIT$"

_SSL_REQUEST, _GSS_REQUEST = 80877103, 80877104  # the protocol's codes, in place of a version
_ENDS_GROUP = b"QS"  # the messages that the server answers with ReadyForQuery
_HEAD_BYTES = 5  # a type byte and the length
_RECEIVE_BYTES = 1 << 16


class Fault:
    """One armed fault: it strikes at the first statement that matches, on whichever connection, once."""

    def __init__(self, match: Match, *, after: bool, holds: bool, close_client: bool) -> None:
        if isinstance(match, str):
            match = re.compile(match, re.IGNORECASE)
        self._matches = match.search if isinstance(match, re.Pattern) else match
        self._released = threading.Event()
        self.after = after
        self.holds = holds
        self.close_client = close_client
        # Set once it has struck; for a fault after the statement: once the server has answered it.
        self.fired = threading.Event()
        # Set once the server has answered the statement; after `release`, the sign that it has arrived.
        self.answered = threading.Event()
        # The SQL text that it struck at.
        self.sql: str | None = None
        # As the server answered: I (in no transaction, as after COMMIT), T (in one), E (in a failed one).
        self.transaction_status: str | None = None

    def wait(self, timeout: float = 60) -> None:
        """Wait until the fault has fired; raise AssertionError if it does not."""
        assert self.fired.wait(timeout), f"no statement met the fault within {timeout:g} s"

    def wait_answered(self, timeout: float = 60) -> None:
        """Wait until the server has answered the statement; raise AssertionError if it does not."""
        assert self.answered.wait(timeout), f"the server did not answer within {timeout:g} s"

    def release(self) -> None:
        """Let go of what is held: the statement goes to the server, or the answer to the client."""
        self._released.set()


class PostgresProxy:
    """Stands before the Postgres of a URI; `with PostgresProxy(uri) as proxy: connect(proxy.conninfo)`.

    A `match` is a regular expression (a plain string is searched for, whatever its case) or a predicate on
    the SQL text of a simple Query or of a prepared or parameterised statement; it is asked when that is to
    run. Of a Query of several statements the whole Query is lost or held.
    """

    def __init__(self, conninfo: str, *, record: bool = False) -> None:
        self._uri = urlsplit(conninfo)
        if self._uri.scheme not in ("postgresql", "postgres") or "," in (self._uri.hostname or ","):
            raise ValueError("the proxy needs a postgresql:// URI with one TCP host")
        if re.search("sslmode=(require|verify)", self._uri.query):
            raise ValueError("the proxy reads what passes: sslmode may not ask for encryption")
        self.upstream = (self._uri.hostname, self._uri.port or 5432)
        # SQL of every statement run, in order, over all connections; only with `record=True`.
        self.statements: list[str] = []
        # How many times clients asked for an answer (Query and Sync messages; a pipeline counts once).
        self.round_trips = 0
        self._record = record
        self._lock = threading.Lock()  # over all below, and the counts above: every connection has threads of its own
        self._armed: list[Fault] = []  # those that have not struck
        self._links: set[_Link] = set()  # connections that are served; each takes itself out when it is closed
        self._knocking: list[socket.socket] = []  # clients that came during a black hole
        self._mode = "forward"  # what becomes of a new client: forward, swallow, refuse, or closed at the end

    def __enter__(self) -> PostgresProxy:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

        def accept() -> None:
            while self._mode != "closed":
                client, _ = self._listener.accept()
                with self._lock:
                    if self._mode == "forward":
                        self._serve(client)
                    elif self._mode == "swallow":
                        self._knocking.append(client)
                    else:
                        client.close()

        self._acceptor = threading.Thread(target=accept, name="proxy-accept", daemon=True)
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._mode = "closed"
        # accept() is woken by a connection; closing its socket under it is not portable
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._acceptor.join()
        self._listener.close()
        self.cut_all()

    @property
    def conninfo(self) -> str:
        """The upstream's URI with host and port of the proxy."""
        account, at, _ = self._uri.netloc.rpartition("@")
        return urlunsplit(self._uri._replace(netloc=f"{account}{at}127.0.0.1:{self.port}"))

    def cut_before(self, match: Match = COMMIT) -> Fault:
        """Lose the statement: the server never gets it, both sides are closed."""
        return self._arm(Fault(match, after=False, holds=False, close_client=True))

    def cut_after(self, match: Match = COMMIT) -> Fault:
        """Lose the answer: the server runs the statement, then both sides are closed, the client untold."""
        return self._arm(Fault(match, after=True, holds=False, close_client=True))

    def hold(self, match: Match = COMMIT, *, close_client: bool) -> Fault:
        """Delay the statement until `release`; the server meanwhile keeps the transaction open.

        The client is closed at once (`close_client=True`: it moves on while its statement is still on the
        way) or kept in silence; its going away in the meantime does not reach the server.
        """
        return self._arm(Fault(match, after=False, holds=True, close_client=close_client))

    def hold_answer(self, match: Match = COMMIT) -> Fault:
        """Delay the answer until `release`: the server has run the statement, the client still waits."""
        return self._arm(Fault(match, after=True, holds=True, close_client=False))

    def black_hole(self) -> None:
        """From now on swallow everything both ways without closing: half-open, nobody learns of an end.

        New connections get no answer until `heal`, which serves them. Those of before stay dark for good,
        since what was swallowed is gone: `black_hole()` followed by `heal()` loses the existing ones only.
        The proxy's kernel still acknowledges, so keepalives and tcp_user_timeout notice nothing.
        """
        with self._lock:
            self._mode = "swallow"
            for link in self._links:
                link.dark = True

    def refuse(self) -> None:
        """Play a database that is down: existing connections are cut, new ones closed at once, until `heal`."""
        with self._lock:
            self._mode = "refuse"
        self.cut_all()

    def heal(self) -> None:
        """End `black_hole` or `refuse`."""
        with self._lock:
            self._mode = "forward"
            knocking, self._knocking = self._knocking, []
            for client in knocking:
                self._serve(client)

    def cut_all(self) -> None:
        """Close every connection on both sides, held and dark ones too; return when all are closed."""
        with self._lock:
            links, knocking, self._knocking = list(self._links), self._knocking, []
        for client in knocking:
            client.close()
        for link in links:
            link.cut()
        for link in links:
            link.thread.join()

    @property
    def waiting(self) -> int:
        """How many connections were attempted during a `black_hole` and wait for `heal`."""
        return len(self._knocking)

    def _arm(self, fault: Fault) -> Fault:
        with self._lock:
            self._armed.append(fault)
        return fault

    def _serve(self, client: socket.socket) -> None:
        link = _Link(self, client)
        self._links.add(link)
        link.thread.start()

    def _note(self, sql: str | None, *, asks: bool) -> None:
        with self._lock:
            self.round_trips += asks
            if self._record and sql is not None:
                self.statements.append(sql)


class _Link:
    """One client's connection and its upstream."""

    def __init__(self, proxy: PostgresProxy, client: socket.socket) -> None:
        self.dark = False  # set by a black hole, for good: nothing is handed on, nothing is closed
        self.thread = threading.Thread(target=self._run, name="proxy-client", daemon=True)
        self._proxy = proxy
        self._client = client
        self._upstream = socket.socket()
        self._prepared: dict[bytes, str] = {}  # SQL by the name of the prepared statement
        self._asked = 1  # the startup packet is answered by a ReadyForQuery, too
        self._answered = 0  # as many ReadyForQuery came from the server
        self._awaited: dict[int, Fault] = {}  # by the number of the answer, counted in ReadyForQuery
        self._holding: set[Fault] = set()  # faults that keep one of the two threads waiting
        self._is_cut = False  # by a fault, by `cut_all`, or because one side has closed

    def cut(self) -> None:
        """Close both sides; the link's threads then end and give the sockets back."""
        self._is_cut = True
        _shut(self._client)
        _shut(self._upstream)
        for fault in list(self._holding):
            fault.release()

    def _run(self) -> None:
        server = threading.Thread(target=self._from_server, name="proxy-server", daemon=True)
        try:
            while True:
                head = _exactly(self._client, 8)  # length and code
                packet = head + _exactly(self._client, int.from_bytes(head[:4], "big") - len(head))
                if int.from_bytes(head[4:], "big") not in (_SSL_REQUEST, _GSS_REQUEST):
                    break
                self._client.sendall(b"N")  # encryption is declined: it would blind the proxy
            self._upstream.close()
            self._upstream = socket.create_connection(self._proxy.upstream)  # IPv4 or IPv6
            if self._is_cut:  # before there was a connection to shut down
                raise ConnectionAbortedError
            for side in (self._client, self._upstream):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._upstream.sendall(packet)
            server.start()
            self._from_client()
        except OSError:
            self.cut()
        if server.ident is not None:
            server.join()
        self._client.close()
        self._upstream.close()
        with self._proxy._lock:
            self._proxy._links.discard(self)

    def _from_client(self) -> None:
        """Hand on what the client sends, until a fault strikes that ends it, or the client does."""
        stream = _Messages(self._client)
        out = bytearray()
        for message in stream:
            sql = self._note(message)
            fault = None
            if sql is not None:
                with self._proxy._lock:  # the first armed one that strikes here
                    fault = next((each for each in self._proxy._armed if each._matches(sql)), None)
                    if fault is not None:
                        fault.sql = sql
                        self._proxy._armed.remove(fault)
            if fault is not None and not fault.after:
                self._to_server(out)
                if not fault.holds:
                    self.cut()
                    fault.fired.set()
                    return
                # Until release the statement is kept with all of its messages: the client may be closed at once.
                held, last = bytearray(message), message
                while last[0] not in _ENDS_GROUP:
                    last = next(stream, b"")
                    if not last:  # the client died in the middle of it
                        raise ConnectionAbortedError
                    self._note(last)
                    held += last
                self._awaited[self._asked] = fault
                if fault.close_client:
                    _shut(self._client)
                self._wait_for_release(fault)
                out += held
            else:
                if fault is not None:
                    is_counted = message[0] in _ENDS_GROUP  # by `_note`; else the end of its group is to come
                    self._awaited[self._asked if is_counted else self._asked + 1] = fault
                out += message
            if not stream.has_more:
                self._to_server(out)
        # Half-close: the server reads what is under way before it sees the end, as from a client that died.
        if not self.dark:
            _shut(self._upstream, socket.SHUT_WR)

    def _note(self, message: bytes) -> str | None:
        """Count the message if it asks for an answer; return the statement that it runs, if any.

        A Query runs its text, an unnamed Parse what it parses, a Bind what has its name.
        """
        kind, body, sql = message[:1], message[_HEAD_BYTES:], None
        if kind == b"Q":
            sql = body[:-1].decode(errors="replace")
        elif kind == b"P":
            name, parsed, _ = body.split(b"\0", 2)
            text = self._prepared[name] = parsed.decode(errors="replace")
            sql = None if name else text
        elif kind == b"B":
            _, name, _ = body.split(b"\0", 2)
            sql = self._prepared.get(name) if name else None
        asks = message[0] in _ENDS_GROUP
        self._asked += asks
        self._proxy._note(sql, asks=asks)
        return sql

    def _from_server(self) -> None:
        """Hand on what the server sends; a fault after its statement keeps that answer back, or loses it."""
        stream = _Messages(self._upstream)
        out, withheld = bytearray(), bytearray()
        for message in stream:
            fault = self._awaited.get(self._answered + 1)
            if fault is not None and fault.after:
                withheld += message
            else:
                out += message
            if message[:1] == b"Z":  # ReadyForQuery, with the status of the transaction
                self._answered += 1
                if fault is not None:
                    self._to_client(out)
                    fault.transaction_status = chr(message[_HEAD_BYTES])
                    fault.answered.set()
                    if fault.after and fault.holds:
                        self._wait_for_release(fault)
                    elif fault.after:
                        self.cut()
                        fault.fired.set()
                    out, withheld = withheld, bytearray()
            if not stream.has_more:
                self._to_client(out)
        if not self.dark:
            self.cut()

    def _wait_for_release(self, fault: Fault) -> None:
        self._holding.add(fault)
        fault.fired.set()
        if not self._is_cut:  # after the add: a cut either finds the fault there or is seen here
            fault._released.wait()
        self._holding.discard(fault)

    def _to_server(self, out: bytearray) -> None:
        if out and not self.dark:
            self._upstream.sendall(out)
        out.clear()

    def _to_client(self, out: bytearray) -> None:
        if out and not self.dark:
            with suppress(OSError):  # the client is gone; what it sent before must still reach the server
                self._client.sendall(out)
        out.clear()


class _Messages:
    """The messages of one side, each whole, until that side closes."""

    def __init__(self, side: socket.socket) -> None:
        self._side = side
        self._buffer = bytearray()

    @property
    def has_more(self) -> bool:
        """Whether another whole message is here already."""
        return len(self._buffer) >= _HEAD_BYTES and len(self._buffer) >= self._size()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        while not self.has_more:
            received = _receive(self._side, _RECEIVE_BYTES)
            if not received:
                raise StopIteration
            self._buffer += received
        size = self._size()
        message = bytes(self._buffer[:size])
        del self._buffer[:size]
        return message

    def _size(self) -> int:
        return 1 + int.from_bytes(self._buffer[1:_HEAD_BYTES], "big")  # the length does not count the type byte


def _exactly(side: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        chunk = _receive(side, size - len(received))
        if not chunk:
            raise ConnectionAbortedError
        received += chunk
    return received


def _receive(side: socket.socket, size: int) -> bytes:
    try:
        return side.recv(size)
    except OSError:  # reset: as good as closed
        return b""


def _shut(side: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with suppress(OSError):  # not connected, or no longer
        side.shutdown(how)
