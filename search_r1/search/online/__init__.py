"""Online search engines as a source of passages: Serper, SerpAPI, Google, Brave, Tavily."""

from search_r1.search.online.engine import OnlineSource, load_online
from search_r1.search.online.options import OnlineOptions
from search_r1.search.online.providers import PROVIDERS

__all__ = ["PROVIDERS", "OnlineOptions", "OnlineSource", "load_online"]
