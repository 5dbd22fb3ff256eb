"""Cases C: layout, aliasing, and the bytes on the wire.

gloo fills a transposed output in storage order, and gives wrong data where send and receive share
storage, both without an error; so what reaches the backend is watched here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data_cases import (
    KERNELS,
    ROUTES,
    Caught,
    Sent,
    addresses,
    caught,
    integers,
    same,
    shard_of,
    truth,
    watched_exchange,
)
from ranks import own_group, pool

import lmhead
from lmhead.comm import Call, Comm
from lmhead.kernels import reassemble as reassemble_kernels
from lmhead.kernels.config import ReassembleConfig
from lmhead.shapes import BYTES_ONLY

VOCAB, WIDTH, ROWS = 11, 8, 3


def _strided(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of `rows` [R, C] under other strides; what lies between holds NaN or -7."""
    count, width = rows.shape
    gap = -7 if not rows.dtype.is_floating_point else float("nan")
    every_second = rows.new_full((count, 2 * width), gap)
    every_second[:, ::2] = rows
    sliced = rows.new_full((count + 2, width + 3), gap)
    sliced[1 : count + 1, 2 : width + 2] = rows
    return {
        "transposed": rows.t().contiguous().t(),
        "every second column": every_second[:, ::2],
        "slice of a wider one": sliced[1 : count + 1, 2 : width + 2],
    }


def _job_c1(rank: int, ranks: int) -> list[Sent]:
    weight, hidden = integers(VOCAB, WIDTH, seed=1), integers(ROWS, WIDTH, seed=2 + rank)
    want = truth(hidden, weight).float()
    with watched_exchange() as seen:
        for kernels in KERNELS:
            for route in ROUTES:
                head = lmhead.LMHead(
                    shard_of(weight, ranks, rank), VOCAB, kernels=kernels, route=route
                )
                for name, view in _strided(hidden).items():
                    assert not view.is_contiguous()
                    same(head(view), want, (kernels, route, name))
                expanded = hidden[:1].expand(ROWS, WIDTH)
                same(head(expanded), want[:1].expand(ROWS, VOCAB).contiguous(), "expanded")
                one = hidden[1:2].expand(1, WIDTH).t().contiguous().t()
                same(head(one), want[1:2], (kernels, route, "one row"))
    return seen


def test_c1_strided_hidden_is_exact() -> None:
    """Transposed, every second column, slices and expanded rows of hidden: exact; and what the
    backend gets is always flat and contiguous.
    """
    for seen in pool(4).run(_job_c1):
        calls = len(KERNELS) * 5
        assert len(seen) == calls * (2 + 1), "one of hidden rows, one of logits on the one route"
        assert all(sent.dims == (1, 1) and sent.contiguous for sent in seen)


def _job_c2(rank: int, ranks: int) -> None:
    weight, hidden = integers(VOCAB, WIDTH, seed=3), integers(ROWS, WIDTH, seed=4 + rank)
    want = truth(hidden, weight).float()
    shard = shard_of(weight, ranks, rank)
    for dtype in (torch.float32, torch.bfloat16):  # both exact for integers this small
        for name, view in _strided(shard.to(dtype)).items():
            for kernels in KERNELS:
                head = lmhead.LMHead(view, VOCAB, kernels=kernels)
                assert head.weight.stride() == view.stride(), "used as given"
                turned = hidden.to(dtype).t().contiguous().t()
                assert turned.stride() == (1, ROWS)
                same(head(turned).float(), want, (dtype, name, kernels))


def test_c2_transposed_weight_and_hidden_are_exact() -> None:
    """Weight shards with stride (1, S), sliced and with gaps, under hidden rows with stride (1, b):
    exact, and the weight is used where it lies.
    """
    pool(4).run(_job_c2)


