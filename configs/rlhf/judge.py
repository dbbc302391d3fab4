"""What the people meant who labelled the texts of prepare_digits.py. It judges held-out rows; the
policy never learns from it."""


def thrice(solution_str, prompt, **row):
    """Whether the answer says the prompt's first digit three times, and nothing else."""
    return solution_str == 3 * prompt[0]
