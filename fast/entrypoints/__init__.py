"""Programs that start the `fast` tier under the names that vLLM gives them."""
