"""Commands beside the trainer; nothing in the trainer imports them."""
