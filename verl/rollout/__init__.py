"""Sampling: vLLM engines, the workers that own them, and the manager that deals out episodes."""

from verl.process.startup import before_libraries

before_libraries()  # vLLM reads its settings when it is imported
