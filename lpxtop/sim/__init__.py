"""A simulated LLM server and GPU, for the demo and for tests with a known truth."""
