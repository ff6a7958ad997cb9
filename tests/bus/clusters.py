"""A cluster of three nats-servers on this machine, with certificates."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

from jigsawrl.bus.server import find_server
from jigsawrl.bus.server_config import Route, ServerSettings, server_config
from jigsawrl.cli.credentials import server_tls
from jigsawrl.processes import die_with_parent

NUM_SERVERS = 3


class Cluster:
    """Its servers by name; a context that leaves none behind."""

    def __init__(self, folder: Path, credentials: Path) -> None:
        ports = _free_ports(2 * NUM_SERVERS)
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.names = [f"n{number}" for number in range(NUM_SERVERS)]
        self.url = ",".join(f"tls://127.0.0.1:{port}" for port in ports[:NUM_SERVERS])
        for number, name in enumerate(self.names):
            routes = ports[NUM_SERVERS:]
            settings = ServerSettings(
                store_folder=str(folder / name),
                listen=f"127.0.0.1:{ports[number]}",
                tls=server_tls(credentials),
                route=Route(
                    name=name,
                    others=(),
                    listen=f"127.0.0.1:{routes[number]}",
                    urls=tuple(f"tls://127.0.0.1:{p}" for p in routes if p != routes[number]),
                ),
            )
            (folder / f"{name}.conf").write_text(server_config(settings))

    def __enter__(self) -> Cluster:
        for name in self.names:
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self.kill(name)

    def start(self, name: str) -> None:
        """The same server again, with what it had stored."""
        path = self._folder / name
        command = [str(find_server()), "-c", f"{path}.conf", "-l", f"{path}.log"]
        self._processes[name] = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )

    def kill(self, name: str) -> None:
        """A crash."""
        process = self._processes[name]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def story(self) -> str:
        """The ends of the logs."""
        logs = [self._folder / f"{name}.log" for name in self.names]
        return "\n".join(path.read_text()[-1500:] for path in logs if path.exists())


def _free_ports(num: int) -> list[int]:
    """Free a moment ago."""
    listeners = [socket.socket() for _ in range(num)]
    for listener in listeners:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
