"""splitppo: PPO for language models on one torchrun, split into an actor and a critic group."""

__version__ = "0.1.0"
