"""Draws on a shard's logits: what each tile shows of a row, what the shard sends of it, and what
the owner of the row makes of all shards' messages.

    GEMM with a summary   hidden [T, H] x weight [S, H] -> tiles' summaries (and partial [T, S])
    or scan               partial [T, S]                -> the same summaries, in one pass
    pick                  summaries, partial            -> messages [T, words]
    merge                 messages [N, B, words]        -> tokens [B]

A tile of W columns says of each row its best token (by logits with noise where the row has no
filters, else by logits), the largest logit, and what exponentials add up to.  The row's first C
candidates lie in its first C tiles by their best, so `pick` reads no more than C * W logits of it;
where one candidate is enough it reads none, and the GEMM then writes no logits at all.

Logits are rounded to the dtype on the wire before anything is decided, so that a draw by candidates
and one from exchanged logits see the same numbers; all that follows is fp32.  Maxima are decided by
value and then by id, so a token never depends on how columns are tiled.

Twins: `lmhead.candidates.reduce`, `lmhead.candidates.merge`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import noise, tiles
from .config import GemmConfig, next_power_of_2
from .gemm import _Epilogue, epilogue

# The most candidates per shard and row, and the most in all that one program merges.
MAX_CANDIDATES = 64
MAX_MERGED = 2048
# Token rows of an accumulator that are summarised at a time.
FUSED_ROWS = tl.constexpr(8)
# The most rows of a program whose GEMM summarises: 15,000 instructions, of which 288 rows would
# take 32,000 and a minute to compile.  Above, a scan reads the logits from L2, and cuBLAS has its
# turn.
FUSED_MOST_ROWS = 128
# The tile of a scan.
SCAN_COLUMNS, SCAN_ROWS = 128, 8

# Planes of a summary, fp32 [PLANES, tiles, T]: the best by logits or by logits with noise, the
# logit under it, the largest logit (NaN where there is a NaN), the sum of exp(x - largest), and of
# exp((x - largest) / temperature).  The ids of the best, int32 [tiles, T], are the last plane.
BEST, VALUE, PEAK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SUM, MASS, IDS = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
PLANES = 6

# Words of a record; see `lmhead.sampling.Records`.
_TEMPERATURE, _K, _P, _MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_SEED, _POSITION = tl.constexpr(4), tl.constexpr(6)

_LAST_ID = tl.constexpr(0x7FFFFFFF)
_NO_KEY = tl.constexpr(-(1 << 63))
_NONE, _NAN_SEEN = tl.constexpr(-1), tl.constexpr(-2)
_OK, _NAN, _EMPTY, _MISSED = (tl.constexpr(status) for status in range(4))
_INF = tl.constexpr(float("inf"))


@triton.jit
def _keys(values, ids):
    """fp32 values and int32 ids -> int64 that is larger for what comes first; -inf is no key."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & _LAST_ID)).to(tl.int64)
    key = (ordered << 32) | (ids ^ _LAST_ID).to(tl.int64)
    return tl.where(values == -_INF, _NO_KEY, key)


@triton.jit
def _key_values(key):
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & _LAST_ID)
    return tl.where(key == _NO_KEY, -_INF, bits.to(tl.float32, bitcast=True))


@triton.jit
def _key_ids(key):
    return tl.where(key == _NO_KEY, _NONE, (key & _LAST_ID).to(tl.int32) ^ _LAST_ID)


@triton.jit
def _float_word(word):
    return word.to(tl.float32, bitcast=True)


@triton.jit
def _is_unfiltered(record, live):
    """Whether rows whose records begin at `record` are drawn from all tokens."""
    inverse = _float_word(tl.load(record + _TEMPERATURE, mask=live, other=0))
    k = tl.load(record + _K, mask=live, other=0)
    p = _float_word(tl.load(record + _P, mask=live, other=0))
    min_p = _float_word(tl.load(record + _MIN_P, mask=live, other=0))
    return (inverse != 0) & (k == 0) & (p >= 1) & (min_p == -_INF)


