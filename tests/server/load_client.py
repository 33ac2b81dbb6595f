"""Many streams at once, from a process of its own: python -m tests.server.load_client PORT < bodies > streams.

bodies: a JSON list of bodies for /v1/completions. All connections are made first, then the requests are sent, a
thousand in a second. streams: of each, {"head": the status line, "text": the whole body, "begin_s", "end_s": when its
first and last byte came}, on one clock.
"""

import asyncio
import json
import sys
import time
from typing import Any

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(port: int) -> Connection:
    return await asyncio.open_connection("127.0.0.1", port)


def send(connection: Connection, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    connection[1].write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)


async def read(connection: Connection) -> dict[str, Any]:
    """Reads to the end of the connection."""
    pieces, times_s = [], []
    while piece := await connection[0].read(2**16):
        pieces.append(piece)
        times_s.append(time.monotonic())
    connection[1].close()
    head, _, content = b"".join(pieces).partition(b"\r\n\r\n")
    return {
        "head": head.partition(b"\r\n")[0].decode(),
        "text": unchunked(content).decode(),
        "begin_s": times_s[0] if times_s else 0.0,
        "end_s": times_s[-1] if times_s else 0.0,
    }


def unchunked(content: bytes) -> bytes:
    """The body within HTTP's chunks, as far as it came."""
    pieces, position = [], 0
    while (end := content.find(b"\r\n", position)) >= 0:
        size = int(content[position:end], 16)
        pieces.append(content[end + 2 : end + 2 + size])
        position = end + 2 + size + 2
    return b"".join(pieces)


async def run(port: int, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    connections = [await connect(port) for _ in bodies]
    reading = [asyncio.create_task(read(connection)) for connection in connections]
    for place, (connection, body) in enumerate(zip(connections, bodies, strict=True)):
        send(connection, body)
        await asyncio.sleep(0.02 if place % 20 == 19 else 0)
    return await asyncio.gather(*reading)


if __name__ == "__main__":
    json.dump(asyncio.run(run(int(sys.argv[1]), json.load(sys.stdin))), sys.stdout)
