"""Text and checkpoints in, text out: everything around the engine, written once and used by both tiers."""
