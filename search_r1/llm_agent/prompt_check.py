"""Check that a prompt file tells the policy to use the tags that the run's template parses.

A file made by this project names its template in the footer. In any other file, the text of the prompt shows it: it
names the tags that the policy should write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from search_r1.llm_agent.templates import FINGERPRINT_KEY, TEMPLATE_KEY, Template, load_template, shipped_templates
from verl.agent.environment import PromptProblem

_TAG = re.compile(r"</?([A-Za-z][A-Za-z0-9_-]*)>")


def prompt_problem(template: Template, metadata: Mapping[str, str], prompt: str) -> PromptProblem | None:
    """`template` is the run's; `metadata` is the file's, and `prompt` is the text of its first prompt.

    It is a contradiction if the prompt names some tags but not the template's search or answer tags, or a tag that only
    another shipped template has. Other wording with the same tags is not.
    """
    # Which tags the prompt names, and who else has them.
    in_prompt, in_template = _names(prompt), _names(template.text)
    known = in_template | set(template.grammar.names)
    of_shipped = {name: _names(load_template(name).text) for name in shipped_templates()}
    foreign = in_prompt - known
    source = metadata.get(TEMPLATE_KEY) or next((name for name, tags in of_shipped.items() if tags == in_prompt), None)
    its_own = f"agent.template={template.name} reads {_shown(known)}"
    # A prompt without any tag says nothing; with tags that disagree it is a contradiction, or at least suspicious.
    if not in_prompt & (known | set().union(*of_shipped.values())):
        return PromptProblem(f"the prompt names none of the tags; {its_own}", False) if in_template else None
    difference = f"the prompt names {_shown(in_prompt)}{f' as template {source}' if source else ''}, but {its_own}"
    missing = in_template - in_prompt
    if missing & {template.grammar.search, template.grammar.answer} or foreign & set().union(*of_shipped.values()):
        return PromptProblem(difference, True)
    if missing and foreign:
        return PromptProblem(difference, False)
    # The tags agree: what is left is a file that names a template with other words.
    made_with = metadata.get(FINGERPRINT_KEY)
    if made_with in (None, template.fingerprint):
        return None
    words = f"made with template {source} ({made_with}), but agent.template={template.name} ({template.fingerprint})"
    return PromptProblem(f"{words}: other words, the same tags", False)


def _names(text: str) -> set[str]:
    return set(_TAG.findall(text))


def _shown(names: Iterable[str]) -> str:
    return ", ".join(f"<{name}>" for name in sorted(names))
