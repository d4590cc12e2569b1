"""A worker in a container of its own, so that its network can be cut and all of it be frozen.

A container and not a process of this machine: an engine gives it a network of its own and freezes it from outside,
wherever the engine runs, and no test touches the machine's own interfaces. The project is mounted, not installed.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from tests.support.docker import ROOT, Container, Stack, docker, has_image
from tests.support.worker import Worker

IMAGE = "exactly-once-local/worker:test"


def worker_image_missing() -> str | None:
    """Why no worker can run in a container, or None."""
    return None if has_image(IMAGE) else f"there is no image {IMAGE}; docker/build-local-images.sh makes it"


class ContainerWorker(Worker):
    """One worker in the network of a stack."""

    def __init__(self, stack: Stack, config: Mapping[str, Any]) -> None:
        self._stack = stack
        self.container = Container(f"{stack.project}-{config['name']}-{uuid.uuid4().hex[:6]}")
        super().__init__(config)

    def _command(self, config: str) -> list[str]:
        place = ["--name", self.container.name, "--network", self._stack.network, "--init", "--cap-add", "NET_ADMIN"]
        files = ["--volume", f"{ROOT}:/project:ro"]
        return ["docker", "run", "--rm", *place, *files, IMAGE, "python3", "-m", "tests.support.worker", config]

    def cut(self, *services: str) -> None:
        """Drop every packet from and to these services; nobody is told."""
        self._filter("--insert", services)

    def heal(self, *services: str) -> None:
        """Let the packets through again."""
        self._filter("--delete", services)

    def _filter(self, change: str, services: tuple[str, ...]) -> None:
        for address in (self._stack[service].address() for service in services):
            for chain, side in (("OUTPUT", "--destination"), ("INPUT", "--source")):
                self.container.execute("iptables", "--wait", change, chain, side, address, "--jump", "DROP")

    def stop(self) -> None:
        """Freeze it."""
        self.container.pause()

    def wait_stopped(self) -> None:
        """It is frozen as soon as the engine says so."""

    def cont(self) -> None:
        """Let it go on."""
        self.container.unpause()

    def term(self) -> None:
        """Ask it to stop."""
        docker("kill", "--signal", "TERM", self.container.name)

    def kill(self) -> None:
        """Kill it as ``kill -9`` does, frozen or not."""
        docker("rm", "--force", self.container.name, check=False)
        self._process.wait(300)
