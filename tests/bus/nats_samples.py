"""Writes the samples in deploy/nats: ``python tests/bus/nats_samples.py``."""

from __future__ import annotations

from pathlib import Path

from jigsawrl.bus.server_config import Tls
from jigsawrl.cli.credentials import config_texts

FOLDER = Path(__file__).parents[2] / "deploy" / "nats"
CLUSTER = ("nats-a", "nats-b", "nats-c")
TLS = Tls(certificate="server.pem", key="server.key", ca="ca.pem", groups=("default",))


def samples() -> dict[str, str]:
    """As `jigsaw credentials DIR [--cluster nats-a,nats-b,nats-c]` writes them."""
    return config_texts(TLS, ()) | config_texts(TLS, CLUSTER)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in samples().items():
        (FOLDER / name).write_text(text)
