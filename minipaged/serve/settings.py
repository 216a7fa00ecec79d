"""The settings of a server, which are options of `minipaged serve`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from minipaged.errors import InvalidRequest
from minipaged.params import check, setting
from minipaged.serve.call_parsers import ParserName

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s*A-Z]+|\*|null")
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of a server. Raises InvalidRequest (a ValueError) for a value out of range."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is all interfaces."""
    port: int = setting(8000, at_least=0, at_most=65535, note="0 is any that is free")
    """Port to listen on; 0 takes any free one."""
    api_key: str | None = None
    """Key that clients must send, as "Authorization: Bearer KEY"; by default none is needed."""
    served_model_name: Sequence[str] = ()
    """Name that clients use for the model; by default the model argument."""
    max_waiting: int = setting(1024, at_least=1)
    """Requests (one per prompt) that may wait for their first step. When the queue is full, new ones are refused with
    503. A body with several prompts is accepted as a whole, even if it exceeds this number."""
    page: bool = True
    """Serve a page at / that shows the blocks live."""
    shutdown_timeout: float = setting(30.0, at_least=0)
    """Seconds that running requests have to finish after a first SIGTERM or Ctrl-C."""
    cors_origin: Sequence[str] = ()
    """Origin of web pages that may call the server, e.g. https://example.org, or * for all."""
    chat_template: str | None = None
    """Jinja chat template that replaces the model's."""
    tool_call_parser: Literal["auto", ParserName] = "auto"
    """How the model writes tool calls: hermes, llama3_json or mistral; auto finds out by its chat template."""
    trust_request_chat_template: bool = False
    """Let requests bring their own chat template, which is a program."""
    structured_output_backend: Literal["auto", "guidance"] = "auto"
    """Library that holds outputs to a schema or grammar. There is one, llguidance, and both names mean it."""
    log_level: LogLevel = "info"
    """Log level: critical, error, warning, info, debug or trace; info logs each request."""

    def __post_init__(self) -> None:
        check(self)
        for several in ("served_model_name", "cors_origin"):
            if isinstance(given := getattr(self, several), str):  # one string, not a sequence of letters
                object.__setattr__(self, several, (given,))
        if self.api_key == "":
            raise InvalidRequest("api_key is empty; leave it out, or make one with: openssl rand -hex 16")
        for name in self.served_model_name:
            if not name.strip():
                raise InvalidRequest(f"served_model_name is {name!r}, which no request can name; give it a name")
        for origin in self.cors_origin:
            if not ORIGIN.fullmatch(origin):
                raise InvalidRequest(
                    f"cors_origin is {origin!r}; write it as browsers send it, as in https://example.org:8080 (a "
                    "scheme, a host and perhaps a port, in lower case and without a path), or * for all"
                )
