"""Policy, value and reward models: built, sharded, filled, run."""
