"""Calls of tools in the text of a completion, as vLLM's parser of the run reads them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParser

ParseTools = Callable[[Any, Any], ToolParser]  # a parser's class: (tokenizer, tools) -> parser
Calls = tuple[tuple[str, str], ...]  # (name of the function, arguments as JSON)


def parse(
    make: ParseTools, tokenizer: Any, request: ChatCompletionRequest, text: str
) -> tuple[str, Calls, bool]:
    """Return (the text without calls, the calls, whether there are calls that cannot be read).

    The policy may write anything. Parsers then log a traceback, or raise: neither is an error of the run.
    """
    parser = make(tokenizer, request.tools)
    with _withheld(type(parser)) as complaints:
        try:
            parsed = parser.extract_tool_calls(text, request)
            calls = tuple((call.function.name, call.function.arguments) for call in parsed.tool_calls)
            for call in calls:  # half a surrogate pair in JSON ("\ud83d") cannot be sent
                "".join(call).encode()
        except Exception:
            return text, (), True
    if not parsed.tools_called:
        return text, (), bool(complaints)
    return parsed.content or "", calls, bool(complaints)


@contextmanager
def _withheld(parser: type) -> Iterator[Sequence[logging.LogRecord]]:
    """Yield the warnings and errors that the modules of a parser log in the block, which are not shown."""
    records: list[logging.LogRecord] = []

    def shown(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            records.append(record)
        return record.levelno < logging.WARNING

    loggers = [logging.getLogger(name) for name in {kind.__module__ for kind in parser.__mro__}]
    for logger in loggers:
        logger.addFilter(shown)
    try:
        yield records
    finally:
        for logger in loggers:
            logger.removeFilter(shown)
