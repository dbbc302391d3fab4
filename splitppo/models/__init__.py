"""Policy, value and reward models on the ranks of a group. Import from the files; nothing is loaded
here."""
