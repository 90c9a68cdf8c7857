"""The load process: everything that sends requests and stamps what comes back. Never imports a UI."""
