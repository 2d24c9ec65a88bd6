"""The view in a terminal, the only importer of textual; it draws the last frame, at most twice a second.

Text from a server is a `Text`, never markup, and already harmless to a terminal.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static
from textual.widgets.data_table import RowKey

from diag.core.errors import DiagError
from diag.core.formatting import escaped, printable
from diag.http.client import run_in_thread
from diag.report.layout import WIDTH, shortened
from diag.report.terminal import laid_out, styled
from diag.top.frame import Feed, Frame, ServerRow
from diag.top.texts import ORDERS, View, page, shown_columns, shown_rows, summary

Answer = TypeVar("Answer")
LOOK_EVERY = 0.5
"""Seconds between two looks at the last frame; a key repaints at once."""
VERDICT_STYLES = {
    "critical": "bold red",
    "warning": "bold yellow",
    "unknown": "magenta",
    "gone": "magenta",
    "unproven": "blue",
}
"""The style of a row by its verdict; a healthy one has none."""
TABLE_ACTIONS = ("sort", "filter", "gpus", "all")
MARGIN = 3
"""Columns beside a page: its padding and the scrollbar."""


class ServerTable(DataTable[Text]):
    """The servers in their order; the cursor stays on its server, or at the top, where the worst one is."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(cursor_type="row", header_height=2, zebra_stripes=False)
        self.rows_shown: list[ServerRow] = []
        self._heading: Sequence[tuple[str, int, bool]] = ()
        self._keys: list[RowKey] = []

    @property
    def selected(self) -> ServerRow | None:
        return self.rows_shown[self.cursor_row] if self.cursor_row < len(self.rows_shown) else None

    def show(self, rows: list[ServerRow], every: Sequence[ServerRow], view: View) -> None:
        """Show these rows of all; only cells that changed are drawn again."""
        before = self.selected if self.cursor_row else None
        name_width, columns = shown_columns(self.app.size.width - 1, [row.instance for row in every], view)

        heading = [("server", name_width, False), *((column.title, column.width, column.right) for column in columns)]
        if heading != self._heading:
            self.clear(columns=True)
            self._heading, self._keys = heading, []
            for title, width, right in heading:
                self.add_column(Text(title, justify="right" if right else "left"), width=width)
        while len(self._keys) > len(rows):
            self.remove_row(self._keys.pop())
        while len(self._keys) < len(rows):
            self._keys.append(self.add_row(*[Text()] * len(heading)))

        for at, row in enumerate(rows):
            texts = [shortened(printable(row.instance), name_width), *(column.cell(row) for column in columns)]
            for place, (text, (_, _, right)) in enumerate(zip(texts, heading, strict=True)):
                style = VERDICT_STYLES.get(row.verdict, "") if place < 2 else ""  # the name and the verdict
                cell = Text(text, style=style, justify="right" if right else "left")
                shown = self.get_cell_at(Coordinate(at, place))
                if (shown.plain, shown.style) != (cell.plain, cell.style):
                    self.update_cell_at(Coordinate(at, place), cell)

        self.rows_shown = rows
        names = [row.instance for row in rows]
        if before and before.instance in names:
            self.move_cursor(row=names.index(before.instance))


