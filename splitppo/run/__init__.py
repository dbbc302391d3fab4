"""A run: its checks, its folder, its checkpoints and metrics."""
