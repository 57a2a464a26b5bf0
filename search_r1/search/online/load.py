"""Load an online engine by name."""

from __future__ import annotations

from search_r1.errors import OnlineError
from search_r1.http.api_key import read_key
from search_r1.search.online.engine import OnlineSource
from search_r1.search.online.options import OnlineOptions
from search_r1.search.online.providers import PROVIDERS, Provider


def load_online(name: str, options: OnlineOptions | None = None) -> OnlineSource:
    """The engine `name` (a key of `PROVIDERS`), ready to search; no request is sent yet.

    Raises `OnlineError` for an unknown name, a wrong setting, a missing API key (`replay` needs none) or a response
    cache that cannot be used.
    """
    options = options or OnlineOptions()
    if name not in PROVIDERS:
        raise OnlineError(f"there is no online engine {name!r}; choose one of {', '.join(PROVIDERS)}")
    provider = PROVIDERS[name]
    options.check()
    _check_fields(provider, options)
    key = None
    if options.cache_mode != "replay":
        key = read_key(provider.key_variable, options.api_key_file)
    return OnlineSource(provider, options, key)


def _check_fields(provider: Provider, options: OnlineOptions) -> None:
    missing = [name for name in provider.needs if not options.fields.get(name)]
    if missing:
        raise OnlineError(f"{provider.name} needs the request field {missing[0]!r}")
    if {"api_key", provider.key_name} & set(options.fields):
        raise OnlineError(f"the API key must not be in the request fields; set {provider.key_variable} instead")
