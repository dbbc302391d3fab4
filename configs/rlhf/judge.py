"""What the people meant who labelled the texts of prepare_digits.py. The policy never learns it: it
judges held-out rows."""


def ascending(solution_str, prompt, **row):
    """Whether the answer has the prompt's digits in ascending order, and nothing else."""
    return solution_str == "".join(sorted(prompt.strip("=")))
