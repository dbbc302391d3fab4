"""Rewards: a score per row, from functions with verl's signature or a learned reward model.

`reward.function` names a function: a rule of rules.py, `path/to/file.py:name`, or `auto`. Reward workers import this
package, so it imports neither torch nor numpy.
"""

from splitppo.rewards.functions import Failure, check_prompts, check_rewards
from splitppo.rewards.scorer import Pending, Scored, Scorer, failure_line

__all__ = ["Failure", "Pending", "Scored", "Scorer", "check_prompts", "check_rewards", "failure_line"]
