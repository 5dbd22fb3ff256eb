"""Noise: known answers of Philox, both ends of the uniform, and accuracy against fp64."""

from __future__ import annotations

import torch

from lmhead import noise


def test_philox_gives_the_published_words() -> None:
    """Random123's known answers for philox4x32-10 (kat_vectors): all zeros, and all ones."""
    zero = torch.zeros((), dtype=torch.int64)
    found = [int(word) for word in noise.philox(zero, zero, zero)]
    assert found == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_words_of_a_range_are_those_of_its_ids() -> None:
    seeds, positions = torch.tensor([5, -3]), torch.tensor([7, 2**40 + 1])
    ids = torch.arange(3, 40)
    one_by_one = noise.words(seeds[:, None], positions[:, None], ids[None])
    assert torch.equal(one_by_one, noise.words_of_range(seeds, positions, 3, 37))
    assert not torch.equal(one_by_one[0], one_by_one[1])


def test_e16_noise_is_finite_at_both_ends_and_where_the_formula_changes() -> None:
    border = int(noise.SMALL * 2**32)
    ends = torch.tensor([0, 1, border - 1, border, border + 1, 2**31, 2**32 - 2, 2**32 - 1])
    found = noise.gumbel(ends)
    assert found.isfinite().all() and (found[:-1] >= found[1:]).all()


def test_gumbel_noise_is_that_of_fp64_to_the_last_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    word = torch.randint(0, 2**32, (1 << 18,), generator=generator)
    v = (word.double() + 0.5) / 2**32
    truth = -torch.log(-torch.log1p(-v))
    assert (noise.gumbel(word) - truth).abs().max() < 1e-6
    assert abs(noise.gumbel(word).double().mean() - 0.5772156649) < 0.02


def test_weights_are_exponentials_in_fixed_point() -> None:
    d = -torch.linspace(0, 20, 1 << 16)
    found = noise.weight(d).double() / 2.0**noise.WEIGHT_BITS
    assert (found - d.double().exp()).abs().max() < 1e-7
    edges = noise.weight(torch.tensor([0.0, -64.0, -1e9, -torch.inf]))
    assert edges.tolist() == [1 << noise.WEIGHT_BITS, 0, 0, 0]
