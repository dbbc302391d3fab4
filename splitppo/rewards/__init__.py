"""Rewards: one number a row, from functions of verl's signature.

A function is named in `reward.function`: a rule of `splitppo.rewards.rules`, `path/to/file.py:name`, or `auto`.
Workers import this package: it must stay light (no torch, no numpy).
"""
