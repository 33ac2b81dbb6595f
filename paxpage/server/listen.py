"""The address a server listens on, taken before the model is loaded so that a clash is known at once."""

import resource
import socket

UNREAD_LIMIT_S = 60.0


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to host and port (0: any free one), not listening yet.

    The kernel ends a connection whose client takes nothing for UNREAD_LIMIT_S while something waits for it; to the
    server that client has left. A slow one, that takes a little now and then, is let be.
    Raises:
        OSError: the address is in use, or is none of this machine's.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_LIMIT_S))  # connections inherit it
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def allow_many_connections() -> None:
    """Lets this process open as many files as its user may: each client is one, and 1,024 is a common soft limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
