"""Small data sets made of numpy arrays: what the programs train on."""

from __future__ import annotations

import numpy as np

TEXT = (
    "the cat sat on the mat and the dog sat on the log while a bird sang to the sun "
    "and all the fish in the sea swam round and round until the moon came up again "
) * 12
NAMES = (
    "emma olivia ava isabella sophia mia amelia harper evelyn abigail emily ella lily aria "
    "grace chloe layla zoe nora hazel luna stella ruby alice clara lucy anna leah violet iris"
).split()


def digits(count: int, size: int = 16, classes: int = 10, seed: int = 1) -> tuple:
    """Grey pictures (uint8) of a bright bar whose place tells the class, and the classes."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, count)
    pictures = draw.integers(0, 60, (count, size, size), dtype=np.uint8)
    for picture, label in zip(pictures, labels, strict=True):
        row = int(label) * (size - 3) // classes
        picture[row : row + 3, 2:-2] += 150
    return pictures, labels


def clusters(count: int, features: int = 8, classes: int = 3, seed: int = 2) -> tuple:
    """Points (float32) around one centre for each class, and the classes."""
    centres = np.random.default_rng(seed).normal(0, 2, (classes, features))
    draw = np.random.default_rng(seed + 100)
    labels = draw.integers(0, classes, count)
    points = centres[labels] + draw.normal(0, 0.7, (count, features))
    return points.astype(np.float32), labels


def waves(count: int, seed: int = 3) -> tuple:
    """Two numbers in, one out."""
    draw = np.random.default_rng(seed)
    x = draw.uniform(-2, 2, (count, 2)).astype(np.float32)
    return x, (np.sin(x[:, :1]) * x[:, 1:]).astype(np.float32)


def corpus() -> tuple[np.ndarray, list[str]]:
    """A text as numbers (uint16), and its letters."""
    letters = sorted(set(TEXT))
    return np.array([letters.index(c) for c in TEXT], dtype=np.uint16), letters


def sentences(count: int, words: int = 20, longest: int = 9, seed: int = 4) -> list[np.ndarray]:
    """Sequences of words, each of its own length; 0 is left for padding."""
    draw = np.random.default_rng(seed)
    return [draw.integers(1, words, draw.integers(2, longest + 1)) for _ in range(count)]
