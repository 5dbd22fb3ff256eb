"""The README's code runs as it stands, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import ranks
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
VOCAB, HIDDEN, RANKS, ROWS, FEW = 129280, 8, 4, 36, (3, 0, 36, 1)


def job(rank: int, ranks: int, code: str) -> dict[str, object]:
    """Run the README's code with the names that it takes for granted; what it left in `logits`."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(torch.bfloat16)
    rows = torch.randn(RANKS * ROWS, HIDDEN, generator=generator).to(torch.bfloat16)
    shard = VOCAB // RANKS
    own = rows[rank * ROWS : (rank + 1) * ROWS]
    names = {
        "weight_shard": weight[rank * shard : (rank + 1) * shard],
        "hidden": own,
        "few": own[: FEW[rank]],
        "rows": rows,
        "partial": rows @ weight[rank * shard : (rank + 1) * shard].t(),
        "engine_buffer": torch.empty(ROWS, VOCAB, dtype=torch.bfloat16),
        "print": lambda *_: None,
    }
    found = []
    for line in code.splitlines():
        exec(line, names)
        if line.startswith("logits ="):
            found.append(names["logits"])
    found.append(names["engine_buffer"])
    want = own @ weight.t()
    return {
        "full": [torch.equal(got, want) for got in found if got.shape == want.shape],
        "few": [torch.equal(got, want[: FEW[rank]]) for got in found if got.shape[0] == FEW[rank]],
        "calls": len(found),
        "route": str(names["head"].last_route),
        "groups": dist.get_world_size(),
    }


def test_python_blocks_run_and_give_the_logits() -> None:
    text = (ROOT / "README.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    for rank, found in enumerate(ranks.pool(RANKS).run(job, code)):
        assert found["calls"] == 7
        assert found["full"].count(True) == len(found["full"]) >= 6, rank
        assert found["few"] and all(found["few"])
        assert f"# {found['route']}" in text


def test_make_targets_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", text, flags=re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert targets and all(
        re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets
    )


def test_no_placeholder_is_left() -> None:
    assert not re.search(r"@[A-Z]+@|TODO|TBD", (ROOT / "README.md").read_text())
