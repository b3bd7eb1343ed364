"""The demo's text and schedule are the same on every machine."""

import hashlib

import pytest
import torch

from torpor.cli.char_gpt import CharGPT, Shape, Text, learning_rate_scale, make_text


def test_the_text_is_always_the_same():
    text = make_text()
    assert text == make_text()
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "7570a3c8d5b1cf06"


def test_another_seed_tells_other_tales():
    assert make_text(sentences=5, seed=1) != make_text(sentences=5, seed=2)


def test_encoding_is_undone_by_decoding():
    text = make_text(sentences=3)
    encoded = Text.encode(text)
    assert encoded.decode(encoded.tokens.tolist()) == text


def test_targets_are_the_windows_one_character_later():
    text = Text.encode(make_text(sentences=20))
    tokens, targets = text.batch(4, 16, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_the_schedule_warms_up_and_decays_to_a_tenth():
    scales = [learning_rate_scale(step, 10, 100) for step in range(100)]
    assert scales[0] == pytest.approx(0.1)
    assert scales[:10] == sorted(scales[:10])
    assert scales[10] == pytest.approx(1.0)
    assert scales[10:] == sorted(scales[10:], reverse=True)
    assert 0.1 <= scales[-1] < 0.11


def test_a_character_does_not_see_its_future():
    model = CharGPT(Shape(vocabulary=7, layers=2, width=8, length=6)).eval()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = torch.tensor([[1, 2, 3, 0, 0, 0]])
    torch.testing.assert_close(model(tokens)[:, :3], model(changed)[:, :3])
