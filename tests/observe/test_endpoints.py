"""The HTTP endpoints: what probes and scrapers get."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket

import pytest

from exactly_once import ConfigurationError
from exactly_once.metrics.endpoints import Endpoints
from exactly_once.metrics.health import Health
from exactly_once.metrics.prometheus import PrometheusMetrics
from tests.conftest import MakeConsumer
from tests.integration.scene import Scene
from tests.observe.looking import get
from tests.support.require import skip_unless


def test_probes_answer_by_status_and_say_why(scene: Scene, make_consumer: MakeConsumer) -> None:
    consumer = make_consumer()
    with Endpoints(consumer, port=0) as endpoints:
        assert get(endpoints.port, "/livez")[0] == 200
        status, content_type, text = get(endpoints.port, "/readyz")
        assert (status, content_type) == (503, "application/json")
        assert json.loads(text)[0]["reasons"] == ["it has not subscribed yet"]
        consumer.subscribe([scene.topic])
        next(iter(consumer))
        status, _, text = get(endpoints.port, "/readyz?verbose=1")
        assert (status, json.loads(text)[0]["owned"]) == (200, [[scene.topic, 0]])


def test_livez_fails_when_the_loop_does_not_turn(scene: Scene) -> None:
    consumer = scene.consumer()
    consumer._observer._polled_at -= 301
    with Endpoints(consumer, port=0) as endpoints:
        status, _, text = get(endpoints.port, "/livez")
        assert (status, json.loads(text)[0]["is_alive"]) == (503, False)


def test_a_process_is_as_well_as_all_of_its_consumers(scene: Scene, make_consumer: MakeConsumer) -> None:
    well, unwell = scene.consumer(), make_consumer()
    next(iter(well))
    with Endpoints(well, port=0) as one, Endpoints(well, unwell, port=0) as both:
        assert (get(one.port, "/readyz")[0], get(both.port, "/readyz")[0]) == (200, 503)
        assert len(json.loads(get(both.port, "/readyz")[2])) == 2


def test_metrics_are_served_only_on_request(make_consumer: MakeConsumer, metrics: PrometheusMetrics) -> None:
    consumer = make_consumer(metrics=metrics)
    with Endpoints(consumer, port=0) as without, Endpoints(consumer, port=0, render=metrics.render) as with_them:
        assert get(without.port, "/metrics")[0] == 404
        status, content_type, text = get(with_them.port, "/metrics")
        assert (status, "exactly_once_units_total" in text) == (200, True)
        assert content_type.startswith("text/plain")


class Nobody:
    """A consumer that cannot even say how it is."""

    def health(self) -> Health:
        raise AssertionError


def test_a_failure_to_answer_is_told_to_the_client_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def render(accept: str) -> tuple[str, bytes]:
        raise RuntimeError(f"no metrics as {accept or 'text'}")

    with Endpoints(Nobody(), port=0, render=render) as endpoints:
        status, _, text = get(endpoints.port, "/metrics")
        assert (status, text) == (500, "RuntimeError: no metrics as text\n")
        assert get(endpoints.port, "/livez")[0] == 500
    assert "no answer to /metrics: RuntimeError: no metrics as text" in caplog.text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("POST", "/livez", 501)])
def test_nothing_else_is_served(make_consumer: MakeConsumer, method: str, path: str, status: int) -> None:
    with Endpoints(make_consumer(), port=0) as endpoints:
        assert get(endpoints.port, path, method=method)[0] == status


def test_only_this_machine_can_ask_unless_told_otherwise(make_consumer: MakeConsumer) -> None:
    with Endpoints(make_consumer(), port=0) as endpoints:
        assert endpoints._server.server_address[0] == "127.0.0.1"


def test_a_client_that_says_nothing_holds_nobody_up(make_consumer: MakeConsumer) -> None:
    with Endpoints(make_consumer(), port=0) as endpoints, socket.create_connection(("127.0.0.1", endpoints.port)):
        assert get(endpoints.port, "/livez")[0] == 200


def test_a_port_that_is_taken_is_an_error_at_once(make_consumer: MakeConsumer) -> None:
    consumer = make_consumer()
    with Endpoints(consumer, port=0) as endpoints, pytest.raises(OSError, match="in use"):
        Endpoints(consumer, port=endpoints.port)


def test_closing_twice_is_fine_and_frees_the_port(make_consumer: MakeConsumer) -> None:
    consumer = make_consumer()
    endpoints = Endpoints(consumer, port=0)
    endpoints.close()
    endpoints.close()
    Endpoints(consumer, port=endpoints.port).close()


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_an_address_of_either_family_is_listened_at(host: str) -> None:
    """A pod's own, say."""
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            skip_unless("ipv6", str(error))

    with Endpoints(Nobody(), port=0, host=host) as endpoints:
        connection = http.client.HTTPConnection(host, endpoints.port, timeout=60)
        connection.request("GET", "/")
        assert connection.getresponse().status == 404
        connection.close()


def test_there_must_be_a_consumer() -> None:
    with pytest.raises(ConfigurationError, match="needs a consumer"):
        Endpoints(port=0)
