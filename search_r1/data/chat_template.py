"""A chat template for small models that are to call tools and whose own template has none.

It is ChatML with Hermes calls. Of a tool it writes the name and the names of the parameters, so a prompt has some 100
tokens:

    search(query, queries)
"""

CHAT_TEMPLATE = (
    "{%- if tools or messages[0].role == 'system' %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for tool in tools or [] %}{{ '\n' }}{{ tool.function.name }}("
    "{{ tool.function.parameters.properties | join(', ') }}){% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
