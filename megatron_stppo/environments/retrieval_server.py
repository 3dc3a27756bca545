"""A server of POST /retrieve over a BM25 index, in the format of Search-R1.

By default it listens on the loopback address only. If a token is set, every request must carry it.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field, ValidationError
from starlette.concurrency import run_in_threadpool

from megatron_stppo.config import ConfigError
from megatron_stppo.environments.retrieval import BM25Retriever, Document

MAX_BODY = 1024 * 1024
Query = Annotated[str, Field(max_length=4096)]


class RetrieveRequest(BaseModel):
    queries: list[Query] = Field(max_length=512)
    topk: int = Field(3, ge=1, le=100)
    return_scores: bool = False


def create_app(index: Path, token: str | None = None) -> FastAPI:
    """Return the server's application. Raises ConfigError for a missing or empty index."""
    retriever = BM25Retriever(index)
    app = FastAPI(title="retrieve", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, int]:
        return {"documents": len(retriever)}

    @app.post("/retrieve")
    async def retrieve(request: Request) -> dict[str, Any]:
        _authorise(request, token)
        asked = _parse(await _body(request))
        rows = await run_in_threadpool(
            lambda: [retriever.lookup(query, asked.topk) for query in asked.queries]
        )
        return {"result": [[_entry(document, asked.return_scores) for document in row] for row in rows]}

    return app


def serve(index: Path, host: str, port: int, token: str | None, announce: Callable[[], None]) -> None:
    """Serve until interrupted; call `announce` once clients can connect.

    Raises ConfigError for a missing or empty index, and if the server cannot listen on the address.
    """
    app = create_app(index, token)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        # gaierror (a name that cannot be resolved) has error numbers that os.strerror does not have
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ConfigError(
            f"--host={host} --port={port}: cannot listen on this address ({reason}); give another --port, or "
            "a --host of this machine"
        ) from None
    announce()
    with listener, suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


def _authorise(request: Request, token: str | None) -> None:
    header = request.headers.get("authorization", "")
    if token and not hmac.compare_digest(header.encode(), f"Bearer {token}".encode()):
        raise HTTPException(401, "missing or wrong bearer token")


async def _body(request: Request) -> bytes:
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > MAX_BODY:
            raise HTTPException(413, f"request exceeds {MAX_BODY} bytes")
    return bytes(received)


def _parse(body: bytes) -> RetrieveRequest:
    try:
        return RetrieveRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise HTTPException(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _entry(document: Document, scores: bool) -> dict[str, Any]:
    contents = f'"{document.title}"\n{document.text}' if document.title else document.text
    plain = {"id": document.id, "contents": contents}
    return {"document": plain, "score": document.score} if scores else plain
