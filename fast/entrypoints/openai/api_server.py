"""`python -m fast.entrypoints.openai.api_server`: `twinfer serve` on the `fast` tier, where users of vLLM look for it.

The server is written once, in `reference/frontend/server`.
"""

from __future__ import annotations

import sys

from reference.frontend.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["serve", *sys.argv[1:]], tier="fast"))
