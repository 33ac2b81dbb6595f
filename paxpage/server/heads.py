"""A limit on what is not a body: uvicorn has none, and what parses HTTP copies a header again with each piece of it."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024  # of a request's line and headers, or its trailers, beside the piece that they begin in
REFUSAL = f"The request's line and headers have more than {MAX_HEAD_BYTES} bytes."


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's connection, which answers 400 and ends when a request's head, or its trailers, are too long."""

    _num_bytes = 0  # that came since the last that were part of a body, or ended a head

    def data_received(self, data: bytes) -> None:
        """Takes a piece of what the client sends, which is at most 256 KiB long."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.logger.warning(REFUSAL)
            self.send_400_response(REFUSAL)

    def on_message_begin(self) -> None:
        """Nothing of the head has come before this piece."""
        self._num_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head has ended."""
        self._num_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Bodies have a limit of their own."""
        self._num_bytes = 0
        super().on_body(body)
