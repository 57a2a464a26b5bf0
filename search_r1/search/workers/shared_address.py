"""An address where several processes listen; the kernel spreads new connections evenly over them."""

from __future__ import annotations

import errno
import socket
from typing import Any

from search_r1.errors import ServerError


class SharedAddress:
    """Opens a socket for each process (SO_REUSEPORT) and keeps other servers off while none listens.

    With one socket for all, the process that wakes up first would take a whole burst of connections.
    """

    def __init__(self, reserved: socket.socket) -> None:
        """`reserved` is bound. Raises `ServerError` when a server that loaded at the same time listens already."""
        self._family, self._address = reserved.family, reserved.getsockname()
        try:
            reserved.listen(1)
            reserved.shutdown(socket.SHUT_RDWR)  # connections are refused until a front end listens
            _bind_again(reserved, self._address)
        except OSError as error:
            raise ServerError(f"cannot listen on {self._address}: {error}; pass another --port") from error
        # it stays bound: a server can bind or listen beside it only with SO_REUSEPORT, which none but front ends set
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved = reserved

    def open(self) -> socket.socket:
        """A bound socket for one more process. Raises `OSError`."""
        another = socket.socket(self._family, socket.SOCK_STREAM)
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        another.bind(self._address)
        return another


def _bind_again(reserved: socket.socket, address: Any) -> None:
    """To stop listening gives a port back that the kernel had chosen, but not one that was asked for."""
    try:
        reserved.bind(address)
    except OSError as error:
        if error.errno != errno.EINVAL:  # it is bound still
            raise
