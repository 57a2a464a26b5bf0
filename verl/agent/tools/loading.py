"""The tools of a run, from the list `agent.tools`, and those of one episode.

An entry is the name of a shipped tool ("calculator"), a dotted name ("my_tools.add"), or one of

    {"name": "search", "options": {"max_result_tokens": 512}}
    {"function": "my_tools.add", "options": {"description": "Adds.", "timeout_s": 5}}
    {"mcp": {"command": "uvx", "args": ["mcp-server-time"]}, "options": {"prefix": "time_"}}
    {"mcp": "http://127.0.0.1:9000/mcp"}

A dotted name is that of a function, a `Tool`, or a class derived from `Tool`, `ToolProvider` or `StatefulTools`.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Mapping, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any

from verl.agent.tools.definition import NAME, ArgumentChecker, Tool, ToolProvider, schema
from verl.agent.tools.function import FunctionTool, StatefulTools, Stuck, tool_from_function
from verl.errors import ConfigError, VerlError
from verl.process.by_name import dotted_name, in_words, load_by_name
from verl.process.event_loop import run_to_end
from verl.process.secrets import mask_secrets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config
    from verl.protocol import Prompt

SHIPPED = {
    "calculator": "search_r1.tools.calculator.Calculator",
    "get_document": "search_r1.tools.open_page.GetDocument",
    "mcp": "search_r1.tools.mcp_server.McpServer",
    "open_page": "search_r1.tools.open_page.OpenPage",
    "search": "search_r1.tools.search.SearchTool",
}
"""Dotted names of the tools that have a short name."""

_KEYS = ("name", "function", "mcp")
_LIMITS = ("timeout_s", "max_result_tokens")
_OF_FUNCTIONS = ("name", "description", *_LIMITS)


class OpenTools:
    """The tools of one episode, with the state of those that have one.

    `num_calls`: the calls of the episode so far; set it for an episode that is resumed.
    """

    def __init__(self, tools: Mapping[str, Tool], checkers: Mapping[str, ArgumentChecker]) -> None:
        self._tools, self._checkers = tools, checkers
        self._states: list[StatefulTools] = []
        self.num_calls = 0

    def add_state(self, state: StatefulTools) -> None:
        """Close `state` with the tools."""
        self._states.append(state)

    @property
    def names(self) -> list[str]:
        """The names of the tools, in the order of the config."""
        return list(self._tools)

    def get(self, name: str) -> Tool | None:
        """The tool of this name, if there is one."""
        return self._tools.get(name)

    def problems(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What is wrong with arguments for the tool, in words; "" if nothing is."""
        return self._checkers[name].problems(arguments)

    async def close(self) -> None:
        """Close the states, each once. Raises as `close_all`."""
        await close_all(self._states)


