"""Look-ahead against exhaustive search over the same action space, on 200 random graphs."""

from functools import partial
from statistics import fmean

from jigsawrl.core.lookahead import Limits, greedy, look_ahead, play_deciding
from jigsawrl.core.play import Position
from jigsawrl.core.splits import moves, splits
from tests.unit.core.graphs import CPU, GPU, LEVELS, position, random_graph

NUM_GRAPHS = 200
MAX_POSITIONS = 200_000


class Exhaustive:
    """Tries every merge and split at every event. Cuts off what can't beat the best, by the bounds
    that play itself gives, and what was reached before as early."""

    def __init__(self, *, known_s: float) -> None:
        self.best_s = known_s
        self.num_positions = 0
        self.seen: dict[object, float] = {}

    def decide(self, at: Position) -> None:
        self.num_positions += 1
        assert self.num_positions < MAX_POSITIONS, "too large a graph for this test"
        finish_s = max(at.estimate_finish_s().values())
        if max(finish_s, at.estimate_makespan_s()) >= self.best_s - 1e-9:
            return
        left = (
            -1.0 if ended is not None else round(at.path_s(node), 6)
            for node, ended in enumerate(at.finish_s)
        )
        key = (tuple(left), tuple(at.device), tuple(at.started))
        if self.seen.get(key, float("inf")) <= at.now_s + 1e-9:
            return
        self.seen[key] = at.now_s
        for merge in [(), *moves(at, at.touched)]:
            moved = at.copy()
            for node, device in merge:
                moved.move(node, device)
            self.split(moved, sorted(moved.touched))

    def split(self, at: Position, devices: list[int]) -> None:
        if not devices:
            if at.advance():
                self.decide(at)
            else:
                self.best_s = min(self.best_s, at.now_s)
            return
        for shares in splits(at, devices[0], levels=LEVELS) or [{}]:
            chosen = at.copy()
            chosen.assign(devices[0], shares)
            self.split(chosen, devices[1:])


def test_look_ahead_is_near_the_optimum_on_random_graphs() -> None:
    limits = Limits(levels=LEVELS, max_expanded=2000)
    ahead: list[float] = []
    at_once: list[float] = []
    for seed in range(NUM_GRAPHS):
        table = GPU if seed % 2 else CPU
        made = random_graph(seed)
        makespan_s, greedy_s = (
            play_deciding(
                position(made, table), decide=partial(choose, terms={}, limits=limits)
            ).makespan_s
            for choose in (look_ahead, greedy)
        )
        search = Exhaustive(known_s=min(makespan_s, greedy_s))
        search.decide(position(made, table))
        ahead.append(makespan_s / search.best_s)
        at_once.append(greedy_s / search.best_s)
    print(f"look-ahead {fmean(ahead):.4f}, greedy {fmean(at_once):.4f}, worst {max(ahead):.3f}")
    assert fmean(ahead) < 1.05
    assert fmean(ahead) < fmean(at_once)
