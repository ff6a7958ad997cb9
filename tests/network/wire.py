"""Links that are slow and lose frames, in user space: for kernels without `netem`.

Started by `hosts` as a program, inside no namespace: of each link it makes both ends, a TAP device
in the host's namespace and one in the switch's, and carries frames between them. As with netem on the
switch's ports, what goes to the host is late or lost, and frames may overtake one another.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import time
from collections.abc import Iterator

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
CLONE_NEWNET = 0x40000000

MAX_FRAME_BYTES = 2048
"""More than Ethernet's 1,514: a TAP without offloads gives no larger ones."""

_libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace: str) -> None:
    """The calling thread's network is that of a namespace from now on."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if _libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"can't enter the network namespace {namespace}")
    finally:
        os.close(descriptor)


class Wires:
    """All links, on one thread."""

    def __init__(self, *, delay_s: float, jitter_s: float, loss: float) -> None:
        self._delay_s, self._jitter_s, self._loss = delay_s, jitter_s, loss
        self._selector = selectors.DefaultSelector()
        self._late: list[tuple[float, int, int, bytes]] = []
        """A heap of (when, number, to which end, frame)."""
        self._num_frames = 0
        self._random = random.Random(0)

    def add(self, host: int, port: int) -> None:
        """Both ends of a link; what comes from the host goes on at once."""
        self._selector.register(host, selectors.EVENT_READ, (port, False))
        self._selector.register(port, selectors.EVENT_READ, (host, True))

    def run(self) -> None:
        """For ever."""
        while True:
            timeout = self._late[0][0] - time.monotonic() if self._late else None
            for key, _ in self._selector.select(timeout):
                target, is_late = key.data
                for frame in _frames(key.fd):
                    if is_late:
                        self._hold(target, frame)
                    else:
                        _send(target, frame)
            now_s = time.monotonic()
            while self._late and self._late[0][0] <= now_s:
                _, _, target, frame = heapq.heappop(self._late)
                _send(target, frame)

    def _hold(self, target: int, frame: bytes) -> None:
        if self._random.random() < self._loss:
            return
        self._num_frames += 1
        late_s = self._delay_s + self._random.uniform(-self._jitter_s, self._jitter_s)
        heapq.heappush(self._late, (time.monotonic() + late_s, self._num_frames, target, frame))


def _frames(end: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(end, MAX_FRAME_BYTES)
        except OSError:  # no more, or the link is down
            return


def _send(end: int, frame: bytes) -> None:
    try:
        os.write(end, frame)
    except OSError:
        """The link is down, or its queue is full: lost, as on any wire."""


def tap(namespace: str, device: str) -> int:
    """A new device in a namespace, as long as this program lives."""
    enter(namespace)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return end


def main() -> None:
    """Carry frames until killed."""
    arguments = argparse.ArgumentParser(prog="wire.py")
    arguments.add_argument("--delay-ms", type=float, required=True)
    arguments.add_argument("--jitter-ms", type=float, required=True)
    arguments.add_argument("--loss-percent", type=float, required=True)
    arguments.add_argument("--switch", required=True, help="namespace of the bridge")
    arguments.add_argument("links", nargs="+", metavar="NAMESPACE:DEVICE:PORT")
    options = arguments.parse_args()
    wires = Wires(
        delay_s=options.delay_ms / 1000,
        jitter_s=options.jitter_ms / 1000,
        loss=options.loss_percent / 100,
    )
    for link in options.links:
        namespace, device, port = link.split(":")
        wires.add(tap(namespace, device), tap(options.switch, port))
    print("ready", flush=True)
    wires.run()


if __name__ == "__main__":
    main()
