"""What is right: the KV of every position of every prefix, in every layer of every rank, and the tokens that follow.

The forward of the harness is arithmetic that behaves like attention where it matters: the KV of a position is a
function of its token and of the KV *found in the cache* one position before. Wrong bytes therefore spread into all
that is computed on them and into the sampled tokens; and what is right is a pure function of the token prefix, the
layer, the rank and the weights (a number that changes when a cache reset stands for new weights).
"""

import functools
from collections.abc import Sequence

MASK = (1 << 62) - 1
LAYERS = ("layer0", "layer1")
VOCABULARY = 500


def cell(previous: int, token: int) -> int:
    """KV of one position."""
    x = (previous * 6364136223846793005 + (token + 1) * 1442695040888963407) & MASK
    return (x ^ (x >> 29)) & MASK


def seed(layer: int, rank: int, weights: int) -> int:
    """What stands before position 0."""
    return cell(layer + 17, rank + 23 + 1000 * weights)


@functools.lru_cache(maxsize=1 << 14)
def cells(tokens: tuple[int, ...], layer: int, rank: int, weights: int) -> tuple[int, ...]:
    """The right KV of every position of a prefix."""
    if not tokens:
        return ()
    head = cells(tokens[:-1], layer, rank, weights)
    return (*head, cell(head[-1] if head else seed(layer, rank, weights), tokens[-1]))


def next_token(last_cell: int) -> int:
    """What the engine samples after a position."""
    return 3 + last_cell % VOCABULARY


def right_output(prompt: Sequence[int], count: int, weights: int) -> list[int]:
    """The tokens that a prompt must lead to."""
    tokens = tuple(prompt)
    for _ in range(count):
        tokens = (*tokens, next_token(cells(tokens, 0, 0, weights)[-1]))
    return list(tokens[len(prompt) :])


def block_images(tokens: Sequence[int], block_size: int, rank: int, weights: int) -> list[tuple[int, ...]]:
    """The right cells of the last full block of a prefix, one tuple per layer."""
    return [cells(tuple(tokens), layer, rank, weights)[-block_size:] for layer in range(len(LAYERS))]


def prompt_tokens(blocks: str, tail: int, block_size: int) -> list[int]:
    """A prompt from a small alphabet: one letter per full block, then `tail` further tokens. Equal letters collide."""
    tokens: list[int] = []
    for position, letter in enumerate(blocks):
        start = 10 + (ord(letter) - ord("a")) * block_size
        tokens += [start + (position + i) % block_size for i in range(block_size)]
    return tokens + [450 + i for i in range(tail)]
