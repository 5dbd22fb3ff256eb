"""What is drawn has the probabilities that it should: chi-squared against fp64, 200,000 draws each.

Rare tokens are counted together, so that every bin expects at least 5.  Seeds are fixed, so a test
passes always or never.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from data_head import normal

import lmhead
from lmhead import candidates, noise, sampling
from lmhead.sampling import Request

DRAWS = 200_000
# Draws in the default run where each looks at 50257 tokens; all of them under --everything.
FEW = 10_000
VOCABS = (100, 512, 50257)
ENOUGH = 0.001  # of p
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.9},
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.8, "temperature": 0.7},
    "min-p": {"min_p": 0.05, "temperature": 1.3},
    "mixture": {"min_p": 0.01, "top_k": 50, "top_p": 0.9, "temperature": 1.4},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Blocks this small take a hundred times as long where threads wait for a busy core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def logits_of(vocab: int) -> torch.Tensor:
    """[V] fp32, without ties."""
    return normal(vocab, seed=vocab) * (1.5 if vocab == 100 else 2.5)


def probabilities(
    x: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """x [V] -> what each token is drawn with, fp64 throughout."""
    chance = torch.softmax(x.double() / temperature, 0)
    order = chance.argsort(descending=True)
    kept = chance[order]
    count = int((kept >= min_p * kept[0]).sum())
    count = min(count, top_k) if top_k else count
    kept = kept[:count] / kept[:count].sum()
    if top_p < 1:
        kept = kept[kept.cumsum(0) - kept < top_p]
    found = torch.zeros_like(chance)
    found[order[: kept.numel()]] = kept / kept.sum()
    return found


def p_value(ids: torch.Tensor, chance: torch.Tensor) -> float:
    """How likely ids [D] are to differ so much from probabilities [V] by luck; 0 where an id came
    that has none.
    """
    seen = torch.bincount(ids, minlength=chance.numel()).double()
    if bool((seen[chance == 0] > 0).any()):
        return 0.0
    expected = chance * ids.numel()
    often = expected >= 5
    rest = expected[~often].sum()
    if rest >= 5:
        expected = torch.cat([expected[often], rest[None]])
        seen = torch.cat([seen[often], seen[~often].sum()[None]])
    else:  # with the smallest of the others
        place = torch.where(often, expected, torch.inf).argmin()
        seen[place] += seen[~often].sum()
        expected[place] += rest
        expected, seen = expected[often], seen[often]
    statistic = ((seen - expected) ** 2 / expected).sum()
    half = torch.tensor((expected.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))


def seeds_and_positions(draws: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Half of the rows are one sequence after the other, half are positions of one sequence."""
    number = torch.arange(first, first + draws)
    alone = number % 2 == 0
    return torch.where(alone, number, 12345), torch.where(alone, 7, number)


