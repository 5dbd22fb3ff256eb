"""A draw in two halves: what a shard finds among its own columns, and what the owner of a row makes
of all shards' findings.  Twin of `lmhead.kernels.sample`.

    reduce   partial [T, S], records of all T rows -> messages [T, form.message_words] int32
    merge    messages [N, B, words], records of the own rows -> what was drawn

Tokens have one order: by value, largest first, and among equals by id, lowest first.  A key, an
int64 of value and id, puts both into one comparison, so ties never depend on a library, on tiles
or on N.  A shard sends its first C tokens in that order; whatever it keeps back comes after the
last that it sent.  So of all shards' candidates in order, those up to the earliest of these "last"
ones are certainly the first of the whole vocabulary.

Each filter keeps a prefix of that order: min-p what is at least so likely, top-k the first k, top-p
the first whose predecessors have less than p of the mass.  A row is covered where its prefix ends
among the certain ones.  The mass is of what min-p and top-k left where that is known, and
otherwise, with top-p alone, of all logits: then each shard's maximum and sum say it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lmhead import noise, sampling
from lmhead.sampling import Records

# Elements of a block of logits that is widened to fp32 at a time (4 MiB), and the columns among
# which one maximum is taken before candidates are looked for.
BLOCK_ELEMENTS = 1 << 20
BAND = 32
# What `noise.gumbel_near` may be off by where it can win, many times over.
MARGIN = 1.0

NONE, NAN_SEEN = -1, -2
_LAST_ID = 0x7FFFFFFF
_NO_KEY = torch.iinfo(torch.int64).min


def keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """fp32 values and int64 ids -> int64 that is larger for what comes first; -inf comes last, as
    nothing at all.
    """
    bits = (values + 0.0).view(torch.int32)  # of the two zeros, the positive one
    ordered = (bits ^ ((bits >> 31) & _LAST_ID)).to(torch.int64)
    key = (ordered << 32) | (_LAST_ID - ids)
    return torch.where(values == -math.inf, _NO_KEY, key)


def key_values(key: torch.Tensor) -> torch.Tensor:
    """The values that keys were made of; -inf for none."""
    ordered = (key >> 32).to(torch.int32)
    bits = ordered ^ ((ordered >> 31) & _LAST_ID)
    return torch.where(key == _NO_KEY, -math.inf, bits.view(torch.float32))


def key_ids(key: torch.Tensor) -> torch.Tensor:
    """The ids that keys were made of; `NONE` for none."""
    return torch.where(key == _NO_KEY, NONE, _LAST_ID - (key & 0xFFFFFFFF))


def first_keys(x: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` keys, in order, of each row of x [R, W] fp32, whose columns are the ids
    from `first` on, [R, min(count, W)]; and each row's maximum [R], NaN where it holds one.

    A token among the first `count` lies in one of the first `count` bands by their maxima: of any
    other band's tokens at least so many maxima come before.
    """
    rows, width = x.shape
    count = min(count, width)
    if width % BAND:
        x = torch.nn.functional.pad(x, (0, -width % BAND), value=-math.inf)
    bands = x.view(rows, -1, BAND)
    peaks = bands.amax(2)
    if bands.shape[1] > count:
        numbers = torch.arange(bands.shape[1], device=x.device)
        chosen = key_ids(keys(peaks, numbers).topk(count, dim=1).values)[:, :, None]
        bands = bands.gather(1, chosen.clamp(min=0).expand(-1, -1, BAND))
        # Where fewer bands than asked for hold anything, the rest stands for none.
        bands = bands.masked_fill_(chosen < 0, -math.inf)
    else:
        chosen = torch.arange(bands.shape[1], device=x.device)[None, :, None]
    ids = first + chosen * BAND + torch.arange(BAND, device=x.device)
    return keys(bands, ids).view(rows, -1).topk(count, dim=1).values, peaks.amax(1)