@triton.jit
def _summarise(
    x,  # [W, R] fp32, rounded to the dtype on the wire
    columns,  # [W] of the shard
    S,  # columns that are not padding
    first,  # the id of column 0
    rows,  # [R]
    T,
    tile,
    tiles_s,
    records_ptr,  # [T, WORDS] int32, read
    summary_ptr,  # [PLANES, tiles, T] fp32, written
    WORDS: tl.constexpr,
    NOISE: tl.constexpr,
    FOURS: tl.constexpr,  # `first` and the tile begin on borders of four ids
    SUMS: tl.constexpr,
    MASSES: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
):
    """What this tile shows of each row."""
    live = rows < T
    record = records_ptr + tiles.offset(rows, WORDS)
    plane = tiles.offset(tl.full((), tiles_s, tl.int64), T)
    out = summary_ptr + tiles.offset(tl.full((), tile, tl.int64), T) + rows
    x = tl.where((columns < S)[:, None], x, -_INF)
    bad = tl.max((x != x).to(tl.int32), 0) > 0
    x = tl.where(x != x, -_INF, x)
    peak = tl.max(x, 0)
    score = x
    if NOISE or MASSES:
        inverse = _float_word(tl.load(record + _TEMPERATURE, mask=live, other=0))
        inverse = tl.where(inverse == 0, 1.0, inverse)  # greedy rows: no mass is asked for
    if NOISE:
        unfiltered = _is_unfiltered(record, live)
        if tl.max(unfiltered.to(tl.int32), 0) > 0:
            seed_low = tl.load(record + _SEED, mask=live, other=0)[None, :]
            seed_high = tl.load(record + _SEED + 1, mask=live, other=0)[None, :]
            low = tl.load(record + _POSITION, mask=live, other=0)[None, :]
            high = tl.load(record + _POSITION + 1, mask=live, other=0)[None, :]
            if FOURS:
                group = (first + tl.min(columns, 0)) // 4 + tl.arange(0, W // 4)
                w0, w1, w2, w3 = noise.words(seed_low, seed_high, low, high, group[:, None])
                fours = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [W / 4, R, 2, 2]
                word = tl.reshape(tl.permute(fours, (0, 2, 3, 1)), (W, R))
            else:
                word = noise.word_of((first + columns)[:, None], seed_low, seed_high, low, high)
            real = tl.where(x == -_INF, 0.0, x)
            noisy = noise.add(noise.mul(real, inverse[None, :]), noise.gumbel(word))
            score = tl.where(unfiltered[None, :] & (x != -_INF), noisy, x)
    best = tl.max(score, 0)
    place = tl.min(tl.where(score == best[None, :], columns[:, None], _LAST_ID), 0)
    value = tl.max(tl.where(columns[:, None] == place[None, :], x, -_INF), 0)
    tl.store(out + BEST * plane, best, mask=live)
    tl.store(out + VALUE * plane, value, mask=live)
    tl.store(out + PEAK * plane, tl.where(bad, float("nan"), peak), mask=live)
    ids = tl.where(best == -_INF, _NONE, first + place)
    tl.store(out + IDS * plane, ids.to(tl.float32, bitcast=True), mask=live)
    if SUMS or MASSES:
        base = tl.where(peak == -_INF, 0.0, peak)[None, :]
        below = tl.where(x == base, 0.0, x - base)  # of an infinite peak: 0
        if SUMS:
            tl.store(out + SUM * plane, tl.sum(tl.exp(below), 0), mask=live)
        if MASSES:
            total = tl.sum(tl.exp(below * inverse[None, :]), 0)
            tl.store(out + MASS * plane, total, mask=live)


