"""Groups of samples between generation and training: nothing is lost, nothing comes twice.

A prompt has a number, which says where it is in the prompt source. Its group is in one place at any
time: given out (`next`), partial, to be begun again, waiting (`put`), or done with (`get`, or
refused by a filter). All calls come from one thread, the event loop's.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from vireo.data.conversation import Conversation
from vireo.rollout import filters as by_name
from vireo.rollout.dump import as_record, from_record
from vireo.rollout.sample import Sample

Group = list[Sample]

_NO_ROW = Conversation(())


@dataclass
class Work:
    """A group to generate: the number of its prompt (None: it came from elsewhere), and what there
    is of its samples, if it was begun."""

    group: str
    number: int | None
    samples: Group = field(default_factory=list)


class DataBuffer:
    """Finished groups, oldest first, and the record of all those that are not.

    `prompts`: how many the source has (None: no end). `max_staleness`: updates of the weights that
    a group's oldest token may be behind; an older group begins again, or is dropped if it came
    from elsewhere. None: any. `filters`: names of those that a finished group must pass. `go_on`:
    partial groups are continued; else they begin again. `version`: the weights at the start;
    `weights` tells of each later one.

    Group ids are prompt numbers, with a count behind those that began again: a resumed run names
    its groups as an unbroken one does, and no two alike.
    """

    def __init__(
        self,
        *,
        prompts: int | None = None,
        max_staleness: int | None = None,
        filters: Sequence[str] = (),
        go_on: bool = True,
        version: str = "default",
    ):
        self.prompts, self.max_staleness, self.go_on = prompts, max_staleness, go_on
        self._filters = {name: by_name.find(name) for name in filters}
        self._position = 0  # prompts that the source was asked for
        self._restarts = 0
        self._versions = [version]
        self._open: dict[str, Work] = {}  # given out
        self._partial: deque[Work] = deque()
        self._again: deque[Work] = deque()
        self._waiting: deque[Work] = deque()
        self._counts: Counter[str] = Counter()
        self._staleness: list[int] = []  # of the groups taken last
        self._watchers: list[asyncio.Future[None]] = []
        self._ended = False
        self._error: Exception | None = None

    @property
    def waiting(self) -> int:
        """Groups that `get` could return now."""
        return len(self._waiting)

    def next(self) -> Work | None:
        """What to generate next: a part of a group first, then a prompt to be begun again, then a
        new one. None: there is none. Each must come back by `put` or `put_back`."""
        if self._partial or self._again:
            work = (self._partial or self._again).popleft()
        elif self.prompts is not None and self._position >= self.prompts:
            return None
        else:
            work = Work(f"{self._position:08d}", self._position)
            self._position += 1
        self._open[work.group] = work
        return work

    def put(self, group: Group) -> None:
        """A group that was generated: finished, or partial if one of its samples is not done.

        Groups from elsewhere (a dump) may be put too. ValueError: they are no one group, or it is
        here already, or was.
        """
        name = group[0].group
        if len({sample.index for sample in group if sample.group == name}) < len(group):
            raise ValueError(f"group {name} has samples of another group, or two of one index")
        given = self._open.get(name)
        if given is None:
            self._check_new(name)
        work = Work(name, None if given is None else given.number, group)
        old, done = self._too_old(work), all(sample.status == "done" for sample in group)
        filters = self._filters.items() if done and not old else []
        by = next((name for name, keeps in filters if not keeps(group)), None)
        self._open.pop(name, None)  # not before: what raises, loses nothing
        if done:
            self._counts.update({"put": 1, "samples": len(group)})
        if old:
            self._restart(work)
        elif by is not None:
            self._counts[f"dropped/{by}"] += 1
        elif done:
            self._waiting.append(work)
        elif work.number is None or (self.go_on and any(sample.response_ids for sample in group)):
            self._counts["partial"] += 1
            self._partial.append(work)
        else:
            self._again.append(Work(name, work.number))
        self._tell()

    def refuse(self, work: Work) -> None:
        """Work whose prompt is of no use: it is done with."""
        del self._open[work.group]
        self._counts["refused"] += 1
        self._tell()

    def put_back(self, work: Work) -> None:
        """Work that was not begun, or not gone on with."""
        del self._open[work.group]
        (self._partial if work.samples else self._again).appendleft(work)
        self._tell()

    @contextmanager
    def filling(self) -> Iterator[None]:
        """While its body runs more groups may come, and afterwards none; what it raises, who waits
        for groups is told too."""
        self._ended = False
        try:
            yield
        except Exception as error:
            self._error = error
            raise
        finally:
            self._ended = True
            self._tell()

    def get(self, groups: int) -> list[Group]:
        """The oldest finished groups, at most `groups`; they leave the buffer."""
        taken = [self._waiting.popleft() for _ in range(min(groups, len(self._waiting)))]
        self._staleness = [self._behind(work) for work in taken]
        self._counts["taken"] += len(taken)
        self._tell()
        return [work.samples for work in taken]

    async def wait(self, groups: int) -> None:
        """Until `groups` are there, or no more will come. Raises what ended `filling`."""
        while len(self._waiting) < groups and not self._ended:
            await self.changed()
        if self._error is not None:
            raise self._error

    def changed(self) -> asyncio.Future[None]:
        """Done when a group comes or goes next."""
        self._watchers.append(asyncio.get_running_loop().create_future())
        return self._watchers[-1]

    def weights(self, version: str) -> None:
        """The engine has new weights. Groups that are too old now leave. ValueError: it had them
        before (the newest may be named again)."""
        if version == self._versions[-1]:
            return
        if version in self._versions:
            raise ValueError(f"weights {version!r} were there before {self._versions[-1]!r}")
        self._versions.append(version)
        for place in (self._waiting, self._partial):
            old = [work for work in place if self._too_old(work)]
            for work in old:
                place.remove(work)
                self._restart(work)
        self._tell()

    def metrics(self) -> dict[str, float]:
        """Counts since the start (put, taken, samples, partial, stale, refused, and dropped/NAME
        by each filter), groups now (waiting, unfinished), and the mean staleness of those taken
        last."""
        names = ("put", "taken", "samples", "partial", "stale", "refused")
        counts = {name: 0 for name in names}
        counts |= {f"dropped/{name}": 0 for name in self._filters} | self._counts
        unfinished = len(self._open) + len(self._partial) + len(self._again)
        mean = sum(self._staleness) / max(1, len(self._staleness))
        return counts | {"waiting": self.waiting, "unfinished": unfinished, "staleness": mean}

    def skip(self, done: Collection[int]) -> None:
        """Prompts that are done with already, by number; of a buffer that gave nothing out yet."""
        self._position = max(done, default=-1) + 1
        left = range(min(self._position, self.prompts or self._position))
        self._again.extend(Work(f"{i:08d}", i) for i in left if i not in done)

    def state(self) -> dict[str, Any]:
        """All of it as JSON has it, for a checkpoint; what is given out counts as put back."""
        given = list(self._open.values())
        return {
            "position": self._position,
            "restarts": self._restarts,
            "versions": self._versions,
            "counts": dict(self._counts),
            "waiting": [_plain(work) for work in self._waiting],
            "partial": [_plain(w) for w in [*(w for w in given if w.samples), *self._partial]],
            "again": [_plain(w) for w in [*(w for w in given if not w.samples), *self._again]],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`, in place of what is here."""
        self._position, self._restarts = state["position"], state["restarts"]
        self._versions, self._counts = list(state["versions"]), Counter(state["counts"])
        self._open, self._staleness = {}, []
        for name in ("waiting", "partial", "again"):
            setattr(self, f"_{name}", deque(_work(record) for record in state[name]))

    def _restart(self, work: Work) -> None:
        self._counts["stale"] += 1
        if work.number is not None:
            self._restarts += 1
            self._again.append(Work(f"{work.number:08d}.{self._restarts}", work.number))

    def _behind(self, work: Work) -> int:
        """Updates of the weights since the oldest token. ValueError: nobody told of its weights."""
        numbers = {version: i for i, version in enumerate(self._versions)}
        versions = {sample.version for sample in work.samples if sample.version is not None}
        if (unknown := versions - numbers.keys()) and len(numbers) > 1 and work.number is not None:
            raise ValueError(f"group {work.group} has tokens of unknown weights {unknown}")
        return max((len(numbers) - 1 - numbers[v] for v in versions - unknown), default=0)

    def _too_old(self, work: Work) -> bool:
        return self.max_staleness is not None and self._behind(work) > self.max_staleness

    def _check_new(self, name: str) -> None:
        own = re.fullmatch(r"(\d{8,})(\.\d+)?", name)
        here = [work.group for work in (*self._waiting, *self._partial, *self._again)]
        if name in here or (own and int(own[1]) < self._position):
            raise ValueError(f"group {name} was put before")

    def _tell(self) -> None:
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)
        self._watchers.clear()


def _plain(work: Work) -> dict[str, Any]:
    """The prompt's row, which may hold pictures, is there once, in the first sample."""
    bare = [replace(sample, conversation=_NO_ROW) for sample in work.samples[1:]]
    samples = [as_record(sample) for sample in [*work.samples[:1], *bare]]
    return {"group": work.group, "number": work.number, "samples": samples}


def _work(plain: dict[str, Any]) -> Work:
    samples = [from_record(record) for record in plain["samples"]]
    for sample in samples[1:]:
        sample.conversation = samples[0].conversation
    return Work(plain["group"], plain["number"], samples)
