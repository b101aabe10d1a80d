"""Put the embedded model into the user's cache folder, or say in one sentence why that failed (exit status 1)."""

from __future__ import annotations

import sys

from reference.frontend.model_store import resolve_model

if __name__ == "__main__":
    try:
        resolve_model("smollm2-135m")
    except ValueError as error:
        sys.exit(f"error: {error}")
