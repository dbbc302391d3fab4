"""Rewards: a score per row, from functions with verl's signature or a learned reward model.

`reward.function` names a function: a rule of rules.py, `path/to/file.py:name`, or `auto`. Reward
workers import this package, so it imports neither torch nor numpy.
"""
