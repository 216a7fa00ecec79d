"""What a server can be told beside its engine: options of `minipaged serve`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from minipaged.errors import InvalidRequest
from minipaged.params import check, setting

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s*A-Z]+|\*|null")
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of a server. Raises InvalidRequest (a ValueError) for a value out of range."""

    host: str = "127.0.0.1"
    """Where to listen; 0.0.0.0 is everywhere."""
    port: int = setting(8000, at_least=0, at_most=65535, note="0 is any that is free")
    """0 takes any that is free."""
    api_key: str | None = None
    """What clients have to send, as "Authorization: Bearer KEY"; else anybody may ask."""
    served_model_name: Sequence[str] = ()
    """How clients call the model; if left open, as it is named here."""
    max_waiting: int = setting(1024, at_least=1)
    """Requests that may wait for their first turn, a prompt each; where so many do, more are refused with 503. The
    prompts of one body are taken together, though they may be more."""
    page: bool = True
    """Show the blocks at / while they are used."""
    shutdown_timeout: float = setting(30.0, at_least=0)
    """Seconds that running requests get to finish after a first SIGTERM or Ctrl-C."""
    cors_origin: Sequence[str] = ()
    """A page elsewhere that may call the server, as https://example.org, or * for all."""
    trust_request_chat_template: bool = False
    """Let a request bring a chat template of its own, which is a program."""
    log_level: LogLevel = "info"
    """critical, error, warning, info, debug or trace; info logs each request."""

    def __post_init__(self) -> None:
        check(self)
        for several in ("served_model_name", "cors_origin"):
            if isinstance(given := getattr(self, several), str):  # one of them, not its letters
                object.__setattr__(self, several, (given,))
        if self.api_key == "":
            raise InvalidRequest("api_key is empty; leave it out, or make one with: openssl rand -hex 16")
        for name in self.served_model_name:
            if not name.strip():
                raise InvalidRequest(f"served_model_name is {name!r}, by which nobody can ask for it; give it a name")
        for origin in self.cors_origin:
            if not ORIGIN.fullmatch(origin):
                raise InvalidRequest(
                    f"cors_origin is {origin!r}; write it as browsers send it, as in https://example.org:8080 (the "
                    "scheme, the host, perhaps a port; small letters, and no path behind it), or * for all"
                )
