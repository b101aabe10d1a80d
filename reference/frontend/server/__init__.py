"""The OpenAI-compatible HTTP server: `twinfer serve`. Start reading at `app.py`."""