@triton.jit
def _finish(
    acc,  # [BLOCK_V, BLOCK_T] fp32
    bias_ptr,
    partial_ptr,
    partial_stride_t,
    records_ptr,
    summary_ptr,
    t,
    T,
    tile_s,
    tiles_s,
    S,
    held,
    first,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WORDS: tl.constexpr,
    NOISE: tl.constexpr,
    FOURS: tl.constexpr,
    SUMS: tl.constexpr,
    MASSES: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The epilogue, one rounding, the tile's summary and, where they are wanted, its logits.  Rows
    are taken FUSED_ROWS at a time, as in the GEMM's own `_finish`.
    """
    if BLOCK_T > FUSED_ROWS:
        half: tl.constexpr = BLOCK_T // 2
        low, high = tl.split(tl.permute(tl.reshape(acc, (BLOCK_V, 2, half)), (0, 2, 1)))
        _finish(
            low,
            bias_ptr,
            partial_ptr,
            partial_stride_t,
            records_ptr,
            summary_ptr,
            t,
            T,
            tile_s,
            tiles_s,
            S,
            held,
            first,
            scale,
            softcap,
            HAS_BIAS,
            HAS_SCALE,
            HAS_SOFTCAP,
            WORDS,
            NOISE,
            FOURS,
            SUMS,
            MASSES,
            WRITE,
            half,
            BLOCK_V,
        )
        _finish(
            high,
            bias_ptr,
            partial_ptr,
            partial_stride_t,
            records_ptr,
            summary_ptr,
            t + half,
            T,
            tile_s,
            tiles_s,
            S,
            held,
            first,
            scale,
            softcap,
            HAS_BIAS,
            HAS_SCALE,
            HAS_SOFTCAP,
            WORDS,
            NOISE,
            FOURS,
            SUMS,
            MASSES,
            WRITE,
            half,
            BLOCK_V,
        )
    else:
        columns = tile_s * BLOCK_V + tl.arange(0, BLOCK_V)
        rows = t + tl.arange(0, BLOCK_T)
        acc = epilogue(
            acc, bias_ptr, columns, columns < S, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP
        )
        rounded = tiles.round_to(acc, partial_ptr.dtype.element_ty)
        if WRITE:
            partial = partial_ptr + tiles.offset(rows, partial_stride_t)[None, :]
            mask = (columns < S)[:, None] & (rows < T)[None, :]
            tl.store(partial + columns[:, None], rounded, mask=mask)
        _summarise(
            tiles.widen(rounded),
            columns,
            held,
            first,
            rows,
            T,
            tile_s,
            tiles_s,
            records_ptr,
            summary_ptr,
            WORDS,
            NOISE,
            FOURS,
            SUMS,
            MASSES,
            BLOCK_V,
            BLOCK_T,
        )


@triton.jit
def _fused_kernel(
    hidden_desc,  # [T, H] bf16 or fp16, read in blocks [BLOCK_T, BLOCK_H]
    tail_desc,  # the same matrix in blocks [TAIL_T, BLOCK_H]; hidden_desc where TAIL_T is 0
    weight_desc,  # [S, H] of hidden's dtype, read in blocks [BLOCK_V, BLOCK_H]
    bias_ptr,  # [S] any float, read; partial_ptr again where HAS_BIAS is false
    partial_ptr,  # [T, S] any float, written where WRITE; its dtype rounds the logits
    partial_stride_t,
    records_ptr,  # [T, WORDS] int32, read
    summary_ptr,  # [PLANES, tiles, T] fp32, written
    T,
    S,
    H,
    held,  # columns that are not padding
    first,  # the id of column 0
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WORDS: tl.constexpr,
    NOISE: tl.constexpr,
    FOURS: tl.constexpr,
    SUMS: tl.constexpr,
    MASSES: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TAIL_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    UNIT: tl.constexpr,  # divides S and the row stride; see tiles.unit
):
    S = S // UNIT * UNIT
    partial_stride_t = partial_stride_t // UNIT * UNIT
    tiles_t = tl.cdiv(T, BLOCK_T + TAIL_T)
    tiles_s = tl.cdiv(S, BLOCK_V)
    for tile in range(tl.program_id(0), tiles_t * tiles_s, tl.num_programs(0)):
        tile_s = tile // tiles_t
        t = tile % tiles_t * (BLOCK_T + TAIL_T)
        acc = tl.zeros((BLOCK_V, BLOCK_T), dtype=tl.float32)
        if TAIL_T > 0:
            tail = tl.zeros((BLOCK_V, TAIL_T), dtype=tl.float32)
        # The GEMM's own loop: the same sums in the same order, hence the same logits.
        for h in tl.range(0, H, BLOCK_H, num_stages=STAGES, warp_specialize=WARP_SPECIALIZE):
            w = weight_desc.load([tile_s * BLOCK_V, h])
            acc = tiles.dot(w, hidden_desc.load([t, h]).T, acc)
            if TAIL_T > 0:
                tail = tiles.dot(w, tail_desc.load([t + BLOCK_T, h]).T, tail)
        _finish(
            acc,
            bias_ptr,
            partial_ptr,
            partial_stride_t,
            records_ptr,
            summary_ptr,
            t,
            T,
            tile_s,
            tiles_s,
            S,
            held,
            first,
            scale,
            softcap,
            HAS_BIAS,
            HAS_SCALE,
            HAS_SOFTCAP,
            WORDS,
            NOISE,
            FOURS,
            SUMS,
            MASSES,
            WRITE,
            BLOCK_T,
            BLOCK_V,
        )
        if TAIL_T > 0:
            _finish(
                tail,
                bias_ptr,
                partial_ptr,
                partial_stride_t,
                records_ptr,
                summary_ptr,
                t + BLOCK_T,
                T,
                tile_s,
                tiles_s,
                S,
                held,
                first,
                scale,
                softcap,
                HAS_BIAS,
                HAS_SCALE,
                HAS_SOFTCAP,
                WORDS,
                NOISE,
                FOURS,
                SUMS,
                MASSES,
                WRITE,
                TAIL_T,
                BLOCK_V,
            )


@triton.jit
def _scan_kernel(
    partial_ptr,  # [T, S] any float, read; columns contiguous
    partial_stride_t,
    records_ptr,  # [T, WORDS] int32, read
    summary_ptr,  # [PLANES, tiles, T] fp32, written
    T,
    S,  # columns that are not padding
    first,  # the id of column 0
    WORDS: tl.constexpr,
    NOISE: tl.constexpr,
    FOURS: tl.constexpr,
    SUMS: tl.constexpr,
    MASSES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UNIT: tl.constexpr,  # divides the row stride; see tiles.unit
):
    partial_stride_t = partial_stride_t // UNIT * UNIT
    tiles_s = tl.cdiv(S, BLOCK_V)
    for task in range(tl.program_id(0), tiles_s * tl.cdiv(T, BLOCK_T), tl.num_programs(0)):
        tile = task % tiles_s
        columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        rows = task // tiles_s * BLOCK_T + tl.arange(0, BLOCK_T)
        partial = partial_ptr + tiles.offset(rows, partial_stride_t)[None, :] + columns[:, None]
        mask = (columns < S)[:, None] & (rows < T)[None, :]
        _summarise(
            tiles.widen(tl.load(partial, mask=mask, other=0.0)),
            columns,
            S,
            first,
            rows,
            T,
            tile,
            tiles_s,
            records_ptr,
            summary_ptr,
            WORDS,
            NOISE,
            FOURS,
            SUMS,
            MASSES,
            BLOCK_V,
            BLOCK_T,
        )


@triton.jit
def _pick_kernel(
    summary_ptr,  # [PLANES, tiles, T] fp32, read
    partial_ptr,  # [T, S] any float, read where COUNT > 1; columns contiguous
    partial_stride_t,
    records_ptr,  # [T, WORDS] int32, read
    out_ptr,  # [T, WIDTH] int32, written
    T,
    S,  # columns that are not padding
    first,  # the id of column 0
    tiles_s,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    VALUES_AT: tl.constexpr,  # where in a message the values begin, and the ids
    IDS_AT: tl.constexpr,
    LSE_AT: tl.constexpr,  # -1: not wanted
    MASS_AT: tl.constexpr,
    PLAIN: tl.constexpr,  # the first by logits for every row, and no mark for a NaN
    TILES: tl.constexpr,  # a power of two from `tiles_s` on
    TOOK: tl.constexpr,  # a power of two from min(COUNT, TILES) on
    KEPT: tl.constexpr,  # a power of two from COUNT on, at most TOOK * BLOCK_V
    BLOCK_V: tl.constexpr,
):
    plane = tiles.offset(tl.full((), tiles_s, tl.int64), T)
    tile = tl.arange(0, TILES)
    live = tile < tiles_s
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        row = tl.full((), t, tl.int64)
        record = records_ptr + tiles.offset(row, WORDS)
        out = out_ptr + tiles.offset(row, WIDTH)
        shown = summary_ptr + tiles.offset(tile, T) + t
        peak = tl.load(shown + PEAK * plane, mask=live, other=-_INF)
        bad = tl.max((peak != peak).to(tl.int32), 0) > 0
        peak = tl.where(peak != peak, -_INF, peak)
        if LSE_AT >= 0 or MASS_AT >= 0:
            most = tl.max(peak, 0)
            base = tl.where(most == -_INF, 0.0, most)
            below = tl.where(peak == base, 0.0, peak - base)
            if LSE_AT >= 0:
                sums = tl.load(shown + SUM * plane, mask=live, other=0.0)
                total = tl.sum(sums * tl.exp(below), 0)
                tl.store(out + LSE_AT, most.to(tl.int32, bitcast=True))
                tl.store(out + LSE_AT + 1, total.to(tl.int32, bitcast=True))
            if MASS_AT >= 0:
                inverse = _float_word(tl.load(record + _TEMPERATURE))
                inverse = tl.where(inverse == 0, 1.0, inverse)
                sums = tl.load(shown + MASS * plane, mask=live, other=0.0)
                total = tl.sum(sums * tl.exp(below * inverse), 0)
                tl.store(out + MASS_AT, most.to(tl.int32, bitcast=True))
                tl.store(out + MASS_AT + 1, total.to(tl.int32, bitcast=True))
        best = peak
        if not PLAIN:
            best = tl.load(shown + BEST * plane, mask=live, other=-_INF)
        key = _keys(best, tile)
        slot = tl.arange(0, KEPT)
        inside = slot < COUNT
        alone = False
        if not PLAIN:
            alone = _is_unfiltered(record, True)
        if COUNT > 1 or PLAIN:
            tile_key = tl.topk(key, TOOK)
            took = _key_ids(tile_key)
            column = took[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
            there = (took >= 0)[:, None] & (column < S)
            if not PLAIN:
                there = there & (alone == 0)
            partial = partial_ptr + tiles.offset(row, partial_stride_t)
            x = tiles.widen(tl.load(partial + column, mask=there, other=0.0))
            x = tl.where(there & (x == x), x, -_INF)
            candidates = tl.reshape(_keys(x, first + column), (TOOK * BLOCK_V,))
            candidates = tl.topk(candidates, KEPT)
            values, ids = _key_values(candidates), _key_ids(candidates)
        else:
            values = tl.full((KEPT,), -_INF, tl.float32)
            ids = tl.full((KEPT,), _NONE, tl.int32)
        if not PLAIN:
            # The best tile knows the one candidate of a row that needs no more.
            winner = tl.max(key, 0)
            where = (key == winner) & (winner != _NO_KEY)
            value = tl.load(shown + VALUE * plane, mask=where, other=-_INF)
            token = tl.load(shown + IDS * plane, mask=where, other=0.0).to(tl.int32, bitcast=True)
            only = (COUNT == 1) | alone
            value = tl.max(tl.where(where, value, -_INF), 0)
            token = tl.max(tl.where(where, token, _NONE), 0)
            values = tl.where(only & (slot == 0), value, values)
            ids = tl.where(only & (slot == 0), token, ids)
        if not PLAIN:
            ids = tl.where((slot == 0) & bad, _NAN_SEEN, ids)
        tl.store(out + VALUES_AT + slot, values.to(tl.int32, bitcast=True), mask=inside)
        tl.store(out + IDS_AT + slot, ids, mask=inside)


@triton.jit
def _merge_kernel(
    messages_ptr,  # [N, B, WIDTH] int32, read
    records_ptr,  # [B, WORDS] int32, read
    mass_ptr,  # [B] fp64, read where BY_MASS: all logits' mass in units of a weight
    ids_ptr,  # [B] int64, written
    status_ptr,  # [B] uint8, written
    value_ptr,  # [B] fp32, written: the logit of the token
    N,
    B,
    shard,
    vocab_size,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    BY_MASS: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two from N * COUNT on
):
    index = tl.arange(0, SLOTS)
    rank, place = index // COUNT, index % COUNT
    there = index < N * COUNT
    held = tl.minimum(tl.maximum(vocab_size - rank * shard, 0), shard)
    for b in range(tl.program_id(0), B, tl.num_programs(0)):
        # A row's parameters, once per slot: the interpreter cannot widen a comparison of scalars.
        record = records_ptr + tiles.offset(tl.full((SLOTS,), b, tl.int64), WORDS)
        inverse = _float_word(tl.load(record + _TEMPERATURE))
        k = tl.load(record + _K)
        p = _float_word(tl.load(record + _P))
        min_p = _float_word(tl.load(record + _MIN_P))
        greedy = inverse == 0
        unfiltered = _is_unfiltered(record, index >= 0)
        message = messages_ptr + tiles.offset(rank * B + b, WIDTH) + place
        sent = tl.load(message + COUNT, mask=there, other=_NONE)
        value = _float_word(tl.load(message, mask=there, other=0))
        nan = tl.max(((sent == _NAN_SEEN) & (place == 0)).to(tl.int32), 0)
        key = tl.where(there & (sent >= 0), _keys(value, sent), _NO_KEY)
        # Behind the last that a shard sent it may keep something back, unless it sent all.
        more = there & (place == COUNT - 1) & (held > COUNT)
        last = tl.max(tl.where(more, key, _NO_KEY), 0)
        key = tl.sort(key, descending=True)

        ids, valid = _key_ids(key), key != _NO_KEY
        x = tl.where(valid, _key_values(key), 0.0)
        peak = tl.max(tl.where(valid, x, -_INF), 0)
        below = tl.where(x == peak, 0.0, noise.mul(noise.add(x, -peak), inverse))
        kept = valid & (below >= min_p) & ((k == 0) | (index < k))
        kept_count = tl.sum(kept.to(tl.int32), 0)
        certain = valid & (key >= last)
        certain_count = tl.sum(certain.to(tl.int32), 0)
        # Whether what the filters leave ends among the certain ones.
        bounded = (k > 0) & (kept_count >= k) & (k <= certain_count)
        bounded = bounded | (index * 0 + kept_count < certain_count) | (key * 0 + last == _NO_KEY)
        weights = tl.where(valid, noise.weight(tl.where(valid, below, 0.0)), 0)
        through = tl.cumsum(weights, 0)
        before = (through - weights).to(tl.float64)
        total = tl.sum(tl.where(kept, weights, 0), 0).to(tl.float64) + tl.zeros_like(before)
        share = p.to(tl.float64)
        covered = bounded | greedy | unfiltered
        if BY_MASS:
            whole = tl.load(mass_ptr + tl.full((SLOTS,), b, tl.int32))
            by_mass = (min_p == -_INF) & (k == 0) & (bounded == 0)
            total = tl.where(by_mass, whole, total)
            reached = tl.max(tl.where(certain, through, 0), 0).to(tl.float64)
            covered = covered | (by_mass & (share * whole <= reached))
        kept = kept & ((p >= 1) | (before < share * total) | (index == 0))
        eligible = tl.where(greedy, index == 0, unfiltered | kept) & valid
        word = noise.word_of(
            tl.where(valid, ids, 0),
            tl.load(record + _SEED),
            tl.load(record + _SEED + 1),
            tl.load(record + _POSITION),
            tl.load(record + _POSITION + 1),
        )
        score = tl.where(greedy, x, noise.add(noise.mul(x, inverse), noise.gumbel(word)))
        drawn = tl.where(eligible, _keys(score, ids), _NO_KEY)
        chosen = eligible & (drawn == tl.max(drawn, 0))
        status = tl.where(covered, _OK, _MISSED)
        status = tl.max(tl.where(tl.max(valid.to(tl.int32), 0) == 0, _EMPTY, status), 0)
        status = tl.where(nan > 0, _NAN, status)
        token = tl.max(tl.where(chosen, ids, _NONE), 0)
        tl.store(ids_ptr + b, tl.where(status == _OK, token, _NONE).to(tl.int64))
        tl.store(status_ptr + b, status.to(tl.uint8))
        tl.store(value_ptr + b, tl.max(tl.where(chosen, x, -_INF), 0))


@dataclass(frozen=True)
class Messages:
    """How a call's messages look, and what a summary must hold for them."""

    words: int  # of a record
    width: int  # of a message
    count: int  # candidates, per shard and row
    lse_at: int = -1  # where the maximum and the sum for log-probabilities begin; -1: not wanted
    mass_at: int = -1  # the same for a nucleus
    noise: bool = True  # whether any row may be drawn from all tokens

    def constants(self) -> dict[str, bool | int]:
        return {
            "WORDS": self.words,
            "NOISE": self.noise,
            "SUMS": self.lse_at >= 0,
            "MASSES": self.mass_at >= 0,
        }


def summary_shape(rows: int, shard: int, width: int = SCAN_COLUMNS) -> tuple[int, int, int]:
    """[PLANES, tiles, T] of the summary by tiles of `width` columns."""
    return PLANES, triton.cdiv(shard, width), rows


def can_fuse(config: GemmConfig) -> bool:
    """Whether a GEMM of this config summarises its own tiles: it holds whole sums, and not so many
    rows that the unrolled summary takes minutes to compile (FUSED_MOST_ROWS).
    """
    return config.kind == "bulk" and config.splits == 1 and config.rows <= FUSED_MOST_ROWS


def fused(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    records: torch.Tensor,
    summary: torch.Tensor,
    messages: Messages,
    *,
    first: int,
    held: int,
    scale: float,
    softcap: float | None,
    partial: torch.Tensor,
    write: bool,
    config: GemmConfig,
) -> None:
    """hidden [T, H] and weight [S, H] -> summary [PLANES, cdiv(S, block_v), T] fp32, by the GEMM of
    `config` (`can_fuse`), which bulk loads must be able to feed.

    The logits are rounded to the dtype of `partial`, which is written, [T, S], only with `write`.
    `first` is the id of column 0, `held` says how many columns are not padding.
    """
    (T, H), S = hidden.shape, weight.shape[0]
    total = triton.cdiv(T, config.rows) * triton.cdiv(S, config.block_v)
    hidden_desc = TensorDescriptor.from_tensor(hidden, [config.block_t, config.block_h])
    tail_desc = hidden_desc
    if config.tail_t:
        tail_desc = TensorDescriptor.from_tensor(hidden, [config.tail_t, config.block_h])
    stride = partial.stride(0) if write else S
    with tiles.on(hidden):
        _fused_kernel[tiles.grid(total)](
            hidden_desc=hidden_desc,
            tail_desc=tail_desc,
            weight_desc=TensorDescriptor.from_tensor(weight, [config.block_v, config.block_h]),
            partial_ptr=partial,
            partial_stride_t=stride,
            records_ptr=records,
            summary_ptr=summary,
            T=T,
            S=S,
            H=H,
            held=held,
            first=first,
            **_Epilogue(bias, scale, softcap).arguments(partial),
            **messages.constants(),
            FOURS=first % 4 == 0,
            WRITE=write,
            BLOCK_T=config.block_t,
            TAIL_T=config.tail_t,
            BLOCK_V=config.block_v,
            BLOCK_H=config.block_h,
            STAGES=config.num_stages,
            WARP_SPECIALIZE=config.warp_specialize,
            UNIT=tiles.unit(S, stride),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def scan(
    partial: torch.Tensor,
    records: torch.Tensor,
    summary: torch.Tensor,
    messages: Messages,
    *,
    first: int,
    held: int,
) -> None:
    """partial [T, S], columns contiguous -> summary [PLANES, cdiv(S, SCAN_COLUMNS), T] fp32: each
    logit is read once.
    """
    T = partial.shape[0]
    tasks = triton.cdiv(max(held, 1), SCAN_COLUMNS) * triton.cdiv(T, SCAN_ROWS)
    with tiles.on(partial):
        _scan_kernel[tiles.grid(tasks)](
            partial_ptr=partial,
            partial_stride_t=partial.stride(0),
            records_ptr=records,
            summary_ptr=summary,
            T=T,
            S=held,
            first=first,
            **messages.constants(),
            FOURS=first % 4 == 0,
            BLOCK_T=SCAN_ROWS,
            BLOCK_V=SCAN_COLUMNS,
            UNIT=tiles.unit(partial.stride(0)),
            num_warps=4,
        )


def pick_sizes(count: int, tiles_s: int) -> tuple[dict[str, int], int]:
    """(constants of `_pick_kernel`, warps) for `count` candidates of `tiles_s` tiles.  Fewer warps
    spill where 4096 keys are sorted.
    """
    slots, kept = max(2, next_power_of_2(tiles_s)), max(2, next_power_of_2(count))
    return {"TILES": slots, "TOOK": min(slots, kept), "KEPT": kept}, 4 if kept < 32 else 16


def merge_sizes(ranks: int, count: int) -> tuple[int, int]:
    """(slots, warps) of `_merge_kernel`."""
    slots = max(2, next_power_of_2(ranks * count))
    return slots, 1 if slots <= 256 else 4 if slots <= 512 else 8


def pick(
    summary: torch.Tensor,
    partial: torch.Tensor,
    records: torch.Tensor,
    out: torch.Tensor,
    messages: Messages,
    *,
    first: int,
    held: int,
    block_v: int,
    values_at: int = 0,
    plain: bool = False,
) -> None:
    """A summary by tiles of `block_v` columns -> messages [T, width] int32: `count` values at
    `values_at`, as many ids behind them, and the sums.

    partial [T, S] is read where a row needs more than one candidate.  `plain` takes the first by
    logits alone for every row.
    """
    tiles_s, T = summary.shape[1:]
    count = messages.count
    sizes, num_warps = pick_sizes(count, tiles_s)
    with tiles.on(summary):
        _pick_kernel[tiles.grid(T)](
            summary_ptr=summary,
            partial_ptr=partial,
            partial_stride_t=partial.stride(0),
            records_ptr=records,
            out_ptr=out,
            T=T,
            S=held,
            first=first,
            tiles_s=tiles_s,
            WORDS=messages.words,
            WIDTH=messages.width,
            COUNT=count,
            VALUES_AT=values_at,
            IDS_AT=values_at + count,
            LSE_AT=messages.lse_at,
            MASS_AT=messages.mass_at,
            PLAIN=plain,
            BLOCK_V=block_v,
            **sizes,
            num_warps=num_warps,
        )


def merge(
    messages: torch.Tensor,
    records: torch.Tensor,
    mass: torch.Tensor | None,
    count: int,
    shard: int,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """messages [N, B, width] int32 of all shards, records [B, words] int32 of the own rows and, for
    a nucleus, all logits' mass [B] fp64 -> ids [B] int64, status [B] uint8, the tokens' logits [B]
    fp32.
    """
    ranks, rows, width = messages.shape
    ids = torch.empty(rows, dtype=torch.int64, device=messages.device)
    status = torch.empty(rows, dtype=torch.uint8, device=messages.device)
    value = torch.empty(rows, dtype=torch.float32, device=messages.device)
    if rows == 0:
        return ids, status, value
    slots, num_warps = merge_sizes(ranks, count)
    with tiles.on(messages):
        _merge_kernel[tiles.grid(rows)](
            messages_ptr=messages,
            records_ptr=records,
            mass_ptr=value if mass is None else mass,
            ids_ptr=ids,
            status_ptr=status,
            value_ptr=value,
            N=ranks,
            B=rows,
            shard=shard,
            vocab_size=vocab_size,
            WORDS=records.stride(0),
            WIDTH=width,
            COUNT=count,
            BY_MASS=mass is not None,
            SLOTS=slots,
            num_warps=num_warps,
        )
    return ids, status, value
