"""Panels: pure functions from a view to lines, with a thin widget each."""