def _ways_in(
    rank: int, ranks: int, kernels: str
) -> dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
    """Every entry point: what it takes, contiguous, and how it is called."""
    weight = integers(VOCAB, WIDTH, seed=5)
    hidden = integers(ranks * ROWS, WIDTH, seed=6)
    own = hidden[ROWS * rank : ROWS * (rank + 1)].clone()
    head = lmhead.LMHead(shard_of(weight, ranks, rank), VOCAB, kernels=kernels)
    group = dist.group.WORLD.group_name
    shard = head.shard
    partial = (hidden @ head.weight.t()).contiguous()
    floats = torch.float32
    return {
        "head": (own, head),
        "head, counts": (own, lambda x: head(x, [ROWS] * ranks)),
        "head, out": (own, lambda x: head(x, out=torch.empty(ROWS, VOCAB))),
        "gathered": (hidden, head.forward_gathered),
        "operator": (
            own,
            lambda x: torch.ops.lmhead.logits(
                *(x, head.weight, None, VOCAB, group, ranks, 1.0, None),
                *(floats, floats, None, kernels, ""),
            ),
        ),
        "exchange": (partial, lambda x: lmhead.exchange(x, vocab_size=VOCAB, kernels=kernels)),
        "exchange, exact": (
            partial,
            lambda x: lmhead.exchange(x, vocab_size=ranks * shard, kernels=kernels),
        ),
        "exchange operator": (
            partial,
            lambda x: torch.ops.lmhead.exchange(
                *(x, ROWS, VOCAB, group, ranks, floats, None, kernels, "")
            ),
        ),
    }


def _job_c3(rank: int, ranks: int) -> int:
    tried = 0
    for kernels in KERNELS:
        for way, (plain, call) in _ways_in(rank, ranks, kernels).items():
            want = call(plain)
            for name, view in _strided(plain).items():
                version, before = view._version, view.clone()
                got = call(view)
                what = (kernels, way, name)
                same(got, want, what)
                same(view, before, what)
                assert view._version == version, what
                assert got.data_ptr() != view.data_ptr() and got.is_contiguous(), what
                tried += 1
    return tried


def test_c3_strided_input_equals_contiguous_and_stays_untouched() -> None:
    """Every entry point, strided against contiguous: the same bits, and the input is not modified
    (its version counter neither).
    """
    assert pool(4).run(_job_c3) == [2 * 8 * 3] * 4


def _job_c4(rank: int, ranks: int, rows: int, vocab: int) -> dict[str, Any]:
    shard = vocab // ranks
    hidden, weight = torch.eye(ranks * rows), addresses(0, ranks * rows, vocab).t()
    want, own = addresses(rank * rows, rows, vocab), hidden[rank * rows : (rank + 1) * rows]
    in_place = {}
    with watched_exchange() as seen:
        for kernels in KERNELS:
            head = lmhead.LMHead(shard_of(weight, ranks, rank), vocab, kernels=kernels)
            for _ in range(3):  # kept buffers are used again
                logits = head(own)
                same(logits, want, kernels)
                in_place[kernels] = logits.data_ptr() == seen[-1].receive[0]
    comm = Comm(own_group(timeout_s=20))
    memory = torch.zeros(2 * ranks * shard)
    half, call = ranks * shard, Call("exchange", (1,) * ranks, shard, "float32", 1)
    overlaps = [
        caught(lambda: comm.exchange(memory[:half], memory[:half], None, None, call)),
        caught(lambda: comm.exchange(memory[1 : half + 1], memory[:half], None, None, call)),
    ]
    comm.exchange(memory[half:], memory[:half], None, None, call)  # side by side is apart
    dist.destroy_process_group(comm.group)
    return {"seen": seen, "in place": in_place, "overlaps": overlaps}


def test_c4_send_and_receive_never_share_storage() -> None:
    """N = 3, b = 5, V = 21, where [N, b, S] and [b, V] overlap unevenly: exact, in place with the
    kernels; the two address ranges of every exchange, of hidden rows (H = 15) and of logits, are
    apart, and shared ones are refused.
    """
    for found in pool(3).run(_job_c4, 5, 21):
        assert len(found["seen"]) == 12
        for turn, sent in enumerate(found["seen"]):
            (receive, receive_end), (send, send_end) = sent.receive, sent.send
            assert receive_end - receive == send_end - send == 3 * 5 * (15, 7)[turn % 2] * 4
            assert receive_end <= send or send_end <= receive
        assert found["in place"] == {"torch": False, "triton": True}
        assert [overlap.error for overlap in found["overlaps"]] == ["AssertionError"] * 2


@pytest.mark.parametrize("block_s", [1, 2, 4, 8])
def test_c4_in_place_reassembly_has_no_overlap_hazard(block_s: int) -> None:
    """The permutation of N = 3, b = 5, S = 7 in the memory it is read from, by each kernel and each
    band width.
    """
    want = addresses(0, 5, 21)
    blocks = torch.stack([want[:, 7 * n : 7 * n + 7] for n in range(3)])
    for config in (
        ReassembleConfig("band", 16, block_s, 1),
        ReassembleConfig("cycle", 1, block_s, 1),
        ReassembleConfig("cycle", 4, block_s, 1),
        ReassembleConfig("cycle", 32, block_s, 1),
    ):
        received = blocks.clone()
        got = reassemble_kernels.reassemble(received, config)
        assert got.data_ptr() == received.data_ptr()
        same(got, want, config)


