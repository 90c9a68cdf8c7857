"""The screen. The only package that imports Textual."""
