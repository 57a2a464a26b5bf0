"""The main module of a process of vLLM. Run, it imports this package, with its settings for libraries, before vLLM."""
