"""The one exception that is the user's to mend: it is shown as a line, without a traceback."""


class UserError(Exception):
    """Wrong input: its message says the value, the rule and the remedy."""