@dataclass
class _Found:
    """What a block of rows has shown so far."""

    keys: list[torch.Tensor]  # [R, C] or less of each block, by the logits
    drawn: torch.Tensor  # [R], of rows without filters, by logits and noise
    value: torch.Tensor  # [R], the logit under `drawn`
    nan: torch.Tensor  # [R]
    peak: torch.Tensor  # [R], the largest logit
    mass: torch.Tensor  # [R], sum of exp((x - peak) / temperature)
    raw_peak: torch.Tensor
    raw_mass: torch.Tensor
    top: list[torch.Tensor]  # [R, n] or less of each block, keys by unedited logits


def reduce(
    partial: torch.Tensor,
    first: int,
    vocab_size: int,
    records: Records,
    mask: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """partial [T, S], columns first..first + S - 1 of all T rows -> out [T, form.message_words]
    int32.

    `mask` [T, >= S] bool, true where a token is allowed.  Columns from `vocab_size` on are padding.
    Works in blocks, so that no fp32 copy of a bf16 partial ever exists.  Returns `out`.
    """
    width = max(0, min(partial.shape[1], vocab_size - first))
    # Rows as wide as possible: every block of a row has first candidates of its own.
    columns = max(BAND, min(-(-width // BAND) * BAND, BLOCK_ELEMENTS))
    rows = max(1, BLOCK_ELEMENTS // columns)
    for row in range(0, partial.shape[0], rows):
        part = slice(row, row + rows)
        own = records.rows(part)
        allowed = None if mask is None else mask[part, :width]
        _reduce_rows(partial[part, :width], first, own, allowed, columns, out[part])
    return out


def _reduce_rows(
    partial: torch.Tensor,
    first: int,
    records: Records,
    mask: torch.Tensor | None,
    columns: int,
    out: torch.Tensor,
) -> None:
    form, device = records.form, partial.device
    rows = partial.shape[0]

    def full(value: float, *shape: int) -> torch.Tensor:
        return torch.full((rows, *shape), value, dtype=torch.float32, device=device)

    def none(*shape: int) -> torch.Tensor:
        return torch.full((rows, *shape), _NO_KEY, dtype=torch.int64, device=device)

    found = _Found(
        [none(form.candidates)],
        none(),
        full(-math.inf),
        torch.zeros(rows, dtype=torch.bool, device=device),
        full(-math.inf),
        full(0.0),
        full(-math.inf),
        full(0.0),
        [none(form.top_sent)],
    )
    asked = full(0.0, form.asked)
    noisy = _chosen(records.unfiltered)
    for start in range(0, partial.shape[1], columns):
        raw = partial[:, start : start + columns].to(torch.float32)
        begin = first + start
        if form.logprobs:
            _add_mass(found, raw, None)
        if form.asked:
            asked += gather(raw, records.asked_ids, begin, 0.0)
        if form.top:
            found.top.append(first_keys(raw, begin, form.top_sent)[0])
        allowed = None if mask is None else mask[:, start : start + raw.shape[1]]
        x = edit(raw, begin, records, allowed)
        if form.by_mass:
            _add_mass(found, x, records.inverse_temperature)
        first_of, peak = first_keys(x, begin, form.candidates)
        found.keys.append(first_of)
        found.nan |= peak.isnan()
        if noisy is not None:
            _add_drawn(found, x, begin, records, noisy)
    _write(found, asked, partial, first, records, noisy is not None, out)


def _chosen(mask: torch.Tensor) -> torch.Tensor | None:
    """The rows that a mask names: indices on a CPU, None where there are none; elsewhere the mask
    itself, since counting would wait for the device.
    """
    if mask.device.type != "cpu":
        return mask
    indices = mask.nonzero().squeeze(1)
    return indices if indices.numel() else None


def _add_mass(found: _Found, x: torch.Tensor, inverse: torch.Tensor | None) -> None:
    """Take a block's logits into the running maximum and sum, of unedited ones (`inverse` None) or
    of those that are drawn from.
    """
    old_peak, old_mass = (
        (found.raw_peak, found.raw_mass) if inverse is None else (found.peak, found.mass)
    )
    peak = torch.maximum(old_peak, x.amax(1))
    factor = None if inverse is None else inverse[:, None]
    mass = old_mass * _relative(old_peak[:, None], peak, factor).squeeze(1)
    mass = mass + _relative(x, peak, factor).sum(1)
    if inverse is None:
        found.raw_peak, found.raw_mass = peak, mass
    else:
        found.peak, found.mass = peak, mass


def _relative(x: torch.Tensor, peak: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """exp((x - peak) * factor), 1 where x is the peak, be it infinite, and 0 where x is -inf."""
    d = x - peak[:, None]
    infinite = (peak.abs() == math.inf)[:, None]
    d = torch.where(infinite, torch.where(x == math.inf, 0.0, -math.inf), d)
    return (d if factor is None else d * factor).exp_()


def _add_drawn(
    found: _Found, x: torch.Tensor, begin: int, records: Records, noisy: torch.Tensor
) -> None:
    """The best of logits and noise, for the rows without filters.

    On a CPU the noise of most tokens is taken from fast logarithms, and only what comes close to
    the best is looked at in full.
    """
    seeds, positions, inverse = records.seeds, records.positions, records.inverse_temperature
    if noisy.dtype == torch.bool:
        word = noise.words_of_range(seeds, positions, begin, x.shape[1])
        score = x * inverse[:, None] + noise.gumbel(word)
        ids = begin + torch.arange(x.shape[1], device=x.device)
        best, column = keys(score, ids).max(1)
        value = x.gather(1, column[:, None]).squeeze(1)
    else:
        if noisy.numel() < x.shape[0]:
            x = x[noisy]
        seeds, positions, inverse = seeds[noisy], positions[noisy], inverse[noisy]
        # By the four ids that share a call of Philox, each lane of them for itself.
        lead = begin % noise.LANES
        tail = -(lead + x.shape[1]) % noise.LANES
        fours = torch.nn.functional.pad(x, (lead, tail), value=-math.inf) if lead or tail else x
        fours = fours.view(x.shape[0], -1, noise.LANES)
        first = begin // noise.LANES
        lanes = noise.lanes_of_range(seeds, positions, first, fours.shape[1])
        near = None
        for lane, word in enumerate(lanes):
            score = noise.gumbel_near(word).addcmul_(fours[:, :, lane], inverse[:, None])
            near = score if near is None else torch.maximum(near, score, out=near)
        assert near is not None
        row, four = (near >= (near.amax(1) - MARGIN)[:, None]).nonzero(as_tuple=True)
        word = torch.stack([word[row, four] for word in lanes], 1)
        score = fours[row, four] * inverse[row][:, None] + noise.gumbel(word)
        ids = (first + four)[:, None] * noise.LANES + torch.arange(noise.LANES)
        best = torch.full(noisy.shape, _NO_KEY, dtype=torch.int64)
        best.scatter_reduce_(0, row, keys(score, ids).amax(1), "amax")
        column = (key_ids(best) - begin).clamp_(min=0)
        value = x.gather(1, column[:, None]).squeeze(1)
        best = torch.full_like(found.drawn, _NO_KEY).index_copy_(0, noisy, best)
        value = torch.zeros_like(found.value).index_copy_(0, noisy, value)
    better = best > found.drawn
    found.drawn = torch.where(better, best, found.drawn)
    found.value = torch.where(better, value, found.value)


def edit(x: torch.Tensor, begin: int, records: Records, mask: torch.Tensor | None) -> torch.Tensor:
    """The logits that are drawn from, of columns `begin` on: bias, repetition, frequency and
    presence penalties, mask.  A copy where there is anything to do.
    """
    form = records.form
    if form.biased:
        x = _scattered(x, records.bias_ids, begin, records.bias_values, add=True)
    if form.counted:
        repetition, frequency, presence = (value[:, None] for value in records.penalties)
        old = gather(x, records.token_ids, begin, 0.0)
        new = torch.where(old > 0, old / repetition, old * repetition)
        count = records.token_counts
        new = new - count.to(torch.float32) * frequency
        new = torch.where(count > 0, new - presence, new)
        x = _scattered(x, records.token_ids, begin, new, add=False)
    if mask is not None:
        x = x.masked_fill(~mask, -math.inf)
    return x


def gather(x: torch.Tensor, ids: torch.Tensor, begin: int, other: float) -> torch.Tensor:
    """x [R, W] at ids [R, M], of which x holds `begin` on; `other` for those that it does not."""
    place = ids.to(torch.int64) - begin
    inside = (ids >= 0) & (place >= 0) & (place < x.shape[1])
    found = x.gather(1, place.clamp(0, max(0, x.shape[1] - 1)))
    return torch.where(inside, found, other)


def _scattered(
    x: torch.Tensor, ids: torch.Tensor, begin: int, values: torch.Tensor, *, add: bool
) -> torch.Tensor:
    """A copy of x [R, W] with values [R, M] added or put at ids; the others go into a column that
    is dropped.
    """
    place = ids.to(torch.int64) - begin
    inside = (ids >= 0) & (place >= 0) & (place < x.shape[1])
    place = torch.where(inside, place, x.shape[1])
    wide = torch.nn.functional.pad(x, (0, 1))
    wide = wide.scatter_add_(1, place, values) if add else wide.scatter_(1, place, values)
    return wide[:, :-1].contiguous()


def _write(
    found: _Found,
    asked: torch.Tensor,
    partial: torch.Tensor,
    first: int,
    records: Records,
    noisy: bool,
    out: torch.Tensor,
) -> None:
    form = records.form
    parts = form.slices()
    first_of = torch.cat(found.keys, 1).topk(form.candidates, 1).values
    values, ids = key_values(first_of), key_ids(first_of)
    if noisy:
        alone = records.unfiltered
        values[:, 0] = torch.where(alone, found.value, values[:, 0])
        ids[:, 0] = torch.where(alone, key_ids(found.drawn), ids[:, 0])
        ids[:, 1:] = torch.where(alone[:, None], NONE, ids[:, 1:])
    ids[:, 0] = torch.where(found.nan, NAN_SEEN, ids[:, 0])

    def put(name: str, what: torch.Tensor) -> None:
        out[:, parts[name]] = what.view(torch.int32) if what.is_floating_point() else what

    put("values", values)
    put("ids", ids)
    if form.raw:
        put("raws", gather_wide(partial, ids, first))
    if form.by_mass:
        put("mass", torch.stack([found.peak, found.mass], 1))
    if form.logprobs:
        put("lse", torch.stack([found.raw_peak, found.raw_mass], 1))
    if form.asked:
        put("asked", asked)
    if form.top_sent:
        top = torch.cat(found.top, 1).topk(form.top_sent, 1).values
        put("top_values", key_values(top))
        put("top_ids", key_ids(top))


def gather_wide(partial: torch.Tensor, ids: torch.Tensor, first: int) -> torch.Tensor:
    """partial [R, W] at global ids [R, M], fp32; 0 for those of another shard."""
    if partial.shape[1] == 0:
        return torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    return gather(partial, ids, first, 0.0).to(torch.float32)


@dataclass
class Merged:
    """What the owner of the rows makes of the messages; `Sample` without its route."""

    ids: torch.Tensor
    status: torch.Tensor
    logprobs: torch.Tensor | None
    asked_logprobs: torch.Tensor | None
    top_ids: torch.Tensor | None
    top_logprobs: torch.Tensor | None


# A kernel that merges: messages, records, mass [B] fp64 or None, C, S, V -> ids, status and the
# tokens' logits; see `lmhead.kernels.sample.merge`.
MergeKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, int, int, int],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor],
]


def merge(
    messages: torch.Tensor,
    records: Records,
    shard: int,
    vocab_size: int,
    kernel: MergeKernel | None = None,
) -> Merged:
    """messages [N, B, form.message_words] int32 of all shards -> what the own B rows draw.  A
    `kernel` finds the tokens, where logits are not edited; the log-probabilities are made here.
    """
    form = records.form
    parts = form.slices()

    def floats(name: str) -> torch.Tensor:
        return messages[:, :, parts[name]].contiguous().view(torch.float32)

    ids = messages[:, :, parts["ids"]].to(torch.int64)
    mass = None
    if form.by_mass:
        values = torch.where(ids >= 0, floats("values"), -math.inf)
        inverse = records.inverse_temperature[:, None]
        mass = _total_mass(floats("mass"), values.amax((0, 2))[:, None], inverse)
    if kernel is None:
        tokens, status, chosen = _merge_keys(messages, ids, mass, records, shard, vocab_size)
    else:
        whole = None if mass is None else mass.squeeze(1).contiguous()
        tokens, status, chosen = kernel(
            messages, records.words, whole, form.candidates, shard, vocab_size
        )
    found = Merged(tokens, status, *(None,) * 4)
    if form.logprobs:
        _add_logprobs(
            found,
            chosen,
            floats("lse"),
            floats("asked"),
            torch.where(
                messages[:, :, parts["top_ids"]] >= 0,
                keys(floats("top_values"), messages[:, :, parts["top_ids"]].to(torch.int64)),
                _NO_KEY,
            ),
            records,
            shard,
        )
    return found


def _merge_keys(
    messages: torch.Tensor,
    ids: torch.Tensor,  # [N, B, C] int64
    mass: torch.Tensor | None,  # [B, 1] fp64
    records: Records,
    shard: int,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [B], status [B], the tokens' unedited logits [B])."""
    form = records.form
    parts = form.slices()

    def flat(name: str) -> torch.Tensor:
        part = messages[:, :, parts[name]].contiguous().view(torch.float32)
        return part.transpose(0, 1).flatten(1)

    nan = (ids[:, :, 0] == NAN_SEEN).any(0)
    ids = ids.transpose(0, 1).flatten(1)
    key = torch.where(ids >= 0, keys(flat("values"), ids), _NO_KEY)
    # A shard that has sent all it has keeps nothing back.
    begins = torch.arange(messages.shape[0], device=messages.device) * shard
    held = (vocab_size - begins).clamp(0, shard)
    ends = key.unflatten(1, (-1, form.candidates))[:, :, -1]
    last = torch.where(held <= form.candidates, _NO_KEY, ends).amax(1)
    ordered, order = key.sort(dim=1, descending=True)
    drawn, covered = _draw(ordered, last, records, mass)
    status = torch.where(covered, sampling.OK, sampling.MISSED)
    status = torch.where(ordered[:, 0] == _NO_KEY, sampling.EMPTY, status)
    status = torch.where(nan, sampling.NAN, status).to(torch.uint8)
    place = drawn[:, None]
    tokens = torch.where(status == sampling.OK, key_ids(ordered).gather(1, place).squeeze(1), NONE)
    raws = flat("raws" if form.raw else "values").gather(1, order)
    return tokens, status, raws.gather(1, place).squeeze(1)


def _draw(
    ordered: torch.Tensor,  # [B, M] keys, in order
    last: torch.Tensor,  # [B] the earliest key that a shard may keep something back behind
    records: Records,
    whole: torch.Tensor | None,  # [B, 1] fp64, the mass of all logits in units of a weight
) -> tuple[torch.Tensor, torch.Tensor]:
    """(where in the order the drawn token stands, whether the candidates cover the row)."""
    x, ids, valid = key_values(ordered), key_ids(ordered), ordered != _NO_KEY
    inverse, k, p = records.inverse_temperature[:, None], records.k[:, None], records.p[:, None]
    index = torch.arange(x.shape[1], device=x.device)
    peak = x[:, :1]
    d = torch.where(x == peak, 0.0, (x - peak) * inverse)
    kept = valid & (d >= records.log_min_p[:, None]) & ((k == 0) | (index < k))
    kept_count = kept.sum(1, keepdim=True)
    certain = (ordered >= last[:, None]) & valid
    certain_count = certain.sum(1, keepdim=True)
    exhausted = (last == _NO_KEY)[:, None]
    bounded = (
        exhausted
        | (kept_count < certain_count)
        | ((k > 0) & (kept_count >= k) & (k <= certain_count))
    )
    weights = torch.where(valid, noise.weight(d), 0)
    through = weights.cumsum(1)
    before = (through - weights).to(torch.float64)
    total = torch.where(kept, weights, 0).sum(1, keepdim=True).to(torch.float64)
    covered = bounded
    if whole is not None:
        by_mass = (records.log_min_p[:, None] == -math.inf) & (k == 0) & ~bounded
        total = torch.where(by_mass, whole, total)
        reached = torch.where(certain, through, 0).amax(1, keepdim=True).to(torch.float64)
        covered = covered | (by_mass & (reached >= p.to(torch.float64) * whole))
    limit = p.to(torch.float64) * total
    kept = kept & ((p >= 1) | (before < limit) | (index == 0))
    greedy, unfiltered = records.greedy[:, None], records.unfiltered[:, None]
    eligible = torch.where(greedy, index == 0, torch.where(unfiltered, valid, kept))
    word = noise.words(records.seeds[:, None], records.positions[:, None], ids.clamp(min=0))
    score = torch.where(greedy, x, x * inverse + noise.gumbel(word))
    drawn = torch.where(eligible, keys(score, ids), _NO_KEY).argmax(1)
    return drawn, (covered | greedy | unfiltered).squeeze(1)


def _total_mass(mass: torch.Tensor, peak: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Sum of exp((x - peak) / temperature) over all columns, in units of a weight; fp64 [B, 1]."""
    peaks, sums = mass[:, :, 0].to(torch.float64), mass[:, :, 1].to(torch.float64)
    shifted = torch.where(
        peaks == peak.squeeze(1), 0.0, (peaks - peak.squeeze(1)) * inverse.squeeze(1)
    )
    shifted = torch.where(sums > 0, shifted, -math.inf)
    return ((shifted.exp() * sums).sum(0) * 2.0**noise.WEIGHT_BITS)[:, None]


def _add_logprobs(
    found: Merged,
    chosen: torch.Tensor,  # [B] fp32, unedited
    lse: torch.Tensor,  # [N, B, 2]
    asked: torch.Tensor,  # [N, B, L]
    top: torch.Tensor,  # [N, B, n] keys
    records: Records,
    shard: int,
) -> None:
    form = records.form
    peak = lse[:, :, 0].amax(0)
    sums = lse[:, :, 1].to(torch.float64)
    whole = (sums * _relative(lse[:, :, 0].t(), peak, None).t()).sum(0).log()

    def logprob(x: torch.Tensor) -> torch.Tensor:
        """[B, M] fp32 logits -> their log-probabilities."""
        d = torch.where(x == peak[:, None], 0.0, x - peak[:, None])
        return (d.to(torch.float64) - whole[:, None]).to(torch.float32)

    nan = torch.full_like(chosen, math.nan)
    found.logprobs = torch.where(found.ids < 0, nan, logprob(chosen[:, None]).squeeze(1))
    if form.asked:
        ids = records.asked_ids.to(torch.int64)
        owner = ids.clamp(min=0) // shard
        value = asked.gather(0, owner[None].clamp(max=asked.shape[0] - 1)).squeeze(0)
        found.asked_logprobs = torch.where(ids < 0, nan[:, None], logprob(value))
    if form.top:
        best = top.transpose(0, 1).flatten(1).sort(dim=1, descending=True).values
        best = torch.nn.functional.pad(best, (0, max(0, form.top - best.shape[1])), value=_NO_KEY)
        best = best[:, : form.top]
        found.top_ids = key_ids(best)
        lacking = found.top_ids < 0
        found.top_logprobs = torch.where(lacking, nan[:, None], logprob(key_values(best)))
