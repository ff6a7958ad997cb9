"""A run on a terminal: one picture, redrawn twice a second, with what matters now.

Called by `run_command` where standard output is a terminal; the only importer of rich. It draws from
the caller's calls and starts no thread, so that children can be forked safely.
"""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jigsawrl.cli.plain_view import describe_activity, describe_metrics
from jigsawrl.cli.status_text import has_ended, state_of
from jigsawrl.cli.summary import tokens_per_s
from jigsawrl.contract.requests import Activity, PipelineStatus, Status

ACTIVITY_LIFE_S = 5.0
"""An activity that was not reported again for so long is over."""

MAX_WAITS_SHOWN = 3
"""Causes of a wait on screen; the rest is a count."""


class LiveView:
    """Draws the last status and the live activities."""

    def __init__(self, console: Console | None = None) -> None:
        self._live = Live(
            Text("starting"), console=console or Console(), auto_refresh=False, transient=False
        )
        self._live.start()
        self._activities: dict[str, tuple[float, Activity]] = {}

    def on_status(self, status: Status, *, now_s: float) -> None:
        """Redraw."""
        parts: list[RenderableType] = []
        for pipeline in status.pipelines:
            current = [
                activity
                for seen_s, activity in self._activities.values()
                if activity.pipeline == pipeline.pipeline and now_s - seen_s < ACTIVITY_LIFE_S
            ]
            parts.append(_picture(pipeline, current))
        if status.num_dead_letters:
            parts.append(Text(f"dead letters: {status.num_dead_letters}", style="red"))
        self._live.update(Group(*parts), refresh=True)

    def on_activity(self, activity: Activity, *, now_s: float) -> None:
        """Kept for the next picture."""
        self._activities[activity.worker] = (now_s, activity)

    def on_notice(self, text: str) -> None:
        """A line above the picture."""
        self._live.console.print(Text(text, style="yellow"))

    def close(self) -> None:
        """Leave the last picture on the screen and give the terminal back."""
        self._live.stop()


def _picture(pipeline: PipelineStatus, activities: list[Activity]) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(pipeline.pipeline, style="bold"),
        Text(state_of(pipeline)),
        ProgressBar(total=pipeline.num_steps, completed=pipeline.version, width=30),
        Text(f"step {pipeline.version} / {pipeline.num_steps}"),
        Text(f"{tokens_per_s(pipeline):.0f} tokens/s"),
    )
    lines = [Text(f"  {describe_metrics(pipeline.metrics)}")] if pipeline.metrics else []
    if pipeline.evaluations:
        shown = "  ".join(f"v{e.version}: {e.accuracy:.3f}" for e in pipeline.evaluations[-6:])
        lines.append(Text(f"  held-out accuracy  {shown}", style="green"))
    lines += [Text(f"  {describe_activity(activity)}", style="cyan") for activity in activities]
    if pipeline.waiting_for:
        more = len(pipeline.waiting_for) - MAX_WAITS_SHOWN
        shown = "; ".join(pipeline.waiting_for[:MAX_WAITS_SHOWN])
        lines.append(Text(f"  waiting for {shown}" + (f"; {more} more" if more > 0 else "")))
    if pipeline.failure:
        lines.append(Text(f"  {pipeline.failure}", style="bold red"))
    return Group(head, *lines) if has_ended(pipeline) else Group(head, *lines, _workers(pipeline))


def _workers(pipeline: PipelineStatus) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("worker", "device", "state", "version", "holds"):
        table.add_column(title)
    for worker in pipeline.workers:
        version = "" if worker.version is None else str(worker.version)
        held = str(worker.num_held) if worker.num_held else ""
        table.add_row(worker.worker, worker.device or "", worker.state, version, held)
    return table
