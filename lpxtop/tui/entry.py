"""A line to type in, or a yes-or-no question, in the slider's row. Bad text stays, with the reason beside it."""

from collections.abc import Callable

from rich.cells import cell_len
from textual import events
from textual.strip import Strip
from textual.widget import Widget

from lpxtop import format
from lpxtop.tui.paint import Paint
from lpxtop.tui.rows import fit, line

Submit = Callable[[str], str]
_YES = ("y", "enter")


class Entry(Widget):
    """Open with `ask` or `question`; `done` is called when it closes. `submit` returns why a text is refused, or ""."""

    DEFAULT_CSS = "Entry { position: absolute; width: 1; height: 1; display: none; }"

    def __init__(self, paint: Callable[[], Paint], done: Callable[[], None]) -> None:
        super().__init__(id="entry")
        self._paint, self._done = paint, done
        self._prompt = self._hint = self._text = ""
        self._cursor = 0
        self._submit: Submit | None = None
        self._yes: Callable[[], None] | None = None
        self._also_yes = ""

    def ask(self, prompt: str, text: str, hint: str, submit: Submit) -> None:
        """Ask for a text."""
        self._submit, self._yes = submit, None
        self._open(prompt, text, hint)

    def question(self, text: str, yes: Callable[[], None], also: str = "") -> None:
        """Ask yes or no; the key `also` means yes too. Anything but yes is no."""
        self._submit, self._yes, self._also_yes = None, yes, also
        self._open(text, "", "")

    def _open(self, prompt: str, text: str, hint: str) -> None:
        self._prompt, self._text, self._hint, self._cursor = prompt, text, hint, len(text)
        self.display = True
        self.refresh()

    def _close(self) -> None:
        self.display = False
        self._done()

    def key(self, event: events.Key) -> None:
        """Take a key. The application hands over every key while the entry is open: with focus instead, keys typed
        faster than it moves would overtake one another."""
        if self._yes is not None:
            self._answer(event.key)
        elif event.key == "enter":
            self._try()
        elif event.key in ("escape", "ctrl+g"):
            self._close()
        else:
            self._edit(event)
        self.refresh()

    def paste(self, text: str) -> None:
        """Take pasted text; an answer to a question is never pasted."""
        if self._submit is not None:
            self._insert(format.clean(text))
            self.refresh()

    def _answer(self, key: str) -> None:
        yes = self._yes
        self._close()
        if yes is not None and (key in _YES or (self._also_yes and key == self._also_yes)):
            yes()

    def _try(self) -> None:
        assert self._submit is not None
        refused = self._submit(self._text)
        if refused:
            self._hint = refused
        else:
            self._close()

    def _edit(self, event: events.Key) -> None:
        before, after = self._text[: self._cursor], self._text[self._cursor :]
        match event.key:
            case "backspace" | "ctrl+h":
                self._text, self._cursor = before[:-1] + after, max(0, self._cursor - 1)
            case "delete":
                self._text = before + after[1:]
            case "left":
                self._cursor = max(0, self._cursor - 1)
            case "right":
                self._cursor = min(len(self._text), self._cursor + 1)
            case "home":
                self._cursor = 0
            case "end":
                self._cursor = len(self._text)
            case "ctrl+u":
                self._text, self._cursor = after, 0
            case _ if event.is_printable and event.character:
                self._insert(event.character)

    def _insert(self, text: str) -> None:
        self._text = self._text[: self._cursor] + text + self._text[self._cursor :]
        self._cursor += len(text)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        style = "warn" if self._yes is not None else "label"
        row = line((f" {self._prompt} ", style))
        if self._submit is not None:
            shown, cursor = self._visible(max(4, width // 3))
            row += line(
                (shown[:cursor], "entry"), ((shown[cursor:] or " ")[0], "cursor"), (shown[cursor + 1 :], "entry")
            )
            row += line(("  " + self._hint, "label"))
        return self._paint().strip(fit(row, width), width)

    def _visible(self, cells: int) -> tuple[str, int]:
        """The part of the text around the cursor that fits, and the cursor's place in it."""
        start = 0
        while cell_len(self._text[start : self._cursor]) > cells:
            start += 1
        return self._text[start : start + cells], self._cursor - start
