"""Noise that is a function of (seed, position, global token id) alone, and the few elementary
functions that a draw needs, bit for bit the same wherever they run.

A draw compares sums of logits and noise, and cuts a nucleus where a sum of probabilities passes a
limit.  A last bit that differs between two libraries' logarithms would then be another token.  So
everything here is made of integer operations and of fp32 products and sums that are rounded one by
one, in a stated order: a kernel that draws has to do the same, without fused multiply-adds.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
gives four words for the ids 4*i to 4*i + 3: key = the seed's two words, counter = (i, the
position's two words, 0).
"""

from __future__ import annotations

import torch

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
ROUNDS = 10
# Ids that share one call of Philox.
LANES = 4

# Cephes' logf and expf (Moshier, netlib.org/cephes, single/logf.c and expf.c), highest power first.
LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
# ln 2 as a sum whose first part has few bits.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
LOG2_E = 1.44269504088896341
# The bits of sqrt(1/2) in fp32: a mantissa from here to twice that is what LOG is good for.
ROOT_HALF_BITS = 0x3F3504F3
# Below this v, 1 - v lies above sqrt(1/2).
SMALL = 0.29289323

# Fractional bits of a weight: 2**18 weights of at most 1 stay far below 2**63.
WEIGHT_BITS = 40


def philox(
    seeds: torch.Tensor, positions: torch.Tensor, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 of int64 seeds and positions, and non-negative int64 groups (ids // 4), which
    are broadcast against each other -> its four words, int64 in 0..2**32 - 1.
    """
    shape = torch.broadcast_shapes(seeds.shape, positions.shape, groups.shape)
    key = [seeds & _WORD, (seeds >> 32) & _WORD]
    c0, c1 = groups & _WORD, positions & _WORD
    c2, c3 = (positions >> 32) & _WORD, torch.zeros_like(groups)
    for _ in range(ROUNDS):
        # A product of two words wraps in int64, but its bits are right; the shift drags the sign
        # in, and one mask takes it out again with what lies above the words of c1 and c3.  Shapes
        # are those of the arguments until they have been mixed.
        even, odd = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c2 = _mixed(odd, c1, key[0], shape), _mixed(even, c3, key[1], shape)
        c1, c3 = odd, even
        key = [(word + step) & _WORD for word, step in zip(key, _WEYL, strict=True)]
    c1, c3 = c1 & _WORD, c3 & _WORD
    return c0.expand(shape), c1.expand(shape), c2.expand(shape), c3.expand(shape)


def _mixed(
    product: torch.Tensor, word: torch.Tensor, key: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """The upper word of `product`, mixed with `word` and `key`; in place once of the full shape."""
    mixed = product >> 32
    for other in (word, key):
        mixed = mixed.bitwise_xor_(other) if mixed.shape == shape else mixed ^ other
    return mixed.bitwise_and_(_WORD)


def words(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The word of each token id (int64; broadcast against seeds and positions), in 0..2**32 - 1."""
    lanes = philox(seeds, positions, ids >> 2)
    lane = ids & 3
    low = torch.where(lane == 0, lanes[0], lanes[1])
    high = torch.where(lane == 2, lanes[2], lanes[3])
    return torch.where(lane < 2, low, high)


def words_of_range(
    seeds: torch.Tensor, positions: torch.Tensor, first: int, count: int
) -> torch.Tensor:
    """seeds and positions [R] -> words [R, count] of the ids first..first + count - 1, by one call
    of Philox for four.
    """
    start = first // LANES
    lanes = lanes_of_range(seeds, positions, start, -(-(first + count) // LANES) - start)
    together = torch.stack(lanes, dim=2).view(seeds.shape[0], -1)
    skipped = first - start * LANES
    return together[:, skipped : skipped + count]


def lanes_of_range(
    seeds: torch.Tensor, positions: torch.Tensor, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """seeds and positions [R] -> the words [R, count] of the ids 4 * i + lane, i from `first` on,
    for each of the four lanes.
    """
    groups = torch.arange(first, first + count, device=seeds.device)
    return philox(seeds[:, None], positions[:, None], groups[None])


def uniform(word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A word w -> (v, 1 - v) in fp32, v = (w + 1/2) / 2**32: neither is ever 0."""
    v = (word.to(torch.float32) + 0.5) * 2.0**-32
    rest = ((word ^ _WORD).to(torch.float32) + 0.5) * 2.0**-32
    return v, rest


def gumbel(word: torch.Tensor) -> torch.Tensor:
    """A word -> standard Gumbel noise -log(-log(1 - v)), fp32, finite for all 2**32 words.

    The noise that wins is large, where v is small: there 1 - v is never formed.
    """
    v, rest = uniform(word)
    small = v < SMALL
    z, e = _mantissa(rest)
    z = torch.where(small, -v, z)
    e = torch.where(small, torch.zeros_like(e), e)
    exponential = -_log(z, e)
    return -_log(*_mantissa(exponential))


def gumbel_near(word: torch.Tensor) -> torch.Tensor:
    """`gumbel` by the library's logarithms: faster, and off by a few of its last bits."""
    v = (word.to(torch.float32)).add_(0.5).mul_(-(2.0**-32))
    # The largest v rounds to 1, whose noise is of no use to anybody but must stay a number.
    return v.clamp_(min=-1 + 2.0**-24).log1p_().neg_().log_().neg_()


def _mantissa(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A positive normal fp32 x = (1 + z) * 2**e with 1 + z from sqrt(1/2) to sqrt(2) -> (z, e)."""
    bits = x.view(torch.int32)
    e = (bits - ROOT_HALF_BITS) >> 23
    return (bits - (e << 23)).view(torch.float32) - 1.0, e.to(torch.float32)


def _log(z: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """log((1 + z) * 2**e)."""
    square = z * z
    y = z * LOG[0] + LOG[1]
    for coefficient in LOG[2:]:
        y = y * z + coefficient
    y = y * z * square
    y = y + e * LN2_LOW
    y = y - square * 0.5
    return (z + y) + e * LN2_HIGH


def weight(d: torch.Tensor) -> torch.Tensor:
    """exp(d) of fp32 d <= 0 in fixed point: int64, 2**WEIGHT_BITS for 1.

    Sums of integers do not depend on their order, so a nucleus is the same set wherever it is cut.
    """
    d = d.clamp(min=-64.0)
    n = torch.floor(d * LOG2_E + 0.5)
    r = d - n * LN2_HIGH
    r = r - n * LN2_LOW
    y = r * EXP[0] + EXP[1]
    for coefficient in EXP[2:]:
        y = y * r + coefficient
    y = y * (r * r) + r + 1.0
    return (y * 2.0**WEIGHT_BITS).to(torch.int64) >> (-n).to(torch.int64)
