"""The address a server listens on, taken before the model is loaded so that a clash is known at once."""

import socket


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to host and port (0: any free one), not listening yet.

    Raises:
        OSError: the address is in use, or is none of this machine's.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
