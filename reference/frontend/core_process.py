"""The engine core's own process: `python -m reference.frontend.core_process ADDRESS LIFELINE`.

Started by `core_client.ProcessClient` and by nobody else. ADDRESS is a ZeroMQ address on a private unix socket;
LIFELINE is a file descriptor whose other end the API process holds: when it breaks, this process ends at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from reference.frontend.core_loop import EngineCoreLoop, build_engine_core
from reference.frontend.core_messages import Command, CoreFailed, CoreReady, News
from reference.frontend.engine_args import EngineArgs
from reference.frontend.logger import configure_logging
from reference.frontend.tiers import load_tier


def main(address: str, lifeline: int) -> int:
    """Serve until told to stop. Returns 0, or 1 when the core could not start or go on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both; the API process decides what it means
    threading.Thread(target=_die_with_parent, args=(address, lifeline), daemon=True).start()
    channel = _Channel(address)
    try:
        options = msgspec.json.decode(os.environ.pop("TWINFER_CORE_OPTIONS"))
        configure_logging()
        core, path = build_engine_core(EngineArgs(**options["args"]), load_tier(options["tier"]))
    except MemoryError as error:
        channel.send(
            CoreFailed(f"There is not enough memory ({error}); lower kv_cache_memory or num_blocks.", True)
        )
        return 1
    except (ValueError, OSError) as error:
        channel.send(CoreFailed(str(error), is_refusal=True))
        return 1
    else:
        channel.send(CoreReady(core.config, str(path)))
        loop = EngineCoreLoop(core, channel.receive, channel.send)
        loop.run()
        return 0 if loop.is_stopping else 1
    finally:
        channel.close()


def _die_with_parent(address: str, lifeline: int) -> None:
    """Wait for the parent's death, remove the socket that it cannot remove any more with its folder, and end."""
    # Nothing is ever written: this returns when the other end is closed.
    socket.socket(fileno=lifeline).recv(1)
    path = Path(address.removeprefix("ipc://"))
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    os._exit(1)


class _Channel:
    """Commands in and news out over one ZeroMQ socket."""

    def __init__(self, address: str) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, news: News) -> None:
        self._socket.send(self._encoder.encode(news))

    def receive(self, block: bool) -> list[Command]:
        commands = [self._decoder.decode(self._socket.recv())] if block else []
        while self._socket.poll(0):
            commands.append(self._decoder.decode(self._socket.recv()))
        return commands

    def close(self) -> None:
        self._socket.close()
        self._context.term()  # returns when the last words have been taken


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2])))