class ToolSet:
    """The tools of a run, in the order of `agent.tools`."""

    def __init__(
        self,
        tools: Sequence[Tool],
        providers: Sequence[ToolProvider] = (),
        states: Mapping[type[StatefulTools], Mapping[str, Any]] | None = None,
    ) -> None:
        """`tools` include those of the providers and of the classes in `states`, which have their keyword arguments.

        Raises `ConfigError` if a name or a schema cannot be used, or two tools have one name.
        """
        self.tools = tuple(tools)
        self._providers, self._states = tuple(providers), dict(states or {})
        self._checkers: dict[str, ArgumentChecker] = {}
        # The policy calls a tool by its name, and knows of it what its description and schema say.
        for one in self.tools:
            if not (isinstance(one.name, str) and NAME.fullmatch(one.name)):
                raise ConfigError(
                    f"agent.tools: a tool has the name {one.name!r}; chat formats take 1 to 64 letters, digits, _ and "
                    '-: give another with {"function": ..., "options": {"name": ...}}'
                )
            if one.name in self._checkers:
                raise ConfigError(
                    f"agent.tools: two tools have the name {one.name!r}; leave one out, or rename it: "
                    '{"function": ..., "options": {"name": ...}}, {"mcp": ..., "options": {"prefix": ...}}'
                )
            where = f"agent.tools: tool {one.name}"
            if not (isinstance(one.description, str) and one.description.strip()):
                raise ConfigError(f"{where} has no description; say what it does, for the policy to read")
            if not inspect.iscoroutinefunction(one.call):
                raise ConfigError(f"{where}: call is a plain function; write `async def call(self, arguments)`")
            self._checkers[one.name] = ArgumentChecker(one.parameters, where)

    @property
    def has_state(self) -> bool:
        """Whether an episode keeps something between its turns."""
        return bool(self._states)

    def schemas(self) -> list[dict[str, Any]]:
        """What a chat template reads: see `schema`."""
        return [schema(one) for one in self.tools]

    async def open(self, prompt: Prompt) -> OpenTools:
        """The tools of a new episode. Raises `ConfigError` if a class of the user cannot be made."""
        bound: dict[str, Tool] = {one.name: one for one in self.tools}
        opened = OpenTools(bound, self._checkers)
        for kind, arguments in self._states.items():
            try:
                state = kind(prompt, **arguments)
            except Exception as error:
                await opened.close()
                if isinstance(error, VerlError):
                    raise
                raise ConfigError(f"agent.tools: {dotted_name(kind)} cannot be made: {in_words(error)}") from error
            opened.add_state(state)
            # The tools of one state replace those of the run, and count together the calls that hang in it.
            stuck = Stuck()
            for one in self.tools:
                if isinstance(one, FunctionTool) and one.owner is kind:
                    bound[one.name] = one.bound_to(state, stuck)
        return opened

    async def check(self) -> None:
        """Raise `EnvironmentUnavailable` if what is behind a tool cannot be reached."""
        parts: list[Tool | ToolProvider] = [*self.tools, *self._providers]
        for one in parts:
            await one.check()

    async def close(self) -> None:
        """Release the resources of all tools. Raises as `close_all`."""
        await close_all([*self.tools, *self._providers])


async def close_all(parts: MutableSequence[Any]) -> None:
    """Take tools, providers or states off the list and close them, last ones first, even if closing one fails. Raises
    the first error.
    """
    errors = []
    while parts:
        try:
            await parts.pop().close()
        except Exception as error:  # of somebody else's class
            errors.append(error)
    if errors:
        raise errors[0]


