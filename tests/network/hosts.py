"""Hosts of their own on this machine: network namespaces on a bridge, over links as bad as asked for.

The bridge stands in a namespace too: what the machine's firewall does with bridged frames is none of
its business there. Names carry the test's process id, so that runs don't meet, and what a killed one
left is removed by the next.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jigsawrl.processes import die_with_parent
from tests.network import wire

T = TypeVar("T")

PREFIX = "jigsaw-net"
NETWORK = "10.77.0"
DEVICE = "eth0"
START_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Weather:
    """What a link does with what goes to its host."""

    delay_ms: float = 20.0
    jitter_ms: float = 5.0
    loss_percent: float = 1.0


def missing() -> str | None:
    """What this machine lacks for a `Network`; one line."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root: run make test-network as root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is missing: apt-get install iproute2"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    netem = _has_netem(probe)
    _ip("netns", "delete", probe)
    if not netem and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "the kernel has neither the qdisc netem (modprobe sch_netem) nor /dev/net/tun"
    return None


class Network:
    """Its hosts by name; a context that leaves nothing behind."""

    def __init__(self, folder: Path, names: Sequence[str], weather: Weather) -> None:
        self._folder = folder
        self._weather = weather
        self._switch = _namespace("switch")
        self.addresses: Mapping[str, str] = {
            name: f"{NETWORK}.{number}" for number, name in enumerate(names, start=2)
        }
        self.means = "nothing yet"
        """Of the weather, for people."""
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        _sweep()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        names = [*map(_namespace, self.addresses), self._switch]
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for name in names:
            _remove(name)

    def start(
        self, host: str, *command: str, log: Path, folder: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """A program on a host, which ends with the test at the latest."""
        return self._start([*self._on(host), *command], log=log, folder=folder)

    def run(self, host: str, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """A program on a host to its end."""
        return subprocess.run(
            [*self._on(host), *command],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )

    def call(self, host: str, function: Callable[[], T]) -> T:
        """A function of this process, with the network of a host."""
        results: list[T] = []

        def inside() -> None:
            wire.enter(_namespace(host))
            results.append(function())

        thread = threading.Thread(target=inside, name=f"on-{host}")
        thread.start()
        thread.join()
        assert results, f"a call on {host} failed"
        return results[0]

    def cut(self, host: str) -> float:
        """Pull its cable; when that was."""
        _ip("-n", self._switch, "link", "set", _port(self.addresses[host]), "down")
        return time.time()

    def heal(self, host: str) -> float:
        """Put it back; when that was."""
        _ip("-n", self._switch, "link", "set", _port(self.addresses[host]), "up")
        return time.time()

    def processes(self, host: str) -> list[int]:
        """Of all that runs on a host."""
        told = _ip("netns", "pids", _namespace(host))
        return [int(pid) for pid in told.split()]

    def _on(self, host: str) -> list[str]:
        return ["ip", "netns", "exec", _namespace(host)]

    def _start(
        self, command: Sequence[str], *, log: Path, folder: Path | None = None
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                preexec_fn=die_with_parent(),
            )
        self._processes.append(process)
        return process

    def _build(self) -> None:
        for name in (self._switch, *map(_namespace, self.addresses)):
            _ip("netns", "add", name)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        if _has_netem(self._switch):
            self._link_by_netem()
        else:
            self._link_by_wire()
        for host, address in self.addresses.items():
            inside = ("-n", _namespace(host))
            _ip("-n", self._switch, "link", "set", _port(address), "master", "switch", "up")
            _ip(*inside, "address", "add", f"{address}/24", "dev", DEVICE)
            _ip(*inside, "link", "set", DEVICE, "up")
            _ip(*inside, "link", "set", "lo", "up")

    def _link_by_netem(self) -> None:
        for host, address in self.addresses.items():
            near = ("link", "add", _port(address), "type", "veth")
            _ip("-n", self._switch, *near, "peer", "name", DEVICE, "netns", _namespace(host))
            _netem(self._switch, _port(address), self._weather)
        self.means = "tc netem"

    def _link_by_wire(self) -> None:
        weather = self._weather
        log = self._folder / "wire.log"
        links = [f"{_namespace(h)}:{DEVICE}:{_port(a)}" for h, a in self.addresses.items()]
        carrier = self._start(
            [
                *(sys.executable, wire.__file__, "--switch", self._switch),
                *("--delay-ms", str(weather.delay_ms), "--jitter-ms", str(weather.jitter_ms)),
                *("--loss-percent", str(weather.loss_percent), *links),
            ],
            log=log,
        )
        os.setpriority(os.PRIO_PROCESS, carrier.pid, -10)  # a wire does not wait for a core
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while "ready" not in log.read_text():
            assert carrier.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, "the wires did not come up"
            time.sleep(0.05)
        self.means = "wires in user space, since this kernel has no netem"


def _namespace(name: str) -> str:
    return f"{PREFIX}-{os.getpid()}-{name}"


def _port(address: str) -> str:
    return f"port{address.rpartition('.')[2]}"


def _netem(namespace: str, device: str, weather: Weather) -> str:
    delay = ("delay", f"{weather.delay_ms}ms", f"{weather.jitter_ms}ms")
    loss = ("loss", f"{weather.loss_percent}%")
    place = ("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "netem")
    return _command(*place, *delay, *loss)


def _has_netem(namespace: str) -> bool:
    try:
        _netem(namespace, "lo", Weather())
    except RuntimeError:
        return False
    return True


def _sweep() -> None:
    """What tests left that were killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{PREFIX}-"):
            owner = int(name.removeprefix(f"{PREFIX}-").partition("-")[0])
            if not Path(f"/proc/{owner}").exists():
                _remove(name)


def _remove(namespace: str) -> None:
    """With all that runs in it, which is ours."""
    if not Path(f"/run/netns/{namespace}").exists():
        return
    for pid in _ip("netns", "pids", namespace).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            """It has ended meanwhile."""
    _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> str:
    return _command("ip", *arguments)


def _command(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
