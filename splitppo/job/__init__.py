"""What torchrun started: the ranks, the store, the process groups, failures and signals."""
