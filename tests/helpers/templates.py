"""Chat templates of several kinds, and a tokenizer that merges over their turns."""

import random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from splitppo.models.tiny import EOS, PAD

# In the manner of ChatML, Llama 3, Qwen 3, Gemma and Mistral: which roles they know, what they
# trim, what stands behind the end of a turn, where the tools are said.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% if tools %}<|header|>system<|/header|>\n\nTools: {{ tools | tojson }}<|eot|>"
    "{% endif %}{% for m in messages %}<|header|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|/header|>\n\n{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
    "{{ {'name': c.function.name, 'parameters': c.function.arguments} | tojson }}{% endfor %}"
    "<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
QWEN = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endfor %}{% set ns.last = messages | length - 1 %}"
    "{% for m in messages | reverse if m.role == 'user' and not ns.found %}"
    "{% set ns.found = true %}{% set ns.last = messages | length - 1 - messages[::-1].index(m) %}"
    "{% endfor %}"
    "{% for m in messages %}{% set i = loop.index0 %}"
    "{% if m.role == 'tool' %}"
    "{% if i == 0 or messages[i - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[i + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.tool_calls %}<|im_start|>assistant\n{% for c in m.tool_calls %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>\n"
    "{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'assistant' and '</think>' in m.content and i < ns.last %}"
    "<|im_start|>assistant\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>"
    "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}"
    "{% endif %}{% endfor %}"
)
# name -> (template, what ends a turn, roles that an environment may answer in)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>", ("user", "tool", "system")),
    "llama": (LLAMA, "<|eot|>", ("user", "tool")),
    "qwen": (QWEN, "<|im_end|>", ("tool",)),
    "gemma": (GEMMA, "<end_of_turn>", ("user",)),
    "mistral": (MISTRAL, "</s>", ("user", "tool")),
}
WORDS = [
    "ab", "a", "b", "<", ">", "\n", "im", "_", "end", "of", "turn", "[", "INST", "/", "]", "9", " ",
]  # fmt: skip


def tokenizer_of(template: str | None, end: str) -> Any:
    """Byte pairs that merge over everything but the token that ends a turn: the other marks of the
    templates are text."""
    draw = random.Random(0)
    texts = ["".join(draw.choices(WORDS, k=60)) for _ in range(300)]
    texts += ["<|im_start|>assistant\n", "<|im_start|>user\nab", "\n<|im_start|>", "[/INST] a"] * 50
    backend = Tokenizer(BPE())
    letters = [chr(i) for i in range(32, 127)] + ["\n"]
    trainer = BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=letters)
    backend.train_from_iterator(texts, trainer)
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=AddedToken(end, special=True),
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_of_bytes(template: str | None) -> Any:
    """One token for each byte, so for every text."""
    ids = {token: i for i, token in enumerate((PAD, EOS, *sorted(ByteLevel.alphabet())))}
    backend = Tokenizer(BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS)
    tokenizer.chat_template = template
    return tokenizer
