"""The README's code runs as it stands, and its commands exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import lmhead
from lmhead import cli

ROOT = Path(__file__).resolve().parent.parent
VOCAB, HIDDEN, RANKS, ROWS, FEW = 129280, 8, 4, 36, (3, 0, 36, 1)


SCHEDULE = ([3, 0, 36, 1], [0, 0, 0, 2], [0, 0, 0, 0])
BATCH, POSITIONS = 2, 3


class Llama(torch.nn.Module):
    """A stand-in with what the recipe takes of a transformers model: lm_head, and logits of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, HIDDEN)
        self.lm_head = torch.nn.Linear(HIDDEN, 32, bias=False)
        self.lm_head.weight = self.embedding.weight  # tied

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.embedding(ids).cumsum(dim=1).tanh()))


def stand_in() -> Llama:
    torch.manual_seed(3)
    return Llama().eval()


def tied(model: Any) -> bool:
    """Whether the head's weight still is the embedding's."""
    embedding, kept = model.get_input_embeddings().weight, model.lm_head.head.weight
    return embedding.untyped_storage().data_ptr() == kept.untyped_storage().data_ptr()


def job(rank: int, ranks: int, blocks: list[str]) -> dict[str, object]:
    """Run the README's code with the names that it takes for granted; what it left in `logits`."""
    generator = torch.Generator().manual_seed(0)
    # Whole numbers: their products are exact in bf16, whatever rows stand beside them.
    weight = torch.randint(-4, 5, (VOCAB, HIDDEN), generator=generator).to(torch.bfloat16)
    rows = torch.randint(-4, 5, (RANKS * ROWS, HIDDEN), generator=generator).to(torch.bfloat16)
    ids = torch.randint(32, (RANKS, BATCH, POSITIONS), generator=generator)
    shard = VOCAB // RANKS
    own = rows[rank * ROWS : (rank + 1) * ROWS]
    with torch.no_grad():
        alone = stand_in()(ids[rank]).logits[:, -1].argmax(dim=-1)
    found: list[torch.Tensor] = []

    def collect(names: dict[str, object]) -> None:
        found.append(names["logits"].clone())  # type: ignore[attr-defined]

    names = {
        "weight_shard": weight[rank * shard : (rank + 1) * shard],
        "hidden": own,
        "few": own[: FEW[rank]],
        "held": rows[rank // 2 * ROWS : (rank // 2 + 1) * ROWS],
        "few_held": rows[: (3, 5)[rank // 2]],
        "rows": rows,
        "partial": rows @ weight[rank * shard : (rank + 1) * shard].t(),
        "engine_buffer": torch.empty(ROWS, VOCAB, dtype=torch.bfloat16),
        "print": lambda *_: None,
        "model": stand_in(),
        "input_ids": ids[rank],
        "schedule": SCHEDULE,
        "temperatures": torch.linspace(0, 2, ROWS),
        "ks": torch.arange(ROWS),
        "seeds": torch.arange(ROWS),
        "positions": torch.zeros(ROWS, dtype=torch.int64),
        "allowed": (torch.arange(VOCAB) % 2 == 0).expand(ROWS, VOCAB),
        "collect": lambda: collect(names),
    }
    for block in blocks:
        tree = ast.parse(block)
        for node in tree.body:
            inside = [node, *(node.body if isinstance(node, ast.For) else [])]
            for place in inside:  # every logits, in a loop's every turn
                if isinstance(place, ast.Assign) and ast.unparse(place.targets[0]) == "logits":
                    call = ast.parse("collect()").body[0]
                    body = node.body if place is not node else tree.body
                    body.insert(body.index(place) + 1, call)
        exec(compile(ast.fix_missing_locations(tree), "README.md", "exec"), names)
    found.append(names["engine_buffer"])
    want = own @ weight.t()
    return {
        "wrong": [tuple(got.shape) for got in found if not torch.equal(got, want[: got.shape[0]])],
        "rows": [got.shape[0] for got in found],
        "tokens": torch.equal(names["tokens"], alone),
        "tied": tied(names["model"]),
        "route": str(names["head"].last_route),
        "groups": dist.get_world_size(),
        "ids": names["ids"].tolist(),
        "status": names["found"].status.tolist(),
        "drawn": names["found"].route.name,
        "owned": tuple(names["owned"].shape),
        "whole": torch.equal(names["whole"], names["held"] @ weight.t()),
        "held": torch.equal(names["tokens_held"], names["whole"].argmax(dim=1)),
    }


def python_blocks() -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_python_blocks_run_and_give_the_logits() -> None:
    text, blocks = (ROOT / "README.md").read_text(), python_blocks()
    assert len(blocks) == 8
    for rank, found in enumerate(ranks.pool(RANKS).run(job, blocks)):
        replayed = [counts[rank] for counts in SCHEDULE]
        assert found["rows"] == [ROWS, FEW[rank], *[ROWS] * 5, *replayed, ROWS]
        assert found["wrong"] == [] and found["tokens"] and found["tied"]
        assert all(0 <= token < VOCAB and token % 2 == 0 for token in found["ids"])
        assert found["whole"] and found["held"]
        assert found["owned"] == ((2, 1, 3, 2)[rank], VOCAB)
        assert found["status"] == [0] * ROWS and found["drawn"] == "candidates"
        assert f"# {found['route']}" in text


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: `make demo` installs it",
)
def test_a_transformers_model_takes_the_recipe() -> None:
    """One rank; among several the stand-in above has it."""
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(32, (BATCH, POSITIONS))
    with torch.no_grad():
        alone = model(ids).logits[:, -1].argmax(dim=-1)
    (block,) = [block for block in python_blocks() if "class ShardedHead" in block]
    names = {"torch": torch, "lmhead": lmhead, "group": None, "model": model, "input_ids": ids}
    exec(block, names)
    assert torch.equal(names["tokens"], alone) and tied(model)


def test_the_first_screen_says_what_has_run_where() -> None:
    """And the rest of the text does not say more."""
    text = (ROOT / "README.md").read_text()
    screen = text.splitlines()[:30]
    rows = [line.split("|")[1:3] for line in screen if line.startswith("| ")][1:]
    assert len(rows) == 4
    for words, yes in (
        (("CPU", "gloo"), True),
        (("interpreter",), True),
        (("machine code", "sm_90", "sm_100"), True),
        (("GPU", "NCCL"), False),
    ):
        ((_, said),) = [row for row in rows if all(word in row[0] for word in words)]
        assert ("yes" in said) == yes and ("not yet" in said) != yes
    assert "No GPU time has been measured yet" in text


def test_make_targets_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", text, flags=re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert targets and all(
        re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets
    )


def test_bench_commands_and_pictures_exist() -> None:
    """Every `lmhead bench` line is one that the command line takes; pictures are there, and
    small.
    """
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^\.venv/bin/lmhead (bench .*)$", text, flags=re.MULTILINE)
    kinds = {cli._parser().parse_args(command.split()).kind for command in commands}
    assert kinds == {"head", "exchange", "kernels", "scale"}
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(pictures) == 2
    assert all(1_000 < (ROOT / picture).stat().st_size < 100_000 for picture in pictures)


def test_the_explanation_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every line of it, in order, but for those that "..." stands for."""
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^\.venv/bin/lmhead (explain .*)$", text, flags=re.MULTILINE)
    assert cli.main(command.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    for first in ("who owns which of", "all_to_all (policy auto)"):
        (block,) = [part for part in text.split("```\n") if part.startswith(first)]
        lines = iter(printed)
        assert all(line in lines for line in block.splitlines() if line.strip() != "...")


def test_no_placeholder_is_left() -> None:
    assert not re.search(r"@[A-Z]+@|TODO|TBD", (ROOT / "README.md").read_text())
