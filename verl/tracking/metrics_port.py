"""The port at which Prometheus asks for a run's metrics, checked before anything is started."""

from __future__ import annotations

import socket

from verl.errors import ConfigError


def check_metrics_port(port: int | None, host: str) -> None:
    """Raise ConfigError when `trainer.metrics_port` could not be served on this machine now. Fast."""
    if port is None:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except (OSError, OverflowError) as error:
        raise ConfigError(port_not_served(port, host, error)) from error


def port_not_served(port: int, host: str, error: Exception) -> str:
    """Why there are no metrics at `trainer.metrics_port`, in words."""
    return (
        f"trainer.metrics_port={port} on trainer.metrics_host={host} cannot be served ({error}); choose another port, "
        "or null for none"
    )
