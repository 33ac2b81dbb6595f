"""Errors as OpenAI's clients expect them: one JSON object with message, type, param and code."""

import re
from collections.abc import Mapping

from fastapi.responses import JSONResponse

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "ContentTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An answer that is an error: an HTTP status, a message for people and the request field at fault, if one is."""

    def __init__(self, status: int, message: str, param: str | None = None, *, retry_after_s: int | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


def error_body(error: ApiError) -> dict[str, dict[str, str | int | None]]:
    """The JSON body of an error answer, and the data of an error line in a stream."""
    kind = ERROR_TYPES.get(error.status, "BadRequestError" if error.status < 500 else "InternalServerError")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.status}}


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The whole error answer; Retry-After is added where the error gives one, in seconds."""
    all_headers = dict(headers or {})
    if error.retry_after_s is not None:
        all_headers["Retry-After"] = str(error.retry_after_s)
    return JSONResponse(error_body(error), status_code=error.status, headers=all_headers)


def from_value_error(error: ValueError, fields: Mapping[str, object]) -> ApiError:
    """A 400 for a value the engine refused. param is the message's first word, up to a dot or [, if one of fields."""
    first_word = re.split(r"[ .\[]", str(error), maxsplit=1)[0]
    return ApiError(400, str(error), first_word if first_word in fields else None)