class TextScreen(Screen[None]):
    """A page of text over the table; Escape goes back."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "app.pop_screen", "Back")]

    def __init__(self, text: Text) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self._text, id="text", markup=False)
        yield Footer(show_command_palette=False)

    def show(self, text: Text) -> None:
        """Replace the text; the scroll position stays."""
        self.query_one("#text", Static).update(text)


class ServerScreen(TextScreen):
    """The page of one server, rendered again with every frame."""

    def __init__(self, instance: str, draw: Callable[[], None]) -> None:
        super().__init__(Text(""))
        self.instance = instance
        self._draw_top = draw

    def on_mount(self) -> None:
        self._draw_top()


class TopApp(App[None]):
    """The table of servers, their pages, and the keys."""

    CSS = """
    #summary { height: 3; padding: 0 1; }
    ServerTable { height: 1fr; scrollbar-size: 1 1; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #filter.open { display: block; }
    VerticalScroll { scrollbar-size: 1 1; }
    #text { padding: 0 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q,ctrl+c", "quit", "Quit"),
        ("s", "sort", "Sort"),
        ("slash", "filter", "Filter"),
        ("g", "gpus", "GPUs"),
        ("p", "pause", "Pause"),
        ("r", "record", "Record"),
        ("o", "runbook", "Runbook"),
        Binding("escape", "all", show=False),
    ]

    def __init__(self, feed: Feed, runbook: Callable[[str], str], waits_for: str) -> None:
        """Show the frames of a feed, `waits_for` before the first; `runbook` returns the Markdown of an incident."""
        super().__init__(ansi_color=True)
        self.animation_level = "none"
        self.feed, self._runbook, self._waits_for = feed, runbook, waits_for
        self.frame: Frame | None = None
        self.servers = ServerTable()
        self._view, self._paused = View(), False

    def compose(self) -> ComposeResult:
        yield Static(Text(escaped(self._waits_for)), id="summary", markup=False)
        yield self.servers
        yield Input(placeholder="text in a name, model, verdict, state or incident", id="filter")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.theme = "ansi-dark"
        filter_input = self.query_one("#filter", Input)
        filter_input.cursor_blink = False
        self.servers.focus()
        self.feed.start()
        self.set_interval(LOOK_EVERY, self._look)

    def on_unmount(self) -> None:
        self.feed.stop()

    def _look(self) -> None:
        if self.feed.failed:
            self.exit()
        elif self.feed.latest is not self.frame and not self._paused:
            self.frame = self.feed.latest
            self.draw()

    def on_resize(self) -> None:
        """Fit the columns into the new size, once every widget has it."""
        self.call_after_refresh(self.draw)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Disable the keys of the table on a page."""
        on_page = isinstance(self.screen, TextScreen)
        without_server = on_page and not isinstance(self.screen, ServerScreen)
        return not ((on_page and action in TABLE_ACTIONS) or (without_server and action == "runbook"))

    def _fatal_error(self) -> None:
        """End the view; the command prints the error, without the values of variables."""
        self.feed.failed = self.feed.failed or self._exception
        self._close_messages_no_wait()

    def draw(self) -> None:
        """Draw the frame; the page of a server is rendered in a thread, since it may query a Prometheus."""
        frame = self.frame
        if frame is None or not self.screen_stack:
            return
        base, screen = self.screen_stack[0], self.screen
        found = shown_rows(frame.rows, self._view)
        lines = summary(frame, self._view, len(found), self.size.width - 2)
        paused = Text("PAUSED  ", style="reverse") if self._paused else Text()
        base.query_one("#summary", Static).update(Text.assemble(styled(lines[:2]), "\n", paused, lines[2]))
        self.servers.show(found, frame.rows, self._view)
        if not isinstance(screen, ServerScreen):
            return
        row, width = self._row(screen.instance), min(self.size.width - MARGIN, WIDTH)

        def show(lines: Sequence[str]) -> None:
            if screen.is_attached:
                screen.show(styled(lines))

        self._in_background(lambda: page(frame, row, width) if row else ["this server is no longer there"], show)

    def _in_background(self, work: Callable[[], Answer], show: Callable[[Answer], None]) -> None:
        """Do slow work in a thread that nothing waits for, not even the end of the view."""

        def run() -> None:
            try:
                self.call_from_thread(show, work())
            except DiagError as error:
                self.call_from_thread(self._tell, str(error), "error")
            except Exception as error:  # noqa: BLE001  the command prints it, once the view has ended
                self.feed.failed = error

        run_in_thread(run)

    def _row(self, instance: str) -> ServerRow | None:
        rows = self.frame.rows if self.frame else ()
        return next((row for row in rows if row.instance == instance), None)

    def on_data_table_row_selected(self) -> None:
        row = self.servers.selected
        if row:
            self.push_screen(ServerScreen(row.instance, self.draw))

    def action_sort(self) -> None:
        orders = list(ORDERS)
        self._change(self._view._replace(order=orders[(orders.index(self._view.order) + 1) % len(orders)]))

    def action_gpus(self) -> None:
        """Show the columns of the GPUs first, or the columns of the engines."""
        self._change(self._view._replace(gpus=not self._view.gpus))

    def action_filter(self) -> None:
        filter_input = self.query_one("#filter", Input)
        filter_input.add_class("open")
        filter_input.focus()

    def action_all(self) -> None:
        self.query_one("#filter", Input).value = ""
        self.on_input_submitted()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._change(self._view._replace(text=event.value))

    def on_input_submitted(self) -> None:
        self.query_one("#filter", Input).remove_class("open")
        self.servers.focus()

    def _change(self, view: View) -> None:
        self._view = view
        self.draw()

    def action_pause(self) -> None:
        """Keep the frame that is shown; scraping goes on."""
        self._paused = not self._paused
        self._look()
        self.draw()

    def action_record(self) -> None:
        self._in_background(self.feed.record, self._tell)

    def _tell(self, sentence: str, severity: str = "information") -> None:
        self.notify(escaped(sentence), severity=severity, timeout=10, markup=False)  # type: ignore[arg-type]

    def action_runbook(self) -> None:
        """Open the runbook of the worst incident of the server under the cursor, or of the open page."""
        row = self._row(self.screen.instance) if isinstance(self.screen, ServerScreen) else self.servers.selected
        if row and row.incidents:
            markdown = self._runbook(row.incidents[0])
            self.push_screen(TextScreen(Text.from_ansi(laid_out(markdown, self.size.width - MARGIN))))
        elif row:
            self._tell("no incident holds on this server: there is no runbook to open")
