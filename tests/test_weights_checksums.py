"""The bucket checksum: sensitive to every word and to its position, equal wherever it is computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.checksums import WIDTH, checksum

WORDS = 3 * WIDTH + 100


def random_bucket(seed):
    return torch.randint(0, 256, (4 * WORDS,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 2**31), st.integers(0, 4 * WORDS - 1), st.integers(0, 7))
@settings(max_examples=50, deadline=None)
def test_a_flipped_bit_changes_it(seed, byte, bit):
    bucket = random_bucket(seed)
    before = checksum(bucket).item()
    bucket[byte] ^= 1 << bit
    assert checksum(bucket).item() != before


@given(st.integers(0, 2**31), st.integers(0, WORDS - 1), st.integers(1, WORDS - 1), st.integers(-(2**31), 2**31 - 1))
@settings(max_examples=50, deadline=None)
def test_two_swapped_words_change_it(seed, i, distance, difference):
    words, j = random_bucket(seed).view(torch.int32), (i + distance) % WORDS
    words[j] = words[i] ^ (difference or 1)
    before = checksum(words.view(torch.uint8)).item()
    words[[i, j]] = words[[j, i]]
    assert checksum(words.view(torch.uint8)).item() != before


def test_a_lone_sign_bit_has_a_place():
    words, moved = torch.zeros(WORDS, dtype=torch.int32), torch.zeros(WORDS, dtype=torch.int32)
    words[0] = moved[WIDTH * 2 + 5] = -(2**31)
    assert checksum(words.view(torch.uint8)).item() != checksum(moved.view(torch.uint8)).item()


def test_swapped_rows_and_a_shift_change_it():
    bucket = random_bucket(0)
    rows = bucket[: 4 * 3 * WIDTH].view(3, -1)
    swapped = torch.cat([rows[[1, 0, 2]].reshape(-1), bucket[4 * 3 * WIDTH :]])
    assert len({checksum(b).item() for b in (bucket, swapped, bucket.roll(4))}) == 3


@pytest.mark.parametrize("words", [4, WIDTH - 1, WIDTH, WIDTH + 1, 2 * WIDTH])
def test_it_equals_the_definition_in_python_integers(words):
    bucket = random_bucket(1)[: 4 * words]
    values, rows = bucket.view(torch.int32).tolist(), words // WIDTH
    sums = [sum(values[r * WIDTH : (r + 1) * WIDTH]) for r in range(rows)]
    sums += [sum(values[c : rows * WIDTH : WIDTH]) for c in range(WIDTH)]
    sums = [(s + 2**31) % 2**32 - 2**31 for s in sums] + values[rows * WIDTH :]
    total = 0
    for position, value in enumerate(sums, start=1):
        x = (value + position * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        total += x ^ (x >> 31)
    assert checksum(bucket).item() % 2**64 == total % 2**64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cpu_and_gpu_agree():
    bucket = random_bucket(2)
    assert checksum(bucket.cuda()).item() == checksum(bucket).item()
