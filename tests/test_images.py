"""Images: what is read, how it is split, and which rows a step gets."""

from __future__ import annotations

import gzip
import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_parallel.config import Config
from mcp_parallel.data import images as images_module
from mcp_parallel.data.images import ImageSet, ImageSource, open_digits, split, to_patches
from mcp_parallel.data.source import open_data, source_of, validation_batches

DIGITS = open_digits()


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    wanted = load_digits()
    parts = (DIGITS.train, DIGITS.validation)
    assert [len(part) for part in parts] == [1438, 359]
    # A value is an image's 64 gray levels; normalising is monotone, so ranks find them again.
    levels = np.unique(np.concatenate([part.images.ravel() for part in parts]))
    assert len(levels) == 17
    found = sorted(
        (np.searchsorted(levels, image).ravel().tolist(), int(label))
        for part in parts
        for image, label in zip(part.images, part.labels, strict=True)
    )
    theirs = zip(wanted.data.astype(int).tolist(), wanted.target.tolist(), strict=True)
    assert found == sorted(theirs)


def test_the_training_part_is_normal_and_the_other_was_not_looked_at():
    train = DIGITS.train.images.astype(np.float64)
    # Rounded to float32 one by one: relative 6e-8 of values up to 3.
    assert abs(train.mean()) < 1e-6
    assert abs(train.std() - 1) < 1e-6
    held_out = DIGITS.validation.images.astype(np.float64)
    # Its own statistics are near, as those of 359 images are, and not 0 as if it had been used.
    assert 1e-4 < abs(held_out.mean()) < 0.05


def test_both_parts_hold_every_class_and_the_split_is_the_same_for_ever():
    for part in (DIGITS.train, DIGITS.validation):
        share = np.bincount(part.labels, minlength=10) / len(part)
        # A tenth each; 4 standard errors of a tenth among 359 are 0.063.
        assert (np.abs(share - 0.1) < 0.063).all()
    again = open_digits()
    assert np.array_equal(again.validation.images, DIGITS.validation.images)
    # A change here makes accuracies of older runs incomparable.
    assert DIGITS.validation.labels[:12].tolist() == [1, 2, 6, 0, 8, 0, 5, 0, 5, 0, 2, 6]


def test_channels_are_normalised_one_by_one():
    generator = np.random.default_rng(0)
    pixels = generator.normal((5.0, -3.0), (2.0, 0.5), (50, 4, 4, 2))
    parts = split(pixels, np.arange(50) % 3)
    np.testing.assert_allclose(parts.train.images.mean((0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(parts.train.images.std((0, 1, 2)), 1, atol=1e-6)
    assert len(parts.validation) == 10


def test_patches_are_the_squares_of_the_image_in_reading_order():
    pixels = np.arange(2 * 4 * 6 * 3, dtype=np.float32).reshape(2, 4, 6, 3)
    patches = to_patches(pixels, 2)
    assert patches.shape == (2, 6, 12)
    for row in range(2):
        for column in range(3):
            square = pixels[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert np.array_equal(patches[:, 3 * row + column], square.reshape(2, -1))


@settings(max_examples=25, deadline=None)
@given(step=st.integers(0, 10_000), seed=st.integers(0, 5), parts=st.sampled_from([1, 2, 4]))
def test_rows_of_any_layout_are_the_rows_of_one_process(step, seed, parts):
    source = ImageSource(DIGITS, seed, 2, 8)
    whole = source.batch(step, range(8))
    each = 8 // parts
    shares = [source.batch(step, range(i * each, (i + 1) * each)) for i in range(parts)]
    for index in range(2):
        assert np.array_equal(whole[index], np.concatenate([share[index] for share in shares]))


def test_an_epoch_sees_each_training_image_once():
    tiny = ImageSet(np.arange(10, dtype=np.float32).reshape(10, 1, 1, 1), np.arange(10))
    source = ImageSource(images_module.Images(tiny, tiny), 3, 1, 5)
    epochs = [
        np.concatenate([source.batch(2 * epoch + half, range(5))[1] for half in range(2)])
        for epoch in range(2)
    ]
    assert [sorted(epoch.tolist()) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0].tolist() != epochs[1].tolist()
    patches, labels = source.batch(0, range(5))
    assert np.array_equal(patches[:, 0, 0], labels)


@pytest.mark.parametrize("dp", [1, 2])
def test_validation_is_each_held_out_image_once(dp):
    config = Config.from_mapping({"model": {"preset": "vit-digits"}})
    source = source_of(open_data(config), config)
    share = config.train.global_batch_size // dp
    seen_images, seen_labels = [], []
    for rank in range(dp):
        rows = range(rank * share, (rank + 1) * share)
        for patches, labels, _ in validation_batches(source, config, rows):
            assert len(labels) == share
            seen_images.append(patches[labels >= 0])
            seen_labels.append(labels[labels >= 0])
            assert (labels[labels < 0] == -100).all()
    wanted, labels = DIGITS.validation.samples(np.arange(359), 2)
    found = np.concatenate(seen_images)
    order, theirs = np.lexsort(found.reshape(359, -1).T), np.lexsort(wanted.reshape(359, -1).T)
    assert np.array_equal(found[order], wanted[theirs])
    assert sorted(np.concatenate(seen_labels).tolist()) == sorted(labels.tolist())


def test_text_has_no_validation_part():
    config = Config()
    source = source_of(open_data(config), config)
    assert list(validation_batches(source, config, range(16))) == []


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        open_digits()


@pytest.mark.parametrize(
    "rows", [["0,0,1"], [",".join(["17"] * 64 + ["3"])] * 1797, [",".join(["0"] * 65)] * 1797]
)
def test_a_file_of_something_else_is_refused(tmp_path, monkeypatch, rows):
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    monkeypatch.setattr(images_module, "digits_file", lambda: path)
    with pytest.raises(ValueError, match="install scikit-learn anew"):
        open_digits()
