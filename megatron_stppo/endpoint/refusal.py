"""A request that is refused: its HTTP status, and one line for the client."""

from __future__ import annotations

from megatron_stppo.messages import one_line


class Refusal(Exception):
    """The error for a request that is refused.

    Example: Refusal(400, "n: only 1 is supported").

    code: a word for programs, as in OpenAI's errors.
    """

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(one_line(message))
        self.status, self.code = status, code
