"""What `twinfer serve` can be told besides the engine's options."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address

MIB = 1024**2


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address to listen on."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Limits:
    """What one client may ask for. Requests beyond a limit are refused before any work is done for them.

    Args:
        max_body_bytes: size of a request's body.
        max_json_depth: nesting of its JSON.
        max_header_bytes: size of all headers together.
        max_headers: number of headers.
        max_sequences: completions of one request, its prompts times `n`.
        max_stops: stop strings, of at most `max_stop_characters` each.
        max_stop_characters: see there; bad words too.
        max_bad_words: words in `bad_words`.
        max_logit_bias: tokens in `logit_bias`.
        max_token_ids: ids in `stop_token_ids` and in `allowed_token_ids`.
        max_queue_len: requests that are unfinished at once; more are told to come back later (429).
    """

    max_body_bytes: int = 8 * MIB
    max_json_depth: int = 64
    max_header_bytes: int = 16 * 1024
    max_headers: int = 100
    max_sequences: int = 64
    max_stops: int = 4
    max_stop_characters: int = 256
    max_bad_words: int = 128
    max_logit_bias: int = 300
    max_token_ids: int = 4096
    max_queue_len: int = 1024

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")


@dataclass(frozen=True)
class ServerArgs:
    """Options of the server; names are vLLM's where the thing exists there.

    Args:
        host: address to listen on; only this machine unless told otherwise.
        port: 0 takes a free one.
        api_keys: clients must send one of them as a bearer token; with several, each has its own prefix cache.
        served_model_name: the name clients use; the model's unless given.
        app: show the visualiser at /ui, to this machine only.
        enable_dev_endpoints: /reset_prefix_cache and /v1/trace/steps; steps are traced then.
        trust_request_chat_template: let requests bring a chat template.
        allowed_origins: web pages of these origins may call the server (CORS).
        access_log: a line in the log for each request.
        shutdown_timeout: seconds that unfinished requests get when the server is told to stop.
        limits: see `Limits`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_name: str | None = None
    app: bool = False
    enable_dev_endpoints: bool = False
    trust_request_chat_template: bool = False
    allowed_origins: tuple[str, ...] = ()
    access_log: bool = True
    shutdown_timeout: float = 30.0
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.app and not is_loopback(self.host):
            raise ValueError(
                f"The app is shown on this machine only: leave out --app, or --host {self.host or repr('')}."
            )
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}.")
        if not 0 <= self.shutdown_timeout <= 3600:
            raise ValueError(
                f"shutdown_timeout must be from 0 to 3600 seconds, got {self.shutdown_timeout:g}."
            )
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ValueError("An API key must be visible ASCII and not empty.")
