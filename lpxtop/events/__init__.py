"""The event stream: records, their JSON lines, sources and sinks, and the commands that go the other way."""
