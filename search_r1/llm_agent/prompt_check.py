"""Whether a prompt file tells the policy the tags that the template of a run reads.

A file made by this project says in its footer which template it was made with. Any other file says it by its text: a
prompt names the tags that the policy is to write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from search_r1.llm_agent.templates import FINGERPRINT_KEY, TEMPLATE_KEY, Template, load_template, shipped_templates
from verl.agent.environment import PromptProblem

_TAG = re.compile(r"</?([A-Za-z][A-Za-z0-9_-]*)>")


def prompt_problem(template: Template, metadata: Mapping[str, str], prompt: str) -> PromptProblem | None:
    """`template` is that of the run; `metadata` are the file's own, and `prompt` is the text of its first one.

    Contradictions: the prompt names some tags but not those of a search or an answer that the template asks for, or it
    names a tag that only another shipped template has. Different words for the same tags are none.
    """
    in_prompt, in_template = _names(prompt), _names(template.text)
    known = in_template | set(template.grammar.names)
    of_shipped = {name: _names(load_template(name).text) for name in shipped_templates()}
    foreign = in_prompt - known
    source = metadata.get(TEMPLATE_KEY) or next((name for name, tags in of_shipped.items() if tags == in_prompt), None)
    its_own = f"agent.template={template.name} reads {_shown(known)}"
    if not in_prompt & (known | set().union(*of_shipped.values())):
        return PromptProblem(f"the prompt names none of the tags; {its_own}", False) if in_template else None
    difference = f"the prompt names {_shown(in_prompt)}{f' as template {source}' if source else ''}, but {its_own}"
    missing = in_template - in_prompt
    if missing & {template.grammar.search, template.grammar.answer} or foreign & set().union(*of_shipped.values()):
        return PromptProblem(difference, True)
    if missing and foreign:
        return PromptProblem(difference, False)
    made_with = metadata.get(FINGERPRINT_KEY)
    if made_with in (None, template.fingerprint):
        return None
    words = f"made with template {source} ({made_with}), but agent.template={template.name} ({template.fingerprint})"
    return PromptProblem(f"{words}: other words, the same tags", False)


def _names(text: str) -> set[str]:
    return set(_TAG.findall(text))


def _shown(names: Iterable[str]) -> str:
    return ", ".join(f"<{name}>" for name in sorted(names))
