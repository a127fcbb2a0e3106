"""A size in bytes or a speed becomes a share of the feed-forward parameters."""

import pytest

import tiny
from howlinear import blocks
from howlinear.cli.flags import bytes_of
from howlinear.compression.goals import LENGTH, share_for_bytes, share_for_speed
from howlinear.compression.prices import Sizes
from howlinear.losses.speed import prefill_multiply_adds
from howlinear.models.families import parameter_count


@pytest.fixture(scope="module")
def net():
    return tiny.model("llama")


def test_sizes_are_read_as_they_are_written():
    assert bytes_of("200MB", "--target-size") == 200_000_000
    assert bytes_of("1.5 GB", "--target-size") == 1_500_000_000
    assert bytes_of("2MiB", "--target-size") == 2 * 2**20
    assert bytes_of("700", "--target-size") == 700
    for wrong in ("", "big", "-3MB", "0MB", "3TB5", "1e3"):
        with pytest.raises(ValueError, match=r"--target-size .* is not a size"):
            bytes_of(wrong, "--target-size")


def test_bytes_become_parameters(net):
    at, dense = blocks(net), 4 * parameter_count(net)
    removed = [
        4 * share_for_bytes(net, at, dense - cut) * Sizes(net, at).total for cut in (1000, 3000)
    ]
    assert removed[1] - removed[0] == pytest.approx(2000)
    assert removed[0] > 1000  # the file has a header, too
    with pytest.raises(ValueError, match="ask for less"):
        share_for_bytes(net, at, 2 * dense)
    with pytest.raises(ValueError, match="cannot be reached: without any feed-forward block"):
        share_for_bytes(net, at, 1)


def test_a_speed_becomes_parameters(net):
    """By the formula: layers of attention and feed-forward, scores, the head at one position."""
    at, c = blocks(net), net.config
    feed_forward = Sizes(net, at).total
    share = share_for_speed(net, at, 1.1)
    every = share * feed_forward / (1 - 1 / 1.1)  # multiply-adds a token
    d, heads = c.hidden_size, c.num_attention_heads * c.head_dim
    projections = 2 * d * heads + 2 * d * c.num_key_value_heads * c.head_dim
    scores = 2 * heads * (LENGTH + 1) / 2  # a token attends to itself and those before it
    layers = c.num_hidden_layers * (projections + scores)
    assert every == pytest.approx(feed_forward + layers + d * c.vocab_size / LENGTH)
    assert share_for_speed(net, at, 1.2) > share
    with pytest.raises(ValueError, match="cannot be reached"):
        share_for_speed(net, at, 50)


def test_experts_count_as_often_as_they_run():
    """Each token runs two of its experts: the share is of what runs, not of all parameters."""
    mixture = tiny.model("mixtral")
    at = blocks(mixture)
    least = share_for_speed(mixture, at, 1.2)
    assert share_for_speed(mixture, at, 1.1) < least < 1
    every = prefill_multiply_adds(mixture, LENGTH)
    experts = mixture.config.num_local_experts
    assert every < LENGTH * Sizes(mixture, at).total  # as if each token ran each expert
    assert experts > mixture.config.num_experts_per_tok
    with pytest.raises(ValueError, match="cannot be reached"):
        share_for_speed(mixture, at, 3)


def test_models_with_few_positions_or_without_text(net):
    short = tiny.model("gpt2", n_positions=64)
    assert 0 < share_for_speed(short, blocks(short), 1.05) < 1
    images = tiny.model("vit")
    with pytest.raises(ValueError, match="not text"):
        share_for_speed(images, blocks(images), 1.05)
