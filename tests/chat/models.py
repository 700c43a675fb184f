"""Models to talk to, without weights: a tokenizer that really encodes, and the kinds of templates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from engine_service.backends.base import InvalidPicture, ModelInfo, Picture

CONTROL: Final = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]")

SMOLLM2: Final = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The embedded model's own."""

WITH_TOOLS: Final = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') -%}
<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Like Qwen's and Hermes': the template itself writes tools and calls."""

LLAMA_3: Final = """\
{{- bos_token }}{% for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("only single tool-calls") }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if tools and message.role == 'user' and loop.first %}{{ tools | tojson }}
{% endif %}{{ message.content }}<|eot_id|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
"""Like Llama 3.1's: a call is an object with parameters."""

MISTRAL: Final = """\
{{- bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids must have length 9") }}{% endif %}
{{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.tool_call_id }}: {{ message.content }}
{%- else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""
"""Like Mistral's: a list of calls, and ids of nine characters."""

OWN_WAY: Final = """\
{%- for tool in tools or [] %}<start_function_declaration>{{ tool.function.name }}{% endfor %}
{%- for message in messages %}<start_of_turn>{{ message.role }}
{{ message.content }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
"""Like the newer of Gemma's: knows tools, and has calls written in a way of its own."""

STRICT: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)
"""Like Gemma's and Mistral's: no system, strictly alternating roles."""

THINKS: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.first and enable_thinking is defined and not enable_thinking %}/no_think\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Like SmolLM3's, which tells the model at the beginning, and Qwen3's, which thinks for it in no words."""

THINKS_IF_TOLD: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if thinking %}Think first.\n{% endif %}"
)
"""Like Granite's: its switch has another name, and is off."""


class ByteTokenizer:
    """One token per byte, 256 and up for control tokens."""

    _control = re.compile("|".join(re.escape(spelling) for spelling in CONTROL))

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the ids."""
        if not parse_special:
            return list(text.encode())
        ids, end = [], 0
        for found in self._control.finditer(text):
            ids += list(text[end : found.start()].encode())
            ids.append(256 + CONTROL.index(found.group()))
            end = found.end()
        return ids + list(text[end:].encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text."""
        parts = [CONTROL[i - 256].encode() if i >= 256 else bytes([i]) for i in token_ids]
        return b"".join(parts).decode("utf-8", "replace")


def model(template: str = SMOLLM2) -> ModelInfo:
    """A model with this template."""
    return ModelInfo(
        name="test",
        architecture="none",
        max_context_tokens=4096,
        vocab_size=256 + len(CONTROL),
        chat_template=template,
        bos_text="<s>",
        eos_text="</s>",
    )


class CountingEye:
    """Takes a file for pixels: as many tokens as it has bytes; a question mark cannot be read."""

    placeholder_id = 0

    def look(self, file: bytes) -> Picture:
        """Return the picture."""
        if file == b"?":
            raise InvalidPicture("it is damaged")
        return Picture(num_tokens=len(file), width=1, height=len(file), pixels=file * 3, digest=file)
