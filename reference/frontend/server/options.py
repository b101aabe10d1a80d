"""The options of `twinfer serve` besides the engine's."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields

from reference.frontend.server.args import Limits, ServerArgs

API_KEY_VARIABLE = "TWINFER_API_KEY"

_LIMIT_TEXTS = {
    "max_body_bytes": "bytes of a request's body",
    "max_json_depth": "nesting of its JSON",
    "max_header_bytes": "bytes of all headers",
    "max_headers": "number of headers",
    "max_sequences": "completions of a request: prompts times n",
    "max_stops": "stop strings of a request",
    "max_stop_characters": "characters of a stop string or bad word",
    "max_bad_words": "entries of bad_words",
    "max_logit_bias": "entries of logit_bias",
    "max_token_ids": "entries of stop_token_ids and allowed_token_ids",
    "max_queue_len": "unfinished requests; beyond that, 429",
}


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the groups `server` and `limits`."""
    defaults = ServerArgs()
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default=defaults.host, metavar="ADDRESS",
        help=f"address to listen on; 0.0.0.0 lets other machines in (default: {defaults.host})",
    )  # fmt: skip
    group.add_argument(
        "--port", type=int, default=defaults.port, metavar="N",
        help=f"0 takes a free one (default: {defaults.port})",
    )  # fmt: skip
    group.add_argument(
        "--api-key", action="append", dest="api_keys", metavar="KEY",
        help=f"clients must send it; repeatable, each key with its own prefix cache (default: ${API_KEY_VARIABLE})",
    )  # fmt: skip
    group.add_argument(
        "--served-model-name", metavar="NAME", help="the name clients use (default: that of --model)"
    )
    group.add_argument(
        "--app", action="store_true", help="show the visualiser at /ui, to this machine only (extra [app])"
    )
    group.add_argument(
        "--enable-dev-endpoints", action="store_true", help="add /reset_prefix_cache and /v1/trace/steps"
    )
    group.add_argument(
        "--trust-request-chat-template", action="store_true", help="let requests bring a chat template"
    )
    group.add_argument(
        "--allowed-origins",
        action="extend",
        nargs="+",
        metavar="ORIGIN",
        help="web pages that may call (CORS)",
    )
    group.add_argument(
        "--access-log", action=argparse.BooleanOptionalAction, default=True, help="log each request"
    )
    group.add_argument(
        "--shutdown-timeout", type=float, default=defaults.shutdown_timeout, metavar="SECONDS",
        help=f"time that unfinished requests get at the end (default: {defaults.shutdown_timeout:g})",
    )  # fmt: skip
    group = parser.add_argument_group("limits of the server", "What one request may bring.")
    for field in fields(Limits):
        group.add_argument(
            f"--{field.name.replace('_', '-')}", type=int, default=field.default, metavar="N",
            help=f"{_LIMIT_TEXTS[field.name]} (default: {field.default})",
        )  # fmt: skip


def server_args(arguments: argparse.Namespace) -> ServerArgs:
    """Raises ValueError when an option is out of range."""
    keys = arguments.api_keys or [key for key in [os.environ.get(API_KEY_VARIABLE)] if key]
    return ServerArgs(
        host=arguments.host,
        port=arguments.port,
        api_keys=tuple(keys),
        served_model_name=arguments.served_model_name,
        app=arguments.app,
        enable_dev_endpoints=arguments.enable_dev_endpoints,
        trust_request_chat_template=arguments.trust_request_chat_template,
        allowed_origins=tuple(arguments.allowed_origins or ()),
        access_log=arguments.access_log,
        shutdown_timeout=arguments.shutdown_timeout,
        limits=Limits(**{field.name: getattr(arguments, field.name) for field in fields(Limits)}),
    )
