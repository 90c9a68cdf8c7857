"""lpxtop: load an LLM inference endpoint, see what its users feel and what the node does, record it, replay it."""

__version__ = "0.1.0"
