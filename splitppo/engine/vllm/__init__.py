"""vLLM as a rollout engine, in a process of its own."""
