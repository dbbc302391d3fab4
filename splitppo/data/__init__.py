"""The prompts of a run: read from files or generated, tokenised, and the order in which steps use
them."""

from splitppo.data.files import read_lengths
from splitppo.data.prompts import PromptSet, Split, check_files, load_prompts, prompt_index

__all__ = ["PromptSet", "Split", "check_files", "load_prompts", "prompt_index", "read_lengths"]
