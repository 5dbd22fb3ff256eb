"""What `lmhead explain` says is what then runs: a head built as it decides, on as many ranks, takes
the route that it names, with the rows and the bytes that it gives each rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_head import shard_of, whole
from data_layout import crossed
from ranks import pool
from test_explain import COMMANDS, run_json

import lmhead
from lmhead.bench.explanation import Explanation, explain
from lmhead.bench.ownership import TOP_K
from lmhead.devices import DEVICES
from lmhead.policy import ParallelConfig
from lmhead.sampling import Sample

# The commands' own sizes are too large to run; every sentence but those of bytes and floors is of
# the configuration and the rows, which stay.  V is a multiple of no N.
VOCAB, HIDDEN = 203, 16
RUN = [name for name in COMMANDS if "impossible" not in name and name != "many-ranks"]


def _explained(said: dict[str, Any]) -> Explanation:
    """The same configuration, rows and policy at the size that runs here."""
    return explain(
        ParallelConfig(**said["config"]),
        vocab=VOCAB,
        hidden=HIDDEN,
        device=DEVICES[said["device"]["name"].lower()],
        row_counts=said["row_counts"],
        policy=said["decision"]["policy"],
        itemsize=said["step"]["wire_itemsize"],
        may_replicate=said["outcome"] == "dp_head",
    )


def _groups(ranks: int, size: int, rank: int) -> dist.ProcessGroup:
    """This rank's group of `size` ranks in succession."""
    if size == ranks:
        return dist.group.WORLD
    made = [dist.new_group(list(range(at, at + size))) for at in range(0, ranks, size)]
    return made[rank // size]


def _run(rank: int, ranks: int, said: dict[str, Any]) -> dict[str, Any]:
    """What a rank sees: routes, rows, bytes, and which results are wrong."""
    found = _explained(said)
    decision, rows = found.decision, found.ranks[rank]
    weight = whole(VOCAB, HIDDEN, seed=1, dtype=torch.bfloat16)
    everyone = whole(rows.total, HIDDEN, seed=2, dtype=torch.bfloat16)
    hidden = everyone[rows.brought_start : rows.brought_start + rows.brought]
    dtype = torch.float32 if found.step.wire_itemsize == 4 else torch.bfloat16
    want = (everyone.float() @ weight.float().t()).to(dtype)
    group = _groups(ranks, decision.head_ranks, rank)
    shard = shard_of(weight, decision.head_ranks, dist.get_rank(group))
    options = decision.head_options()
    head = lmhead.LMHead(shard, VOCAB, group, logits_dtype=dtype, **options)
    counts = list(found.row_counts)
    if decision.head_ranks != ranks:
        counts = [rows.brought]
    with crossed(group) as seen:
        logits = head(hidden, counts)
    own = head.last_rows
    begin = rows.start if decision.head_ranks == ranks else rows.brought_start + own.start
    moved = seen.calls[-1] if seen.calls else 0
    gathered = sum(seen.calls[:-1])
    assert head.stats()[head.last_route.name].bytes == moved
    result: dict[str, Any] = {
        "route": head.last_route.name,
        "rule": head.last_route.rule,
        "held": own.brought,
        "owned": (begin, own.own),
        decision.outcome: moved,
        "wrong": [] if torch.equal(logits, want[begin : begin + own.own]) else ["logits"],
    }
    if decision.head_ranks != ranks:
        return result | {"gathered inside": gathered}
    result["hidden"] = gathered
    if ranks == 1:
        return result
    # What the other lines say: of what is decided, and of both routes.
    ours = lmhead.LMHead(
        shard, VOCAB, group, logits_dtype=dtype, layout=found.layout, route="all_to_all"
    )
    other = lmhead.LMHead(
        shard, VOCAB, group, logits_dtype=dtype, layout=found.layout, route="all_gather"
    )
    for name, call in (
        ("all_to_all", lambda: ours(hidden, counts)),
        ("all_gather", lambda: other(hidden, counts)),
        ("replicate", lambda: head(hidden, counts, replicate=True)),
    ):
        with crossed(group) as seen:
            call()
        assert sum(seen.calls[:-1]) == gathered
        result[name] = seen.calls[-1] if seen.calls else 0
    drawn = head.sample(hidden, row_counts=counts, top_k=TOP_K, details=True)
    drawn_stats = head.stats().get("candidates")
    result["candidates"] = 0 if drawn_stats is None else drawn_stats.bytes
    with crossed(group) as seen:
        head.share(drawn.ids)
    result["share"] = seen.busier
    assert isinstance(drawn, Sample)
    return result


@pytest.mark.parametrize("name", RUN)
def test_what_it_says_is_what_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = run_json(COMMANDS[name], capsys)
    found = _explained(said)
    for same in ("reason", "outcome", "route", "head_ranks", "advice", "enabled"):
        assert getattr(found.decision, same) == said["decision"][same], same
    words = [condition["words"] for condition in said["decision"]["conditions"]]
    assert [condition.words for condition in found.decision.conditions] == words
    told = found.to_dict()
    for rank, ran in enumerate(pool(said["step"]["ranks"]).run(_run, said)):
        assert ran["wrong"] == []
        if sum(said["row_counts"]):
            assert ran["route"] == said["decision"]["route"]
        else:
            assert ran["rule"] == "no_rows"
        assert ran["held"] == said["held"][rank]
        if said["decision"]["head_ranks"] == said["step"]["ranks"]:
            assert ran["owned"] == (said["owned_first"][rank], said["owned"][rank])
        assert ran.get("gathered inside", 0) == 0, "ranks of a set hold all of its rows"
        for line, moved in told["bytes"].items():
            if line in ran:
                assert ran[line] == moved[rank], (line, rank)
        assert said["outcome"] in ran


def test_ten_configurations_run() -> None:
    assert len(RUN) >= 10
