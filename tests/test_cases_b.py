"""Cases B: vocabulary padding and shard borders.

Padding columns must never be seen, whatever the padding weights hold.  Each case runs through every
way into the head (`data_cases.serve`): both routes, both kernel sets, rows gathered by the head or
by the caller, module and operator.  What a case says of choosing tokens on the shard (candidates,
Gumbel noise) comes with the sampler; here tokens are chosen from the logits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_cases import (
    KERNELS,
    NAN,
    ROUTES,
    Caught,
    Inputs,
    addresses,
    caught,
    every_path,
    integers,
    normal,
    same,
    shard_of,
    truth,
)
from ranks import pool

import lmhead
from lmhead import reference, shapes
from lmhead.compare import relative_error
from lmhead.kernels import gemm as gemm_kernels
from lmhead.kernels import reassemble as reassemble_kernels
from lmhead.kernels.config import GemmConfig, ReassembleConfig

INF = float("inf")


def _split(hidden: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return list(hidden.chunk(ranks))


def test_b1_padding_never_beats_negative_logits() -> None:
    """All real logits lie in [-5, -1], so a padding column of logit 0 would win everywhere: argmax
    and top-k stay within the vocabulary.
    """
    ids = torch.arange(10)
    weight = torch.zeros(10, 8)
    weight[:, 0] = -1 - (ids * 7 % 10) * 4 / 9  # in [-5, -1], the best is id 0
    hidden = torch.zeros(8, 8)
    hidden[:, 0] = 1
    for path, logits in every_path(4, Inputs(_split(hidden, 4), weight, 10)).items():
        assert logits.shape == (8, 10), path
        assert float(logits.min()) >= -5 and float(logits.max()) <= -1, path
        assert logits.argmax(1).tolist() == [0] * 8, path
        top = torch.topk(logits, 10).indices
        assert top.sort(1).values.tolist() == [list(range(10))] * 8, path


@pytest.mark.parametrize("padding", [0.0, -1e4, NAN, INF, -INF])
@pytest.mark.parametrize("rows", [(2, 2, 2, 2), (3, 0, 1, 2)])
def test_b2_padding_content_is_never_seen(padding: float, rows: tuple[int, ...]) -> None:
    """Hidden rows of both signs, padding weights (and padding bias) of zero, -1e4, NaN, inf: the
    result is exactly [b, V], with the same bits.
    """
    total = sum(rows)
    hidden = torch.ones(total, 8)
    hidden[1::2] = -1
    weight = integers(10, 8, seed=1)
    bias = integers(1, 10, seed=2)[0]
    want = truth(hidden, weight, bias).float()
    inputs = Inputs(list(hidden.split(list(rows))), weight, 10, bias=bias, padding=padding)
    for path, logits in every_path(4, inputs).items():
        same(logits, want, path)


def test_b2_padding_content_is_never_seen_by_one_rank() -> None:
    """One rank whose weight has NaN rows beyond the vocabulary, narrow wire included."""
    weight = torch.cat([integers(10, 8, seed=1), torch.full((3, 8), NAN)])
    hidden = integers(3, 8, seed=2)
    want = truth(hidden, weight[:10]).float()
    for options in ({}, {"wire_dtype": torch.bfloat16}):  # integers this small are exact in bf16
        for path, logits in every_path(1, Inputs([hidden], weight, 10, options=options)).items():
            same(logits, want, (path, options))


def _job_b3(rank: int, ranks: int, draws: int) -> dict[str, int]:
    hidden, weight = normal(2 * ranks, 16, seed=3) * 4, normal(10, 16, seed=4)
    shard = shard_of(weight, ranks, rank)
    live = max(0, min(3, 10 - 3 * rank))
    generator = torch.Generator().manual_seed(rank)
    # Large padding rows: their logits would win nearly every draw.
    shard[live:] = 50 * torch.randn(3 - live, 16, generator=generator)
    step = shard.abs().amax(1, keepdim=True) / 127
    quantised = (shard / step).round().to(torch.int8)
    partial = (hidden @ quantised.float().t()) * step.t()
    found = {}
    own = hidden[2 * rank : 2 * rank + 2]
    for kernels in KERNELS:
        for route in ROUTES:
            head = lmhead.LMHead(shard, 10, kernels=kernels, route=route)
            for name, logits in (
                ("float", head(own)),
                ("int8", lmhead.exchange(partial, vocab_size=10, route=route, kernels=kernels)),
            ):
                chance = torch.softmax(logits, 1)
                ids = torch.multinomial(chance, draws, replacement=True, generator=generator)
                found[f"{name}, {kernels}, {route}"] = int(ids.max())
    return found


def test_b3_no_padding_id_is_ever_sampled() -> None:
    """Padding rows of 50 * randn, temperature 1, 5000 draws over four ranks per path, with float
    weights and with int8 ones under `lmhead.exchange`: no id beyond the vocabulary.
    """
    for found in pool(4).run(_job_b3, 625):  # two rows each on four ranks
        assert len(found) == 8 and all(largest < 10 for largest in found.values())


def _job_b4(rank: int, ranks: int, weight: torch.Tensor, vocab: int) -> dict[str, Any]:
    hidden = integers(2, 8, seed=5 + rank)
    want = truth(hidden, weight[:vocab]).float()
    padded_shard = shard_of(weight, ranks, rank)  # 32 rows each, the tail of the last is padding
    for kernels in KERNELS:
        whole = lmhead.LMHead.from_full(weight, vocab, kernels=kernels)
        given = lmhead.LMHead(padded_shard, vocab, kernels=kernels)
        assert (whole.shard, given.shard) == (-(-vocab // ranks), 32)
        for head in (whole, given):
            logits = head(hidden)
            same(logits, want, kernels)
            assert int(logits.argmax(1).max()) < vocab
    return {
        "no vocabulary": caught(lambda: lmhead.LMHead(padded_shard)),  # type: ignore[call-arg]
        "exchange": caught(lambda: lmhead.exchange(torch.ones(8, 32))),  # type: ignore[call-arg]
        "too large": caught(lambda: lmhead.LMHead(padded_shard, 129)),
        "exchange too large": caught(lambda: lmhead.exchange(torch.ones(8, 32), vocab_size=129)),
        "full too small": caught(lambda: lmhead.LMHead.from_full(weight, 129)),
    }


def test_b4_the_vocabulary_is_asked_for() -> None:
    """A head padded to 128 rows for a vocabulary of 120: ids stay below 120.  The vocabulary must
    be given, and more than the ranks' rows hold is refused with the numbers.
    """
    weight = integers(128, 8, seed=6)
    weight[120:] = 1000  # what would win
    for found in pool(4).run(_job_b4, weight, 120):
        assert found["no vocabulary"].error == "TypeError"
        assert found["exchange"].error == "TypeError"
        for name in ("too large", "exchange too large"):
            assert found[name].error == "ValueError"
            assert "vocab_size 129 exceeds the 128 rows that 4 ranks hold" in found[name].text
        assert found["full too small"].error == "ValueError"
        assert "129" in found["full too small"].text and "(128, 8)" in found["full too small"].text


def test_b5_every_path_gives_the_same_ids() -> None:
    """V % N != 0: gather route, all-to-all and the operator give the same bits with each kernel
    set, so the same ids, for uneven rows too.
    """
    weight = normal(37, 32, seed=7, dtype=torch.bfloat16)
    for rows in ((3, 3, 3, 3), (1, 4, 0, 2)):
        hidden = normal(sum(rows), 32, seed=8, dtype=torch.bfloat16)
        found = every_path(4, Inputs(list(hidden.split(list(rows))), weight, 37))
        best = truth(hidden, weight).argmax(1)
        for kernels in KERNELS:
            paths = {path: logits for path, logits in found.items() if kernels in path}
            first = next(iter(paths.values()))
            assert len(paths) == 6
            for path, logits in paths.items():
                same(logits, first, (path, rows))
                assert torch.equal(logits.float().argmax(1), best), (path, rows)


def _job_b6(rank: int, ranks: int, weight: torch.Tensor) -> torch.Tensor:
    head = lmhead.LMHead.from_full(weight)
    assert (head.shard, head.ranks, head.vocab_size) == (50, 2, 99)
    hidden = integers(3, 8, seed=rank).to(weight.dtype)
    want = truth(hidden, weight).to(weight.dtype)
    for kernels in KERNELS:
        same(lmhead.LMHead.from_full(weight, kernels=kernels)(hidden), want, kernels)
    return head.weight.detach().clone()


def test_b6_tiny_odd_vocabulary() -> None:
    """V = 99 on two ranks works by padding to 100, and taking the shards back together gives the 99
    rows bit for bit.
    """
    weight = integers(99, 8, seed=9, dtype=torch.bfloat16)
    weight[5] = NAN  # bits come back as they were
    clean = weight.clone()
    clean[5] = 0
    shards = pool(2).run(_job_b6, clean)
    same(shapes.unshard_weight(shards, 99), clean, "round trip through the ranks")
    parts = [shapes.shard_weight(weight, 2, rank) for rank in range(2)]
    assert [part.shape[0] for part in parts] == [50, 50]
    same(shapes.unshard_weight(parts, 99), weight, "round trip")
    same(parts[1][49:], torch.zeros(1, 8, dtype=torch.bfloat16), "padding")


def _job_b7(
    rank: int, ranks: int, hidden: torch.Tensor, weight: torch.Tensor
) -> dict[str, torch.Tensor]:
    vocab, own = weight.shape[0], hidden.chunk(ranks)[rank]
    found = {}
    # The interpreter needs seconds for a vocabulary of this size, so the kernels run once.
    for kernels, route in (("torch", "all_to_all"), ("torch", "all_gather"), ("triton", None)):
        head = lmhead.LMHead(shard_of(weight, ranks, rank), vocab, kernels=kernels, route=route)
        found[f"{kernels}, {route}"] = head(own)
    return found


def test_b7_no_drift_from_one_process() -> None:
    """V = 50257 on two ranks against one process: logits within 1e-6, logsumexp within 1e-5, with
    each kernel set.
    """
    weight, hidden = normal(50257, 16, seed=10), normal(4, 16, seed=11)
    alone = lmhead.LMHead(weight, 50257, kernels="torch")(hidden)
    found = pool(2).run(_job_b7, hidden, weight)
    for path in found[0]:
        logits = torch.cat([rank[path] for rank in found])
        assert float((logits - alone).abs().max()) <= 1e-6, path
        drift = torch.logsumexp(logits, 1) - torch.logsumexp(alone, 1)
        assert float(drift.abs().max()) < 1e-5, path
    assert relative_error(alone, truth(hidden, weight)) < 1e-6


def _job_b8(rank: int, ranks: int) -> dict[str, Caught]:
    vocab, rows = 49159, 24608  # padded to a multiple of 64 elsewhere
    start = rank * rows
    hidden = torch.eye(4)
    shard = addresses(0, 4, ranks * rows).t()[start : start + rows].contiguous()
    want = addresses(0, 4, vocab)[2 * rank : 2 * rank + 2]
    head = lmhead.LMHead(shard, vocab)
    assert head.shard == rows
    same(head(hidden[2 * rank : 2 * rank + 2]), want, "head")
    partial = addresses(0, 4, ranks * rows)[:, start : start + rows].contiguous()
    for kernels in KERNELS:  # the cut is the exchange's; a GEMM this wide is slow to interpret
        got = lmhead.exchange(partial, vocab_size=vocab, kernels=kernels)
        same(got, want, kernels)
    return {
        "shard": caught(lambda: lmhead.LMHead(shard[: rows - 8 * rank], vocab)),
        "vocabulary": caught(lambda: lmhead.LMHead(shard, vocab + rank)),
        "dtype": caught(lambda: lmhead.LMHead(shard.bfloat16() if rank else shard, vocab)),
        "too few": caught(lambda: lmhead.LMHead(shard[:24579], vocab)),
    }


def test_b8_takes_the_rows_it_is_given() -> None:
    """Weights padded elsewhere (24608 rows per rank for V = 49159) are taken as they are and cut to
    V; ranks that disagree about rows, vocabulary or dtype are refused alike on both.
    """
    found = pool(2).run(_job_b8)
    for name, words in {
        "shard": "shard rows is 24608 on rank 0, 24600 on rank 1",
        "vocabulary": "vocab_size is 49159 on rank 0, 49160 on rank 1",
        "dtype": 'dtype is "torch.float32" on rank 0, "torch.bfloat16" on rank 1',
        "too few": "vocab_size 49159 exceeds the 49158 rows that 2 ranks hold with 24579 each",
    }.items():
        assert [rank[name].error for rank in found] == ["ValueError"] * 2, name
        assert words in found[0][name].text, found[0][name].text
        assert found[0][name].text == found[1][name].text, name


def test_b9_tail_of_a_shard_that_no_block_divides() -> None:
    """S = 5 with blocks of 4: the last tile's padding lanes write nothing, and log-probabilities of
    ids that other ranks own equal log_softmax of the truth.  (Selecting log-probabilities on the
    owner's shard comes with the sampler.)
    """
    for ranks, rows in ((2, 3), (4, 2), (3, 5)):
        received = torch.stack(
            [addresses(0, rows, 5 * ranks)[:, 5 * n : 5 * n + 5] for n in range(ranks)]
        )
        pieces = 1 << (ranks * rows - 1).bit_length()
        for config in (ReassembleConfig("band", pieces, 4, 1), ReassembleConfig("cycle", 2, 4, 1)):
            data = torch.full((received.numel() + 8,), -7.0)
            data[: received.numel()] = received.flatten()
            block = data[: received.numel()].view(received.shape)
            same(
                reassemble_kernels.reassemble(block, config), addresses(0, rows, 5 * ranks), config
            )
            assert (data[received.numel() :] == -7).all(), "canary after the buffer"
        for vocab in (5 * ranks, 5 * ranks - 1, 5 * ranks - 4):
            out = torch.full((rows, vocab + 3), -7.0)
            copy = ReassembleConfig("copy", 2, 4, 1)
            reassemble_kernels.reassemble_into(received, out[:, :vocab], copy)
            same(out[:, :vocab], addresses(0, rows, vocab), (ranks, vocab))
            assert (out[:, vocab:] == -7).all(), "canary after the row"

    hidden, weight = normal(8, 16, seed=12) * 3, normal(18, 16, seed=13) * 3
    ids = torch.tensor([17, 15, 0, 4, 5, 9, 10, 14])  # the last one of a shard, and the first
    want = torch.log_softmax(truth(hidden, weight), 1).gather(1, ids[:, None])
    for path, logits in every_path(4, Inputs(_split(hidden, 4), weight, 18)).items():
        got = torch.log_softmax(logits.double(), 1).gather(1, ids[:, None])
        assert float((got - want).abs().max()) < 1e-5, path


def _job_b10(rank: int, ranks: int) -> None:
    weight = integers(10, 8, seed=14)
    hidden = integers(3, 8, seed=15 + rank)
    want = truth(hidden, weight).float()
    for kernels in KERNELS:
        for route in ROUTES:
            head = lmhead.LMHead(shard_of(weight, ranks, rank), 10, kernels=kernels, route=route)
            wide = torch.full((3, 13), -7.0)
            got = head(hidden, out=wide[:, :10])
            assert got.data_ptr() == wide.data_ptr()
            same(wide[:, :10], want, (kernels, route))
            assert (wide[:, 10:] == -7).all(), "canary between the rows"
            padded = torch.full((2 * 3, 8), -7.0)
            padded[:, :5] = torch.arange(30.0).view(6, 5) + 100 * rank
            view = padded[:, :5]
            sliced = lmhead.exchange(view, vocab_size=10, route=route, kernels=kernels)
            plain = lmhead.exchange(view.contiguous(), vocab_size=10, route=route, kernels=kernels)
            same(sliced, plain, (kernels, route))
            same(sliced[:, :5], torch.arange(30.0).view(6, 5)[3 * rank : 3 * rank + 3], kernels)


def test_b10_heads_on_sliced_views() -> None:
    """`out` with rows V + 3 apart, and a partial that is a view of wider rows: exact, and nothing
    beyond the view is touched.
    """
    pool(2).run(_job_b10)


def test_b10_kernels_on_sliced_views() -> None:
    """Every kernel and its twin on x[:, :V] of wider rows: exact, with canaries in the gaps, or a
    ValueError that tells the strides.
    """
    small = torch.arange(12.0).view(2, 6)
    out = torch.full((2, 7), -7.0)
    for into in (reassemble_kernels.reassemble_into, reference.reassemble_into):
        into(small[None, :, :4], out[:, :4])
        assert out[:, :4].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]
        assert (out[:, 4:] == -7).all()

    ranks, rows, shard, vocab = 3, 5, 7, 19
    wide = torch.full((ranks, rows + 1, shard + 3), NAN)
    for n in range(ranks):
        columns = addresses(0, rows, ranks * shard)[:, n * shard : (n + 1) * shard]
        wide[n, :rows, :shard] = columns
    received = wide[:, :rows, :shard]
    for into in (reassemble_kernels.reassemble_into, reference.reassemble_into):
        out = torch.full((rows, vocab + 3), -7.0)
        into(received, out[:, :vocab])
        same(out[:, :vocab], addresses(0, rows, vocab), into.__module__)
        assert (out[:, vocab:] == -7).all()
    with pytest.raises(ValueError, match=r"contiguous.*strides \(60, 10, 1\)"):
        reassemble_kernels.reassemble(received)
    with pytest.raises(ValueError, match=r"strides \(24, 1, 8\)|strides"):
        reassemble_kernels.reassemble_into(wide.transpose(1, 2), torch.empty(shard + 3, 18))

    hidden, weight, bias = integers(5, 20, seed=16), integers(19, 20, seed=17), torch.arange(19.0)
    wide_hidden, wide_weight = torch.full((5, 23), NAN), torch.full((19, 27), NAN)
    wide_hidden[:, :20], wide_weight[:, :20] = hidden, weight
    config = GemmConfig(block_t=16, block_v=16, block_h=16, num_warps=4, num_stages=1)
    for gemm, chosen in ((gemm_kernels.gemm, {"config": config}), (reference.gemm, {})):
        out = torch.full((5, 22), -7.0)
        gemm(wide_hidden[:, :20], wide_weight[:, :20], bias, out=out[:, :19], **chosen)
        same(out[:, :19], truth(hidden, weight, bias).float(), gemm.__module__)
        assert (out[:, 19:] == -7).all()
    with pytest.raises(ValueError, match=r"contiguous columns"):
        gemm_kernels.gemm(hidden, weight, out=torch.empty(19, 5).t())
