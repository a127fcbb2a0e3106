"""Layer by layer gives what the whole model gives, family by family, and in bounded memory."""

import pytest
import torch

import tiny
from howlinear import blocks, profile
from howlinear.models import loading
from howlinear.models.layers import layers_of
from howlinear.models.offload import device_of, is_offloaded, resident
from howlinear.profiling.passes import Course
from howlinear.run.saving import Saves
from test_merging import close
from test_saving import Killed, files, killed_after

LENGTH = 64


def ids(windows, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCABULARY, (windows, LENGTH), generator=g)


WINDOWS = ids(2048 // LENGTH + 3)
SHORT = ids(1024 // 16)[:, :16]  # for models with few positions
TEXT = [name for name, t in tiny.TINY.items() if t.kind == "text"]


def without_signals(result):
    """What a backward pass says is not known layer by layer."""
    gone = ("expected_kl", "expected_kl_se", "expected_beyond")
    return [{k: v for k, v in b.to_dict().items() if k not in gone} for b in result.blocks]


@pytest.mark.parametrize("name", TEXT)
def test_every_family_gives_the_same(name):
    """The same matrices multiply the same rows: equal to the bit, but for `inputs_embeds`' masks."""
    model = tiny.model(name)
    if "vision_config" in tiny.TINY[name].settings:
        pytest.skip("pictures and text: the command reads text alone")
    whole = profile(model, SHORT, batch_size=16, folds=2, signal=False)
    result = profile(model, SHORT, course=Course(layerwise=True), batch_size=16, folds=2)
    close(without_signals(whole), without_signals(result))
    assert [b.expected_kl for b in result.blocks] == [None] * len(whole.blocks)
    assert any("layer by layer has no backward pass" in note for note in result.notes)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_two_stacks_are_refused(name):
    model = tiny.model(name)
    with pytest.raises(ValueError, match="two stacks of layers: run it without `layerwise`"):
        layers_of(model, blocks(model))


class Sneaky(torch.nn.Module):
    """A layer that also reads what the first one left behind."""

    left = None

    def __init__(self, layer, first):
        super().__init__()
        self.layer, self.first = layer, first

    def forward(self, hidden_states, *args, **kwargs):
        if self.first:
            Sneaky.left = hidden_states.mean(1, keepdim=True)
        return self.layer(hidden_states + 3 * Sneaky.left, *args, **kwargs)


def test_a_family_that_nobody_has_tried_is_tried(tmp_path):
    """Layers with a side door are found out; without one, an unknown family is fine."""
    model = tiny.model("llama")
    model.config.model_type = "unheard_of"
    honest = profile(model, SHORT, course=Course(layerwise=True))
    close(without_signals(profile(model, SHORT)), without_signals(honest))
    inner = [Sneaky(layer, i == 0) for i, layer in enumerate(model.model.layers)]
    model.model.layers = torch.nn.ModuleList(inner)
    at = blocks(model, r"model\.layers\.\d\.layer\.mlp")
    for _ in range(2):  # the second time there is nothing to go on from
        course = Course(layerwise=True, saves=Saves(tmp_path, {}, 0.0))
        with pytest.raises(ValueError, match="pass more than hidden states"):
            profile(model, SHORT, at=at, course=course)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk") / "llama"
    tiny.model("llama").save_pretrained(folder)
    return folder


def test_weights_stay_on_disk_but_for_one_layer(on_disk, monkeypatch):
    model, _ = loading.load(str(on_disk), device_map="disk")
    assert is_offloaded(model)
    assert device_of(model) == torch.device("cpu")
    most = 0
    before = torch.nn.Linear.forward

    def counting(self, x):
        nonlocal most
        most = max(most, sum(p.numel() for p in model.parameters() if p.device.type != "meta"))
        return before(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", counting)
    result = profile(model, WINDOWS, course=Course(layerwise=True))
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert layer <= most < 1.6 * layer  # and the embedding while the first one runs
    plain = profile(loading.load(str(on_disk))[0], WINDOWS)
    close(without_signals(plain), without_signals(result))
    monkeypatch.undo()
    # without --layerwise, weights come and go as modules run
    close(without_signals(plain), without_signals(profile(model, WINDOWS)))
    with resident([model.model.layers[1]]):
        held = [p.device.type for p in model.model.layers[1].parameters()]
    assert set(held) == {"cpu"}
    assert all(p.device.type == "meta" for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_walk_that_was_killed_goes_on_to_the_bit(on_disk, tmp_path, dtype):
    model, _ = loading.load(str(on_disk), device_map="disk", dtype=dtype)

    def course(folder, every):
        return Course(layerwise=True, saves=Saves(folder, {}, every))

    one = course(tmp_path / "one", 1e9)
    profile(model, WINDOWS, course=one, batch_size=7).save(tmp_path / "one")
    one.saves.close()
    total, stops = 3 * WINDOWS.numel(), 0
    while True:
        two = course(tmp_path / "two", 0.0)
        stop = killed_after(int((stops + 0.5) / 7 * total)) if stops < 7 else None
        try:
            result = profile(model, WINDOWS, course=two, batch_size=7, progress=stop)
            break
        except Killed:
            stops += 1
    assert stops == 7
    result.save(tmp_path / "two")
    two.saves.close()
    assert files(tmp_path / "two") == files(tmp_path / "one")
    assert {p.name for p in (tmp_path / "two").iterdir()} == {"profile.json", "moments", "maps"}


def walked(model, folder, asked, windows=WINDOWS, stop=None, at=None):
    saves = Saves(folder, asked, 0.0)
    progress = killed_after(stop) if stop else None
    course = Course(layerwise=True, saves=saves)
    return profile(model, windows, at=at, course=course, batch_size=7, progress=progress)


@pytest.mark.parametrize("name", ["gpt_neo", "llama"])
def test_only_what_is_missing_runs_again(name, tmp_path):
    """Layers that return tuples too; each batch goes through each layer once, kills or not."""
    model, runs = tiny.model(name), []
    layers = model.get_submodule("transformer.h" if name == "gpt_neo" else "model.layers")
    for layer in layers:
        layer.mlp.register_forward_hook(lambda *_: runs.append(1))
    total = len(layers) * WINDOWS.numel()
    want = profile(model, WINDOWS)
    runs.clear()
    for stop in (0.3 * total, 0.8 * total, None):
        try:
            got = walked(model, tmp_path, {}, stop=stop)
        except Killed:
            assert stop
    close(without_signals(want), without_signals(got))
    batches = len(layers) * -(-len(WINDOWS) // 7)
    assert batches <= len(runs) <= batches + 3 * 2 * len(layers)  # and the beginning, twice each


def test_states_of_another_text_are_not_taken(tmp_path):
    model, other = tiny.model("llama"), ids(len(WINDOWS), 5)
    with pytest.raises(Killed):  # in the last layer, before any block was measured
        walked(model, tmp_path, {"text": "a"}, stop=2.5 * WINDOWS.numel(), at="2")
    assert (tmp_path / "partial" / "0" / "states" / "states.json").is_file()
    (tmp_path / "progress.json").unlink(missing_ok=True)
    got = walked(model, tmp_path, {"text": "b"}, windows=other, at="2")
    close(without_signals(profile(model, other, at="2")), without_signals(got))


def test_damaged_states_are_refused_by_name(tmp_path):
    model = tiny.model("llama")
    with pytest.raises(Killed):
        walked(model, tmp_path, {}, stop=1.5 * WINDOWS.numel())
    last = -(-len(WINDOWS) // 7) - 1  # a batch that is yet to run
    path = tmp_path / "partial" / "0" / "states" / "1" / f"{last}.safetensors"
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-200] ^= 4
    for content in (bytes(flipped), good[:-9], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{last}\.safetensors is damaged"):
            walked(model, tmp_path, {})
    path.write_bytes(good)
    walked(model, tmp_path, {})
    vit = tiny.model("vit")
    with pytest.raises(ValueError, match="images and audio"):
        profile(vit, [tiny.inputs("vit")], course=Course(layerwise=True))


def test_a_stream_is_read_from_its_first_batch():
    model, course = tiny.model("llama"), Course(layerwise=True)
    want = profile(model, iter(WINDOWS.split(7)))
    assert profile(model, iter(WINDOWS.split(7)), course=course).blocks == want.blocks
    assert want.settings["tokens"] == WINDOWS.numel()
    with pytest.raises(ValueError, match="the text is empty"):
        profile(model, iter(()), course=course)
