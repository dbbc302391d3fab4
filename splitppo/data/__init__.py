"""The prompts of a run."""
