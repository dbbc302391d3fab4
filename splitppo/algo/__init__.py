"""PPO's formulas as pure functions on tensors, without models, configuration or other ranks.

Shapes: `B` rows, `N` packed tokens, `V` vocabulary. Tensors are packed: the tokens that the policy
sampled, one row after another, with the rows' `lengths`. Nothing is padded, since one row of 32k
tokens among a thousand short ones would need most of the memory. Log-probs, KL and entropy are in
nats. Wrong shapes raise ValueError; the configuration checks settings. A batch may be split into
parts, whose results combine exactly (`moments` / `merge_moments`, `aggregate_weight`).

Sources: PPO: Schulman et al. 2017 (arXiv:1707.06347). GAE: Schulman et al. 2016 (arXiv:1506.02438).
Dual clip: Ye et al. 2020 (arXiv:1912.09729). KL: Schulman, "Approximating KL divergence", 2020
(joschu.net/blog/kl-approx.html).
"""

from splitppo.algo.advantages import (
    KLKind,
    Moments,
    adapt_kl_coef,
    adaptive_lambda,
    all_moments,
    clamp_log_ratio,
    explained_variance,
    gae,
    kl_estimate,
    merge_moments,
    moments,
    rewards_to_go,
    token_rewards,
    turn_baseline,
    whiten,
)
from splitppo.algo.distillation import Divergence, buckets, divergence
from splitppo.algo.losses import (
    Aggregate,
    aggregate_loss,
    aggregate_weight,
    bounded_logits,
    bounded_value_loss,
    bounded_values,
    entropy,
    importance_weights,
    mean,
    policy_loss,
    value_loss,
)

__all__ = [
    "Aggregate",
    "Divergence",
    "KLKind",
    "Moments",
    "adapt_kl_coef",
    "adaptive_lambda",
    "aggregate_loss",
    "aggregate_weight",
    "all_moments",
    "bounded_logits",
    "bounded_value_loss",
    "bounded_values",
    "buckets",
    "clamp_log_ratio",
    "divergence",
    "entropy",
    "explained_variance",
    "gae",
    "importance_weights",
    "kl_estimate",
    "mean",
    "merge_moments",
    "moments",
    "policy_loss",
    "rewards_to_go",
    "token_rewards",
    "turn_baseline",
    "value_loss",
    "whiten",
]
