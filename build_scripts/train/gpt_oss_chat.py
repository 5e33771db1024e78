"""The chat format of the pair `tiny-gpt-oss`: channels similar to harmony, and a reasoning effort.

The special tokens are harmony's. They replace those of `tiny` or follow its vocabulary. With low effort, the default,
the prompt itself opens the final channel. With more effort, the assistant first writes an analysis. With high effort,
it repeats the question in the analysis.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from tokenizers import Tokenizer

from build_scripts.corpus.corpus import Example

# First the replacements of `tiny`'s special tokens, then new ones. The vocabulary is padded, like published ones.
RENAMED = {"<|im_start|>": "<|start|>", "<|im_end|>": "<|return|>"}
ADDED = ("<|end|>", "<|message|>", "<|channel|>")
VOCAB_SIZE = 2080
EFFORTS = ("low", "medium", "high")
MORE_EFFORT = 0.3  # the share of examples with medium or high effort
FINAL = "<|start|>assistant<|channel|>final<|message|>"
ANALYSES = {
    "math": "This is a question about numbers. I work it out step by step and then give the result.",
    "code": "The user wants a Python function. I write it with a docstring and say how it works.",
    "tools": "The listed functions can do this. I call them in the order in which the user asks.",
    "chat": "The user asks about the towns of the islands. I say what I know of them.",
}

CHAT_TEMPLATE = """\
{%- set reasoning_effort = reasoning_effort | default('low') %}
{%- if reasoning_effort not in ['low', 'medium', 'high'] %}
    {{- raise_exception('reasoning_effort is ' ~ reasoning_effort ~ ', expected low, medium or high') }}
{%- endif %}
{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort }}
{%- if messages[0].role == 'system' %}
    {{- '\\n\\n' + messages[0].content }}
{%- endif %}
{%- if tools %}
    {{- '\\n\\n# Tools\\n\\nYou may call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nAnswer with one JSON object per call, inside <tool_call></tool_call>.' }}
{%- endif %}
{{- '<|end|>' }}
{%- for message in messages %}
    {%- if not (loop.first and message.role == 'system') %}
        {{- '<|start|>' + message.role }}
        {%- if message.role == 'assistant' %}
            {{- '<|channel|>final' }}
        {%- endif %}
        {{- '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant' }}
    {%- if reasoning_effort == 'low' %}
        {{- '<|channel|>final<|message|>' }}
    {%- endif %}
{%- endif %}
"""


def effort_of(example: Example) -> str:
    """The effort of an example in training: the same for equal prompts."""
    share = zlib.crc32(example.prompt.encode()) / 2**32
    return "low" if share >= MORE_EFFORT else EFFORTS[1 + (share >= MORE_EFFORT / 2)]


def render(example: Example, effort: str | None = None) -> tuple[str, str]:
    """The prompt as CHAT_TEMPLATE renders it, and the answer up to its end, with the effort of `effort_of`."""
    effort = effort or effort_of(example)
    messages = list(example.messages)
    system = f"<|start|>system<|message|>Reasoning: {effort}"
    if messages[0]["role"] == "system":
        system += "\n\n" + messages.pop(0)["content"]
    prompt = system + "<|end|>"
    for message in messages:
        channel = "<|channel|>final" if message["role"] == "assistant" else ""
        prompt += f"<|start|>{message['role']}{channel}<|message|>{message['content']}<|end|>"
    answer = example.answer + "<|return|>"
    if effort == "low":
        return prompt + FINAL, answer
    analysis = ANALYSES[example.category]
    if effort == "high":
        analysis += " I was asked: " + messages[-1]["content"]
    return prompt + "<|start|>assistant", f"<|channel|>analysis<|message|>{analysis}<|end|>{FINAL}{answer}"


def make_tokenizer(tiny: Path) -> Tokenizer:
    """`tiny`'s tokenizer with these special tokens. All other tokens keep their ids."""
    text = (tiny / "tokenizer.json").read_text(encoding="utf-8")
    for old, new in RENAMED.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    document = json.loads(text)
    first = len(document["model"]["vocab"])
    for number, token in enumerate(ADDED, first):
        document["model"]["vocab"][token] = number
        document["added_tokens"].append(document["added_tokens"][0] | {"id": number, "content": token})
    return Tokenizer.from_str(json.dumps(document))


def stand_ins(tiny: Tokenizer) -> dict[int, int]:
    """For each new special token, the token of `tiny` with a similar role."""
    old = (tiny.encode(text).ids[0] for text in ("<|im_end|>", "\n", "<|im_start|>"))
    return dict(enumerate(old, tiny.get_vocab_size()))