def _job_c5(rank: int, ranks: int) -> int:
    weight, hidden = integers(VOCAB, WIDTH, seed=7), integers(ROWS, WIDTH, seed=8 + rank)
    want = truth(hidden, weight).float()

    def absent(*_: Any, **__: Any) -> None:
        raise RuntimeError("this collective does not exist here")

    names = ("all_to_all", "all_gather", "all_reduce", "broadcast", "reduce_scatter_tensor")
    with mock.patch.multiple(dist, **dict.fromkeys(names, absent)), watched_exchange() as seen:
        head = lmhead.LMHead(shard_of(weight, ranks, rank), VOCAB)
        same(head(hidden), want, "as it is")
        same(head(hidden, [ROWS] * ranks), want, "counts")
        fallback = lmhead.LMHead(shard_of(weight, ranks, rank), VOCAB, route="all_gather")
        same(fallback(hidden), want, "fallback")
        if hasattr(dist, "all_gather_single"):  # torch 2.11 has only the older name
            gather = dist.all_gather_single
            with (
                mock.patch.object(dist, "all_gather_single", None),
                mock.patch.object(dist, "all_gather_into_tensor", gather),
            ):
                same(fallback(hidden), want, "older torch")
    return len(seen)


def test_c5_only_collectives_that_gloo_always_had() -> None:
    """The list form of all-to-all is never used: `all_to_all_single` for hidden rows and logits, in
    the fallback one flat all-gather, by whichever name this torch knows it, and nothing else.
    (That the whole suite passes on the oldest supported torch is for a run with that torch.)
    """
    fallbacks = 1 + hasattr(dist, "all_gather_single")
    assert pool(4).run(_job_c5) == [2 * 2 + fallbacks] * 4


def _bits(dtype: torch.dtype, ranks: int) -> torch.Tensor:
    """partial [2 * ranks, 5 * ranks] of `dtype` in which every byte says where it is."""
    numel = 2 * ranks * 5 * ranks * dtype.itemsize
    raw = (torch.arange(numel) * 37 % 251).to(torch.uint8)
    return raw.view(dtype).view(2 * ranks, 5 * ranks)


def _job_c6(rank: int, ranks: int, dtypes: list[torch.dtype]) -> dict[str, dict[str, Caught]]:
    found: dict[str, dict[str, Caught]] = {}
    for dtype in dtypes:
        partial = _bits(dtype, ranks)
        mine = partial[:, 5 * rank : 5 * rank + 5].contiguous()
        # V = 19 of 20: the result is a copy without the padding column; V = 20 is in place.
        for kernels in KERNELS:
            for route in ROUTES:
                for vocab in (5 * ranks - 1, 5 * ranks):

                    def call(
                        mine: torch.Tensor = mine,
                        vocab: int = vocab,
                        kernels: str = kernels,
                        route: str = route,
                    ) -> torch.Tensor:
                        return lmhead.exchange(mine, vocab_size=vocab, kernels=kernels, route=route)

                    got = caught(call)
                    if not got.error:
                        assert got.value.dtype == dtype
                        raw = torch.uint8  # bit for bit, NaN patterns included
                        want = partial[2 * rank : 2 * rank + 2, :vocab].contiguous()
                        same(got.value.view(raw), want.view(raw), (dtype, kernels, route, vocab))
                    found.setdefault(str(dtype), {})[f"{kernels} {route} {vocab}"] = Caught(
                        got.error, got.text
                    )
    return found


def test_c6_every_dtype_travels_or_is_refused() -> None:
    """bf16, fp16, fp32, integers and every fp8 arrive bit for bit (fp8 as bytes, which gloo has no
    type for); what cannot travel is a TypeError on every rank, before any collective.
    """
    travels = [torch.bfloat16, torch.float16, torch.float32, *BYTES_ONLY]
    travels += [torch.uint8, torch.int8, torch.int32, torch.int64]
    refused = [torch.float64, torch.bool, torch.uint16, torch.uint32, torch.int16, torch.complex64]
    for found in pool(4).run(_job_c6, travels + refused):
        for dtype in travels:
            assert {call.error for call in found[str(dtype)].values()} == {""}, dtype
        for dtype in refused:
            for call in found[str(dtype)].values():
                assert call.error == "TypeError" and f"partial cannot be {dtype}" in call.text