def drawn(x: torch.Tensor, given: dict[str, Any], draws: int, first: int = 0) -> torch.Tensor:
    """Tokens [draws] of one row x [V], by the public call, in blocks of a few MiB."""
    rows, found = max(1, (1 << 20) // x.numel()), []
    for start in range(first, first + draws, rows):
        count = min(rows, first + draws - start)
        seeds, positions = seeds_and_positions(count, start)
        partial = x.expand(count, -1).contiguous()
        options = {"seeds": seeds, "positions": positions, **given}
        found.append(lmhead.sample_exchange(partial, vocab_size=x.numel(), **options).ids)
    return torch.cat(found)


def drawn_from_message(
    x: torch.Tensor, given: dict[str, Any], draws: int, count: int
) -> torch.Tensor:
    """The same where a row is filtered: what its shard sends has nothing to do with its seed, so
    one message of `count` candidates serves all the draws.
    """
    vocab, device, found = x.numel(), torch.device("cpu"), []
    message = None
    for start in range(0, draws, 1 << 12):
        rows = min(1 << 12, draws - start)
        seeds, positions = seeds_and_positions(rows, start)
        request = Request(seeds=seeds, positions=positions, candidates=count, **given)
        form = request.form(vocab, vocab)
        unseeded = sampling.unseeded(rows, 0, device)
        records = request.records(rows, form, vocab, device, unseeded)
        if message is None:
            message = torch.empty((1, form.message_words), dtype=torch.int32)
            candidates.reduce(x[None], 0, vocab, records.rows(slice(0, 1)), None, message)
        everyone = message.expand(rows, -1).contiguous()[None]
        merged = candidates.merge(everyone, records, vocab, vocab)
        assert merged.status.eq(sampling.OK).all()
        found.append(merged.ids)
    return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_have_their_probabilities(vocab: int, kind: str, pytestconfig: pytest.Config) -> None:
    """p > 0.001, for 200,000 draws by the public call.

    With 50257 tokens filtered draws are made from the one message that all these rows' shards send,
    and the public call gives the first 500 as well; unfiltered ones, whose noise is that of all
    tokens, are 10,000 unless the run is of everything.
    """
    x, given = logits_of(vocab), KINDS[kind]
    chance = probabilities(x, **given)
    kept = int((chance > 0).sum())
    assert (kept == vocab) if kind == "temperature" else (3 < kept < min(vocab, 400))
    if vocab < 1000:
        ids = drawn(x, given, DRAWS)
    elif kind == "temperature":
        ids = drawn(x, given, DRAWS if pytestconfig.getoption("--everything") else FEW)
    else:
        ids = drawn_from_message(x, given, DRAWS, max(kept, given.get("top_k", 0)) + 1)
        assert torch.equal(ids[:500], drawn(x, given, 500))
    assert p_value(ids, chance) > ENOUGH


def biased(x: torch.Tensor, temperature: float, draws: int) -> torch.Tensor:
    """Tokens of a sampler that compares sums of logits and noise in bf16."""
    found, rows = [], max(1, (1 << 20) // x.numel())
    for start in range(0, draws, rows):
        seeds, positions = seeds_and_positions(min(rows, draws - start), start)
        word = noise.words_of_range(seeds, positions, 0, x.numel())
        score = x / temperature + noise.gumbel(word)
        found.append(score.bfloat16().argmax(1))
    return torch.cat(found)


@pytest.mark.parametrize("vocab", VOCABS[:2])
def test_a_sampler_that_rounds_to_bf16_fails_the_same_test(vocab: int) -> None:
    """Ties of bf16 go to the lowest id, so that low ids come too often; fp32 sums of the same
    logits, about 20 as a model's may be, and of the same noise pass.
    """
    x = logits_of(vocab) + 20
    chance = probabilities(x, temperature=0.9)
    assert p_value(biased(x, 0.9, DRAWS), chance) < ENOUGH
    assert p_value(drawn(x, {"temperature": 0.9}, DRAWS), chance) > ENOUGH


def test_the_test_itself_knows_right_from_wrong() -> None:
    """A multinomial passes, one with probabilities 5 % off does not, nor does a token of none."""
    generator = torch.Generator().manual_seed(0)
    chance = torch.softmax(normal(50, seed=1).double(), 0)
    ids = torch.multinomial(chance, DRAWS, replacement=True, generator=generator)
    assert p_value(ids, chance) > ENOUGH
    off = chance.clone()
    off[::2] *= 1.05
    assert p_value(ids, off / off.sum()) < ENOUGH
    without = chance.clone()
    without[int(chance.argmax())] = 0
    assert p_value(ids, without / without.sum()) == 0.0
    # 3.841 leaves one in twenty with one degree of freedom.
    half = torch.tensor(0.5, dtype=torch.float64)
    tail = float(torch.special.gammaincc(half, torch.tensor(3.841458820694124 / 2).double()))
    assert tail == pytest.approx(0.05, abs=1e-7)
