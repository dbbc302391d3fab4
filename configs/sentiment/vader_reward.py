"""VADER (Hutto and Gilbert 2014), a sentiment rule of words and their weights, as a judge that no
reward model was.

pip install vaderSentiment==3.3.2 (MIT)
"""

import functools
import importlib
import importlib.util
from typing import Any

from splitppo.errors import UserError

# At the import, so that a run finds it before training: a failure of the function itself counts as
# a bad score.
if importlib.util.find_spec("vaderSentiment") is None:
    raise UserError("vaderSentiment is not installed; run: pip install vaderSentiment==3.3.2")


@functools.cache  # reads its lexicon
def _analyzer() -> Any:
    return importlib.import_module("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer()


def vader(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """VADER's compound sentiment of the response, from its [-1, 1] to [0, 1]; 0.5 is neutral, also
    for no words."""
    return (_analyzer().polarity_scores(solution_str)["compound"] + 1) / 2
