"""A run as log lines, for when standard output is no terminal: a line per step, evaluation and wait.

Called by `run_command`; turns each `Status` and `Activity` into lines and remembers only what it
said last. It knows neither clock nor terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jigsawrl.contract.requests import Activity, PipelineStatus, Status

ACTIVITY_INTERVAL_S = 2.0
"""Between two lines of progress: enough to see life, few enough to read."""

WAIT_PATIENCE_S = 10.0
"""A wait is named when it lasts this long; shorter ones are how a step looks."""

SHOWN_METRICS = ("reward_mean", "loss", "kl", "grad_norm", "tokens_per_s")
"""Of a step, in this order, where the trainer reports them."""


def describe_metrics(metrics: dict[str, float]) -> str:
    """``reward_mean 0.512  loss -0.0031``, without what is not there."""
    shown = [(name, metrics[name]) for name in SHOWN_METRICS if name in metrics]
    return "  ".join(f"{name} {value:.4g}" for name, value in shown)


def describe_activity(activity: Activity) -> str:
    """``sort-digits.trainer0: warm-up 120 / 4000, accuracy 0.31``."""
    count = ""
    if activity.num_total is not None:
        count = f" {activity.num_done} / {activity.num_total}"
    elif activity.num_done:
        count = f" {activity.num_done}"
    detail = f", {activity.detail}" if activity.detail else ""
    return f"{activity.worker}: {activity.activity}{count}{detail}"


class PlainView:
    """Prints what changed."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lines: dict[str, _PipelineLines] = {}
        self._activity_s: float | None = None

    def on_status(self, status: Status, *, now_s: float) -> None:
        """The state of all pipelines, twice a second."""
        for pipeline in status.pipelines:
            lines = self._lines.setdefault(pipeline.pipeline, _PipelineLines())
            for line in lines.new(pipeline, now_s):
                self._write(f"[{pipeline.pipeline}] {line}")

    def on_activity(self, activity: Activity, *, now_s: float) -> None:
        """What a worker does now; only work that takes long and says how far it is is worth a line:
        the parts of a step are told by the step's own."""
        if activity.num_total is None or activity.activity == "train":
            return
        if self._activity_s is None or now_s - self._activity_s >= ACTIVITY_INTERVAL_S:
            self._activity_s = now_s
            self._write(f"[{activity.pipeline}] {describe_activity(activity)}")

    def on_notice(self, text: str) -> None:
        """A restart, a shutdown, a scheduler that does not answer."""
        self._write(text)

    def close(self) -> None:
        """Nothing to restore."""


class _PipelineLines:
    """What was said about one pipeline."""

    def __init__(self) -> None:
        self._state: str | None = None
        self._reached: tuple[int, int] | None = None
        self._num_evaluations = 0
        self._waiting_for: tuple[str, ...] = ()
        self._waiting_since_s = 0.0
        self._wait_told = False

    def new(self, pipeline: PipelineStatus, now_s: float) -> Iterator[str]:
        if pipeline.state != self._state:
            self._state = pipeline.state
            yield pipeline.state
        yield from self._step(pipeline)
        for evaluation in pipeline.evaluations[self._num_evaluations :]:
            yield (
                f"version {evaluation.version}: held-out accuracy {evaluation.accuracy:.3f}"
                f" on {evaluation.num_problems} problems"
            )
        self._num_evaluations = len(pipeline.evaluations)
        yield from self._wait(pipeline, now_s)

    def _step(self, pipeline: PipelineStatus) -> Iterator[str]:
        reached = (pipeline.incarnation, pipeline.version)
        previous, self._reached = self._reached, reached
        if previous is None or reached == previous:
            return
        if pipeline.version <= previous[1]:
            yield f"back to version {pipeline.version} (incarnation {pipeline.incarnation})"
            return
        first = previous[1] + 1
        steps = (
            f"step {first}" if first == pipeline.version else f"steps {first}-{pipeline.version}"
        )
        yield f"{steps} of {pipeline.num_steps}  {describe_metrics(pipeline.metrics)}".rstrip()

    def _wait(self, pipeline: PipelineStatus, now_s: float) -> Iterator[str]:
        if pipeline.waiting_for != self._waiting_for:
            self._waiting_for, self._waiting_since_s = pipeline.waiting_for, now_s
            self._wait_told = False
        elif self._waiting_for and not self._wait_told:
            waited_s = now_s - self._waiting_since_s
            if waited_s >= WAIT_PATIENCE_S:
                self._wait_told = True
                yield f"waiting for {'; '.join(self._waiting_for)} ({waited_s:.0f} s)"
