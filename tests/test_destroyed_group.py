"""What was bound to a process group that has been destroyed since says so, and never goes on with
another group, though torch gives the names again.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_cases import integers, same, shard_of, truth
from data_head import Raised, raised
from ranks import fresh
from test_graphs import StandIn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import lmhead
from lmhead import groups
from lmhead.comm import Comm

VOCAB, WIDTH, ROWS = 10, 8, 2
REMEDY = "build a new LMHead on a living group"

Call = Callable[[], Any]


class Life:
    """What a user makes while one default group lives: heads, compiled code, captured graphs; and
    calls of all of it, whose logits are known.
    """

    def __init__(self, backend: str, quick: bool, work: lmhead.Workspace) -> None:
        self.group = dist.group.WORLD
        self.ranks, self.rank, self.work = dist.get_world_size(), dist.get_rank(), work
        self.backend = backend
        self.weight = integers(VOCAB, WIDTH, seed=1)
        self.hidden = integers(ROWS, WIDTH, seed=2 + self.rank)
        self.shard = shard_of(self.weight, self.ranks, self.rank)
        everyone = [integers(ROWS, WIDTH, seed=2 + rank) for rank in range(self.ranks)]
        self.partial = torch.cat(everyone) @ self.shard.t()
        self.mesh = init_device_mesh("cpu", (self.ranks,))
        self.layout = lmhead.Layout.of(self.ranks, self.ranks // 2)  # pairs that share rows
        self.head = lmhead.LMHead(self.shard, VOCAB)
        self.mixed = lmhead.LMHead(self.shard, VOCAB, layout=self.layout)
        self.on_mesh = lmhead.LMHead(self.shard, VOCAB, self.mesh)
        self.logits, self.others = self._logits(), self._others()
        if quick:  # one compiled call of each kind
            left_out = (" into out", " gathered", " on a mesh", " a layout", "compiled share")
            for calls in (self.logits, self.others):
                for name in [name for name in calls if name.startswith("compiled")]:
                    if name.endswith(left_out):
                        del calls[name]
        self.cuda = StandIn()
        self.captured = self._captured()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=False, backend=self.backend)

    def _logits(self) -> dict[str, Call]:
        """Calls that give the logits of the own rows."""
        head, hidden, partial, group = self.head, self.hidden, self.partial, self.group
        mesh, exchange, counts = self.mesh, lmhead.exchange, [ROWS] * self.ranks
        whole = torch.cat([integers(ROWS, WIDTH, seed=2 + rank) for rank in range(self.ranks)])
        forward, given = self.compiled(head), self.compiled(self._exchange)
        gathered = self.compiled(head.forward_gathered)
        traced = make_fx(lambda x: self._operator(x, groups.graph_name(group)))(hidden)
        out = torch.empty(ROWS, VOCAB)
        return {
            "head": lambda: head(hidden),
            "head, counts": lambda: head(hidden, counts),
            "head, gathered": lambda: head.forward_gathered(whole),
            "head on a mesh": lambda: self.on_mesh(hidden),
            "compiled head": lambda: forward(hidden),
            "compiled head into out": lambda: forward(hidden, None, out),
            "compiled head, gathered": lambda: gathered(whole),
            "exchange": lambda: exchange(partial, vocab_size=VOCAB, group=group),
            "exchange, kept buffers": lambda: exchange(
                partial, vocab_size=VOCAB, group=group, workspace=self.work
            ),
            "exchange on a mesh": lambda: exchange(partial, vocab_size=VOCAB, group=mesh),
            "compiled exchange": lambda: given(partial, group),
            "compiled exchange on a mesh": lambda: given(partial, mesh),
            "traced operator": lambda: traced(hidden),
        }

    def _others(self) -> dict[str, Call]:
        """Calls that give something else."""
        head, hidden, partial, group = self.head, self.hidden, self.partial, self.group
        half = dist.get_rank() // 2 * 2  # ranks of a pair hold the same rows
        held, ids = integers(ROWS, WIDTH, seed=50 + half), torch.zeros(1, dtype=torch.int64)
        sample = self.compiled(lambda x: head.sample(x, temperature=0.0))
        mixed = self.compiled(lambda x: self.mixed.sample(x, temperature=0.0, share=True))
        by_rows = self.compiled(lambda x: self.mixed(x))
        counts, layout = [2] * (self.ranks // 2), self.layout
        share = self.compiled(lambda x: self.mixed.share(x, counts))
        draw = lmhead.sample_exchange
        drawn = self.compiled(lambda x, g: draw(x, vocab_size=VOCAB, group=g, temperature=0.0).ids)
        shared = self.compiled(
            lambda x, g: lmhead.share(x, layout=layout, row_counts=counts, group=g)
        )
        return {
            "sample": lambda: head.sample(hidden, temperature=0.0),
            "compiled sample": lambda: sample(hidden),
            "sample in a layout": lambda: self.mixed.sample(held, temperature=0.0, share=True),
            "compiled sample in a layout": lambda: mixed(held),
            "compiled head in a layout": lambda: by_rows(held),
            "share": lambda: self.mixed.share(ids, counts),
            "compiled share": lambda: share(ids),
            "share, own": lambda: lmhead.share(ids, layout=layout, row_counts=counts, group=group),
            "compiled share, own": lambda: shared(ids, group),
            "share where there is none": lambda: head.share(ids),
            "sample_exchange": lambda: (
                draw(partial, vocab_size=VOCAB, group=group, temperature=0.0).ids
            ),
            "compiled sample_exchange": lambda: drawn(partial, group),
            "warmup": lambda: head.warmup(ROWS),
            "new head": lambda: lmhead.LMHead(self.shard, VOCAB, group),
            "new head on a mesh": lambda: lmhead.LMHead(self.shard, VOCAB, self.mesh),
            "new head of all": lambda: lmhead.LMHead.from_full(self.weight, group=group),
        }

    def _captured(self) -> dict[str, lmhead.DecodeGraphs]:
        """Decode steps: captured (by a stand-in for a GPU's graphs), and run eagerly."""
        head, group = self.head, self.group

        def exchanged(hidden: torch.Tensor) -> torch.Tensor:
            rows = self.partial[:1].expand(self.ranks * hidden.shape[0], -1)
            return lmhead.exchange(rows, vocab_size=VOCAB, group=group)

        made = {
            "head": lmhead.DecodeGraphs(head, (ROWS,), heads=(head,)),
            "head of a step": lmhead.DecodeGraphs(lambda x: head(x), (ROWS,)),
            "exchange": lmhead.DecodeGraphs(exchanged, (ROWS,)),
            "compiled": lmhead.DecodeGraphs(self.compiled(head), (ROWS,)),
        }
        with self.cuda.active():
            for graphs in made.values():
                graphs.capture(self.hidden)
        made["eager"] = lmhead.DecodeGraphs(head, (ROWS,), heads=(head,))
        made["eager"].capture(self.hidden)
        return made

    def _exchange(self, partial: torch.Tensor, group: Any) -> torch.Tensor:
        return lmhead.exchange(partial, vocab_size=VOCAB, group=group)

    def _operator(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        sizes = (VOCAB, name, self.ranks, 1.0, None, torch.float32, torch.float32, None, "", "")
        return torch.ops.lmhead.logits(hidden, self.shard, None, *sizes)

    def works(self) -> None:
        """Every call, in its group's life."""
        want = truth(self.hidden, self.weight).float()
        for name, call in self.logits.items():
            same(call(), want, name)
        same(self._operator(self.hidden, self.group.group_name), want, "a plain name")
        for call in self.others.values():
            call()
        for graphs in self.captured.values():
            graphs(self.hidden)

    def refusals(self) -> dict[str, Raised]:
        """Every call, after it."""
        found = {name: raised(call) for name, call in (self.logits | self.others).items()}
        self.cuda.events.clear()
        for name, graphs in self.captured.items():
            for rows in (ROWS, 0):
                found[f"captured {name}, {rows}"] = raised(
                    lambda graphs=graphs, rows=rows: graphs(self.hidden[:rows], agreed=ROWS)
                )
        assert self.cuda.events == [], "a graph was replayed"
        self.head.close()
        self.head.close()
        for graphs in self.captured.values():
            graphs.close()
        return found


def _wrong(found: dict[str, Raised]) -> list[str]:
    return [
        f"{name}: {error}"
        for name, error in found.items()
        if error.error != "RuntimeError"
        or "has been destroyed" not in error.text
        or REMEDY not in error.text
        or error.collectives
    ]


def _lives(
    rank: int, ranks: int, folder: str, backend: str, quick: bool
) -> tuple[list[str], list[str]]:
    """Lives of a default group: all ranks, in the other order, and unless `quick` two halves with a
    group each, and these in the other order.  (What is wrong, the names that torch gave.)
    """
    torch._dynamo.config.recompile_limit = 64  # the heads of all lives share their code
    wrong: list[str] = []
    names: list[str] = []
    work, lives = lmhead.Workspace(), itertools.count()
    half, place = divmod(rank, ranks // 2)
    # Lets a compiled function see a new head, and the default group's successor.
    model = torch.nn.Module()
    follows = torch.compile(lambda x: model.head(x), fullgraph=True, backend=backend)
    default = torch.compile(
        lambda x: lmhead.exchange(x, vocab_size=VOCAB), fullgraph=True, backend=backend
    )
    earlier: list[Life] = []
    worlds = [("all", rank, ranks), ("reversed", ranks - 1 - rank, ranks)]
    if not quick:
        worlds += [(f"half {half}", place, ranks // 2)]
        worlds += [(f"half {half} reversed", ranks // 2 - 1 - place, ranks // 2)]
    for world, own, size in worlds:
        dist.destroy_process_group()
        if earlier:
            wrong += [f"no group, {text}" for text in _wrong(_few(earlier[-1]))]
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/{next(lives)} {world}", size),
            rank=own,
            world_size=size,
            timeout=datetime.timedelta(seconds=60),
        )
        names.append(dist.group.WORLD.group_name)
        for life in earlier:  # with a group of the same name
            wrong += [f"{world}, {text}" for text in _wrong(life.refusals())]
        earlier = [Life(backend, quick, work)]
        earlier[0].works()
        model.head = earlier[0].head
        want = truth(earlier[0].hidden, earlier[0].weight).float()
        same(follows(earlier[0].hidden), want, "a compiled function whose head is another one")
        same(default(earlier[0].partial), want, "a compiled exchange over the default group")
    wrong += _subgroup(earlier[0])
    return wrong, names


def _few(life: Life) -> dict[str, Raised]:
    """Calls that know their group, while there is no default group at all."""
    names = ("head", "compiled head", "exchange", "compiled exchange", "traced operator")
    found = {name: raised(life.logits[name]) for name in (*names, "exchange on a mesh")}
    found["captured"] = raised(lambda: life.captured["head"](life.hidden))
    plain = life.group.group_name
    return found | {"plain name": raised(lambda: life._operator(life.hidden, plain))}


def _subgroup(life: Life) -> list[str]:
    """Destroying one group leaves heads on others alone, and a new head serves at once."""
    wrong = []
    want = truth(life.hidden, life.weight).float()
    for _ in range(2):
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=60))
        head = lmhead.LMHead(life.shard, VOCAB, group)
        compiled = life.compiled(head)
        for call in (head, compiled, life.head):
            same(call(life.hidden), want)
        dist.destroy_process_group(group)
        stale = {
            "head": raised(lambda head=head: head(life.hidden)),
            "compiled": raised(lambda compiled=compiled: compiled(life.hidden)),
            "exchange": raised(lambda group=group: life._exchange(life.partial, group)),
            "new head": raised(lambda group=group: lmhead.LMHead(life.shard, VOCAB, group)),
        }
        wrong += [f"subgroup, {text}" for text in _wrong(stale)]
        same(life.head(life.hidden), want)
        assert life.captured["head"](life.hidden).shape == (ROWS, VOCAB)
    return wrong


@pytest.mark.parametrize(
    ("ranks", "backend", "quick"),
    [
        (2, "aot_eager", True),
        pytest.param(4, "aot_eager", False, marks=pytest.mark.slow),
        pytest.param(4, "inductor", False, marks=pytest.mark.slow),
    ],
)
def test_nothing_outlives_its_group(tmp_path: Path, ranks: int, backend: str, quick: bool) -> None:
    """On 4 ranks and on 2, in another order and another number: eager calls, compiled ones, those
    of a captured graph and of a group or mesh object all raise, before any collective, and name the
    remedy; a new head serves at once.
    """
    with fresh(ranks) as pool:
        for wrong, names in pool.run(_lives, str(tmp_path), backend, quick):
            assert wrong == []
            assert len(set(names)) == 1, "torch gives the names again"


# In one process.


@contextmanager
def _one_rank() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_one_rank_needs_no_group_but_keeps_to_the_one_it_was_given() -> None:
    weight, hidden = integers(VOCAB, WIDTH, seed=1), integers(ROWS, WIDTH, seed=2)
    want = truth(hidden, weight).float()
    alone = lmhead.LMHead(weight, VOCAB)
    calls = [alone, torch.compile(alone, fullgraph=True, backend="aot_eager")]
    for call in calls:
        same(call(hidden), want)
    with _one_rank():
        bound = lmhead.LMHead(weight, VOCAB)
        compiled = torch.compile(bound, fullgraph=True, backend="aot_eager")
        for call in (*calls, bound, compiled):
            same(call(hidden), want)
    for call in (bound, compiled):
        with pytest.raises(RuntimeError, match=f"has been destroyed.*{REMEDY}"):
            call(hidden)
    for call in calls:
        same(call(hidden), want)


def test_a_graphs_name_is_of_one_group_and_the_same_in_every_process() -> None:
    """The how-manieth group of its name: a compiler's cache on disk is of use to the next process,
    and a graph that another process made names no group that this one does not mean.
    """
    with _one_rank() as group:
        first = groups.graph_name(group)
        plain, number = first.split("#lmhead-")
        count = int(number)
        assert plain == group.group_name and groups.graph_name(group) == first
        assert groups.resolve(first) is groups.resolve(plain) is group
        assert Comm(group).name == plain, "errors have torch's own name"
    with _one_rank() as other:
        with pytest.raises(RuntimeError, match=f"process group '{plain}' has been destroyed"):
            groups.resolve(first)
        assert groups.resolve(plain) is other
        # A graph from disk may name a group before anything here has asked for its name.
        assert groups.resolve(f"{plain}#lmhead-{count + 1}") is other
        assert groups.graph_name(other) == f"{plain}#lmhead-{count + 1}"
        for wrong in (f"{plain}#lmhead-{count + 2}", f"{plain}#lmhead-x", "never made"):
            with pytest.raises(RuntimeError, match="has been destroyed"):
                groups.resolve(wrong)
    for name in (first, plain):
        with pytest.raises(RuntimeError, match="has been destroyed"):
            groups.resolve(name)
    assert groups.graph_name(None) == "" and groups.resolve("") is None


def test_names_of_groups_that_are_gone_are_not_kept() -> None:
    before = len(groups._by_graph_name), len(groups._met)
    for _ in range(5):
        with _one_rank() as group:
            groups.graph_name(group)
            del group
    assert len(groups._by_graph_name) <= before[0] + 1
    assert len(groups._met) <= before[1] + 1


def test_an_aborted_group_is_gone() -> None:
    with _one_rank() as group:
        head = lmhead.LMHead(integers(VOCAB, WIDTH, seed=1), VOCAB)
        dist.distributed_c10d._world.pg_map.pop(group)  # as _abort_process_group, NCCL's alone
        with pytest.raises(RuntimeError, match="has been destroyed"):
            head(integers(ROWS, WIDTH, seed=2))
        dist.distributed_c10d._world.pg_map[group] = ("gloo", dist.HashStore())
        head(integers(ROWS, WIDTH, seed=2))
