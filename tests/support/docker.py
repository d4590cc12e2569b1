"""Containers of docker/compose.yaml for tests: a stack of them at free ports, and what tests do to each one.

pytest-docker starts and ends a stack. Local images (docker/build-local-images.sh) are used where they have been built,
unless the environment names others; otherwise the official ones are pulled.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pytest_docker.plugin import get_docker_services

from exactly_once.embedded.ports import free_port
from tests.support.require import skip_unless
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
UP_SECONDS = 900.0  # for a whole stack, its images there: half a minute on an idle machine
_ANSWER_SECONDS = 300.0  # the engine of a busy machine freezes and ends containers slowly

_NO_IMAGE = re.compile(r"pull|manifest|registry|no such host|lookup|i/o timeout", re.IGNORECASE)

Images = dict[str, str]


def docker(*arguments: str, check: bool = True) -> str:
    """Run a docker command and return what it printed; its errors are part of the exception."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    if check and done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def engine_missing() -> str | None:
    """Why no containers can be run here, or None."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        return "no engine answers to docker"
    return None if compose_command() else "there is no docker compose"


def compose_command() -> str | None:
    """The second generation of compose if it is there, else the first, else None."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return "docker compose"
    return "docker-compose" if shutil.which("docker-compose") else None


def local_images() -> Images:
    """The local images that have been built, by the variable that asks compose.yaml for them."""
    lines = (FOLDER / "local-images.env").read_text().splitlines()
    named = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {variable: image for variable, image in named.items() if has_image(image)}


def local_image(variable: str, image: str) -> Images:
    """Another local image instead of the usual one, if it has been built and nobody asks for a third one."""
    name = f"exactly-once-local/{image}"
    return {variable: name} if variable not in os.environ and has_image(name) else {}


def has_image(image: str) -> bool:
    """Tell whether the engine has an image."""
    return bool(docker("image", "ls", "--quiet", image))


class Container:
    """One container: what a test does to it from outside."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def kill(self) -> None:
        """Kill it as ``kill -9`` does."""
        docker("kill", "--signal", "KILL", self.name)
        until(lambda: not self.is_running, 30, f"{self.name} to be gone")

    def start(self) -> None:
        """Start it again."""
        docker("start", self.name)

    def restart(self) -> None:
        """Stop it in order and start it again."""
        docker("restart", "--time", "30", self.name)

    def pause(self) -> None:
        """Freeze everything in it; on a busy machine the kernel may give up, and then nothing is frozen."""

        def is_paused() -> bool:
            try:
                docker("pause", self.name)
            except RuntimeError as error:
                if "unable to freeze" not in str(error):
                    raise
                return False
            return True

        until(is_paused, 60, f"{self.name} to be frozen")

    def unpause(self) -> None:
        """Let it go on."""
        docker("unpause", self.name)

    def execute(self, *command: str) -> str:
        """Run a command in it, as root."""
        return docker("exec", "--user", "root", self.name, *command)

    @property
    def image(self) -> str:
        """What it was made from."""
        return docker("inspect", "--format", "{{.Config.Image}}", self.name)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended; a frozen one is running."""
        return docker("inspect", "--format", "{{.State.Running}}", self.name) == "true"

    @property
    def is_ready(self) -> bool:
        """Whether its health check has succeeded."""
        return docker("inspect", "--format", "{{.State.Health.Status}}", self.name) == "healthy"

    def until_ready(self, timeout_seconds: float = UP_SECONDS) -> None:
        """Wait for its health check, in vain if it ends."""
        # Each look is two processes, which would take the processor from what is to come up.
        until(
            lambda: self.is_ready or not self.is_running, timeout_seconds, f"{self.name} to be healthy", poll_seconds=2
        )
        assert self.is_running, f"{self.name} has ended"

    def address(self) -> str:
        """Its address in the stack's network."""
        return docker("inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", self.name)

    def log(self, lines: int = 60) -> str:
        """The end of what it has printed."""
        done = subprocess.run(
            ["docker", "logs", "--tail", str(lines), self.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout


class Stack:
    """The running containers of one project."""

    def __init__(self, project: str, ports: Mapping[str, int], command: Sequence[str], services: Sequence[str]) -> None:
        self.project = project
        self.network = f"{project}_exactly-once"
        self.ports = ports
        self._command = list(command)
        self.services = list(services)

    def __getitem__(self, service: str) -> Container:
        labels = (f"project={self.project}", f"service={service}")
        filters = [word for label in labels for word in ("--filter", f"label=com.docker.compose.{label}")]
        name = docker("ps", "--all", "--format", "{{.Names}}", *filters)
        if not name:
            raise LookupError(f"{self.project} has no container of {service}")
        return Container(name)

    def compose(self, *arguments: str) -> None:
        """Run a compose command on this stack."""
        done = subprocess.run(
            [*self._command, *arguments], capture_output=True, text=True, timeout=UP_SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(f"compose {' '.join(arguments)}: {done.stderr.strip()}")

    def renew(self, *services: str, volumes: Sequence[str] = ()) -> None:
        """Make services anew, with empty volumes."""
        self.compose("rm", "--stop", "--force", "-v", *services)
        for volume in volumes:
            docker("volume", "rm", "--force", f"{self.project}_{volume}")
        self.compose("up", "--detach", "--no-deps", *services)
        self.until_ready(*services)

    def until_ready(self, *services: str) -> None:
        """Wait until these services, or all of them, are healthy."""
        for service in services or self.services:
            container = self[service]
            try:
                container.until_ready(UP_SECONDS)
            except AssertionError as error:
                error.add_note(container.log())
                raise

    def bootstrap_servers(self, *variables: str) -> str:
        """The brokers' addresses on this machine, by their ports' variables."""
        return ",".join(f"127.0.0.1:{self.ports[variable]}" for variable in variables)

    def conninfo(self, variable: str) -> str:
        """How the superuser gets to a Postgres on this machine, by its port's variable."""
        return f"postgresql://postgres@127.0.0.1:{self.ports[variable]}/postgres"


@contextlib.contextmanager
def stack(
    profiles: str,
    services: Sequence[str],
    ports: Sequence[str],
    environment: Mapping[str, str] = MappingProxyType({}),
    files: Sequence[Path] = (),
) -> Iterator[Stack]:
    """Run services of a profile, or of several with commas between, at free ports until the end of the block.

    `files` override parts of the compose file; `environment` are its variables, images among them.
    """
    chosen = {variable: free_port() for variable in ports}
    variables = {**local_images(), **os.environ, **environment, **{name: str(port) for name, port in chosen.items()}}
    variables["COMPOSE_PROFILES"] = profiles
    new = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    compose = compose_command()
    assert compose is not None
    project = f"exactly-once-{uuid.uuid4().hex[:8]}"
    environ = ["env", *(f"{name}={value}" for name, value in new.items())]
    all_files = [FOLDER / "compose.yaml", *files]
    command = [*environ, *compose.split(), *(w for file in all_files for w in ("-f", str(file))), "-p", project]
    with get_docker_services(
        " ".join([*environ, compose]),
        [str(file) for file in all_files],
        project,
        [],  # not here: nobody would clean up after a start that fails
        ["down --volumes --timeout 0"],
    ):
        running = Stack(project, chosen, command, services)
        try:
            running.compose("up", "--detach", *services)
        except RuntimeError as error:
            skip_unless(
                "docker", f"images can be neither found nor pulled: {error}" if _NO_IMAGE.search(str(error)) else None
            )
            raise
        running.until_ready()
        yield running
