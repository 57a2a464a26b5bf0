"""One real query through the environment that the run names."""

from __future__ import annotations

from typing import Any

from verl.agent.environment import InspectedEnvironment
from verl.errors import VerlError
from verl.event_loop import run_to_end
from verl.trainer.preflight.finding import Finding

QUERY = "capital of France"


def check_environment(environment: Any, query: str = QUERY) -> Finding:
    """Closes the environment."""
    return run_to_end(_check(environment, query))


async def _check(environment: Any, query: str) -> Finding:
    try:
        await environment.check()
        found = await environment.probe(query) if isinstance(environment, InspectedEnvironment) else "answers"
    except VerlError as error:
        return Finding("FAIL", "environment", str(error))
    finally:
        await environment.close()
    return Finding("ok", "environment", found)
