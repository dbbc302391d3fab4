"""Rewards of the tasks of critic_block.py."""

import re

REACH = 5  # a digit that is so far off, and all behind it, are worth nothing


def written(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict:
    """Digit by digit, each paid where it stands: the answer's share of it, times how near it and
    all digits before it are (1 less the distance by REACH). So an error costs what is behind it,
    too, and the text so far tells how much is left. What is written too much costs a share each."""
    share = 1 / len(ground_truth)
    left = 1.0
    spans = []
    for end, character in enumerate(solution_str, 1):
        if end > len(ground_truth):
            spans.append((end, -share))
            continue
        off = abs(int(character) - int(ground_truth[end - 1])) if character in "0123456789" else 9
        left *= max(0.0, 1 - off / REACH)
        spans.append((end, share * left))
    return {"score": sum(paid for _, paid in spans), "spans": spans}


def answer(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    """Numbers: the first line's last one. Texts: how the first line ends, without regard to case
    and marks."""
    line = solution_str.strip().partition("\n")[0]
    if re.fullmatch(r"-?\d+", ground_truth):
        return float(re.findall(r"-?\d+", line)[-1:] == [ground_truth])
    words, truth = (re.findall(r"\w+", text.casefold()) for text in (line, ground_truth))
    return float(bool(truth) and words[-len(truth) :] == truth)
