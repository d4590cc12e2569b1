"""Closing a Kafka client within a time: its own thread may stand still for ever, and its close waits for that."""

from __future__ import annotations

import contextlib
import threading

from confluent_kafka import Consumer


class Closing:
    """The end of one client, in a thread that is left behind where it does not come to its end."""

    def __init__(self, client: Consumer) -> None:
        self._client = client
        # What closing raised; written by the thread before it ends.
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="exactly_once-close", daemon=True)

    def wait(self, seconds: float) -> bool:
        """Return whether the client is closed, after so long at most; may be called again when it was interrupted.

        :raises Exception: what the client's own close raises.
        """
        if self._thread.ident is None:
            with contextlib.suppress(RuntimeError):  # an interrupted start that has started it
                self._thread.start()
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._client.close()
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            self._error = error
