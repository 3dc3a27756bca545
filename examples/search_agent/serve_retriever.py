"""Serve POST /retrieve over a BM25 index, in the format of Search-R1.

python examples/search_agent/serve_retriever.py INDEX [--host HOST] [--port PORT] [--token-env NAME]

By default it listens on the loopback address only. If a token is set, every request must carry it.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from megatron_stppo.base.printing import drop_unwritable
from megatron_stppo.commands.open_run import command_group, examples
from megatron_stppo.config import ConfigError
from megatron_stppo.environments.retrieval import BM25Retriever, Document

MAX_BODY = 1024 * 1024
SCRIPT = "python examples/search_agent/serve_retriever.py"
Query = Annotated[str, Field(max_length=4096)]
commands = command_group()


class RetrieveRequest(BaseModel):
    queries: list[Query] = Field(max_length=512)
    topk: int = Field(3, ge=1, le=100)
    return_scores: bool = False


@commands.command(
    epilog=examples(
        f"{SCRIPT} index --port 8000",
        f"RETRIEVER_TOKEN=... {SCRIPT} index --host 0.0.0.0 --token-env RETRIEVER_TOKEN",
    )
)
def serve(
    index: Annotated[Path, typer.Argument(help="folder of a BM25 index")],
    host: Annotated[
        str, typer.Option(help="address to listen on; others than the loopback need --token-env")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    token_env: Annotated[
        str | None, typer.Option(help="environment variable that holds the bearer token")
    ] = None,
) -> None:
    """Serve POST /retrieve over a BM25 index until interrupted."""
    app = create_app(index, listener_token(host, token_env))
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
    typer.echo(f"serving POST http://{host}:{port}/retrieve; press Ctrl-C to stop", err=True)
    with listener, suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


def listener_token(host: str, token_env: str | None) -> str | None:
    """Return the bearer token. Raises ConfigError for a host that others can reach without a token."""
    token = os.environ.get(token_env, "") if token_env else None
    if token == "":
        raise ConfigError(f"--token-env={token_env}: that variable is not set; export it or leave it out")
    if token is None and not _is_loopback(host):
        raise ConfigError(
            f"--host={host}: other machines could reach it; give --token-env NAME, or bind 127.0.0.1"
        )
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name: its address is not known here
        return False


def create_app(index: Path, token: str | None = None) -> Starlette:
    """Return the server's application. Raises ConfigError for a missing or empty index."""
    retriever = BM25Retriever(index)

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"documents": len(retriever)})

    async def retrieve(request: Request) -> JSONResponse:
        _authorise(request, token)
        asked = _parse(await _body(request))
        rows = await run_in_threadpool(
            lambda: [retriever.lookup(query, asked.topk) for query in asked.queries]
        )
        return JSONResponse(
            {"result": [[_entry(document, asked.return_scores) for document in row] for row in rows]}
        )

    routes = [Route("/health", health), Route("/retrieve", retrieve, methods=["POST"])]
    return Starlette(routes=routes, exception_handlers={HTTPException: _refused})


async def _refused(_: Request, error: Any) -> JSONResponse:
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


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


if __name__ == "__main__":
    drop_unwritable("stderr")
    try:
        commands()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