def load_tools(
    specs: Sequence[Any], config: Config | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> ToolSet:
    """The tools that the entries of `agent.tools` name. Servers are started and asked for their tools.

    Raises `ConfigError`, which says which entry is wrong and what to do, and `EnvironmentUnavailable` if a server does
    not start.
    """
    tools: list[Tool] = []
    providers: list[ToolProvider] = []
    states: dict[type[StatefulTools], Mapping[str, Any]] = {}
    if isinstance(specs, str | Mapping) or not isinstance(specs, Sequence):
        raise ConfigError(f"agent.tools is a {type(specs).__name__}; make it a list: [calculator, my_tools.add]")
    try:
        for number, spec in enumerate(specs):
            key = f"agent.tools[{number}]"
            name, options = _read_spec(spec, key)
            found = load_by_name(name, key)
            # A class of which each episode gets an object.
            if isinstance(found, type) and issubclass(found, StatefulTools):
                if found in states:
                    raise ConfigError(f"{key}: {name} is there twice; leave one out")
                limits = {one: options.pop(one) for one in _LIMITS if one in options}
                _check_options(found, options, f"{key}: {name}")
                states[found] = options
                tools += [_limited(one, limits) for one in found.declared()]
                continue
            # Tools that all episodes share.
            made = _make(found, name, options, key, config, tokenizer)
            if isinstance(made, ToolProvider):
                providers.append(made)
                tools += made.tools
            else:
                tools.append(made)
        return ToolSet(tools, providers, states)
    except BaseException:
        for provider in providers:  # it may have started a process
            run_to_end(provider.close())
        raise


def uses_retriever(config: Config) -> bool:
    """Whether a run may ask its retriever: not without `do_search`, nor if its chat model has other tools only. An
    environment of the user's own may.

    Raises `ConfigError` for an entry of `agent.tools` that is wrong.
    """
    agent = config.agent
    own_environment = agent.environment != type(agent).environment
    return config.do_search and (agent.format != "chat" or own_environment or need_retriever(agent.tools))


def need_retriever(specs: Sequence[Any]) -> bool:
    """Whether one of the tools that the entries of `agent.tools` name asks the retriever of the run. None is made.

    Raises `ConfigError` for an entry that is wrong.
    """
    keys = [f"agent.tools[{number}]" for number in range(len(specs))]
    return any(
        getattr(load_by_name(_read_spec(spec, key)[0], key), "needs_retriever", False)
        for spec, key in zip(specs, keys, strict=True)
    )


def _read_spec(spec: Any, key: str) -> tuple[str, dict[str, Any]]:
    """The dotted name and the options of an entry."""
    # An entry is a name, or a mapping with exactly one of the known keys, and options.
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{key} is {spec!r}; write a name, or {{name: ..., options: {{...}}}}")
    unknown = set(spec) - {*_KEYS, "options"}
    given = [one for one in _KEYS if spec.get(one) is not None]
    if unknown or len(given) != 1:
        what = f"the unknown key {sorted(map(str, unknown))[0]!r}" if unknown else f"the keys {given}"
        raise ConfigError(f"{key} has {what}; write one of {', '.join(_KEYS)}, and options if you like")
    (kind,), options = given, spec.get("options") or {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"{key}.options is {options!r}; write {{option: value}}")
    if kind == "mcp":
        return SHIPPED["mcp"], {**options, "server": spec["mcp"]}
    # A name without a dot is that of a shipped tool.
    name = spec[kind]
    if not isinstance(name, str):
        raise ConfigError(f"{key}.{kind} is {name!r}; write a name")
    if "." not in name:
        if name not in SHIPPED or kind == "function":
            near = difflib.get_close_matches(name, SHIPPED, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(
                f"{key}: there is no tool {name!r}{meant}; the shipped ones are {', '.join(SHIPPED)}, and your own has "
                "a dotted name: module.function"
            )
        name = SHIPPED[name]
    return name, dict(options)


def _make(
    found: Any,
    name: str,
    options: dict[str, Any],
    key: str,
    config: Config | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Tool | ToolProvider:
    """The tool of an entry, or the provider of several."""
    if isinstance(found, Tool):
        _check_known(options, _LIMITS, f"{key}: {name}")
        return _limited(found, options)
    # A class is made with the options, except for the limits of a call, which any tool has.
    if isinstance(found, type) and issubclass(found, Tool | ToolProvider):
        if inspect.isabstract(found):
            raise ConfigError(f"{key}: {name} lacks {', '.join(sorted(found.__abstractmethods__))}; write it")
        is_tool = issubclass(found, Tool)
        limits = {one: options.pop(one) for one in _LIMITS if is_tool and one in options}
        try:
            made = found.from_config(config, tokenizer, **options)
        except VerlError as error:
            raise type(error)(f"{key}: {error}") from error
        except Exception as error:
            raise ConfigError(
                f"{key}: {name} cannot be made with the options {mask_secrets(options)}: {in_words(error)}"
            ) from error
        if isinstance(made, ToolProvider):
            return made
        if not isinstance(made, Tool):
            raise ConfigError(f"{key}: from_config of {name} gave a {type(made).__name__}; return a Tool")
        return _limited(made, limits)
    # A function becomes a tool by its name, docstring and type hints.
    if callable(found) and not isinstance(found, type):
        _check_known(options, _OF_FUNCTIONS, f"{key}: {name}")
        try:
            return _limited(tool_from_function(found, **options), {})
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
    raise ConfigError(
        f"{key}: {name} is a {type(found).__name__} and no tool; name a function, or a class derived from Tool, "
        "ToolProvider or StatefulTools (of verl.agent.tools)"
    )


def _limited(made: Tool, limits: Mapping[str, Any]) -> Tool:
    """The tool with other limits. A `max_result_tokens` of null is what the tool has by itself."""
    made = copy.copy(made) if limits else made
    for name, value in limits.items():
        if (name, value) != ("max_result_tokens", None):
            setattr(made, name, value)
    for name in _LIMITS:
        value = getattr(made, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ConfigError(f"agent.tools: tool {made.name}: {name} is {value!r}; make it more than 0, or null")
    return made


def _check_known(options: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(str(option), known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"{where} has no option {option!r}{meant}; there are {', '.join(known)}")


def _check_options(kind: type, options: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` unless the class takes these keyword arguments after the prompt."""
    try:
        inspect.signature(kind).bind(None, **options)
    except TypeError as error:
        raise ConfigError(f"{where} cannot be made with the options {mask_secrets(options)}: {error}") from error
