"""vLLM keeps its OpenAI-compatible server here."""
