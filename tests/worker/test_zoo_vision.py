"""ResNet-50 and VGG-16 classify images as published, at full and at tiny size."""

import pytest
import torch
from zoo_examples import built, inputs_of

MODELS = ["resnet-50", "vgg-16"]


@pytest.mark.parametrize("name", MODELS)
def test_resolution_is_width_by_height_and_labels_are_classes_of_the_model(name):
    inputs = inputs_of(built(name, resolution="31x16", batch_size=500))
    assert inputs["images"].shape == (500, 3, 16, 31)
    assert set(inputs["labels"].tolist()) == set(range(10))


@pytest.mark.parametrize(("name", "features"), [("resnet-50", (2048, 7, 7)), ("vgg-16", (512, 7, 7))])
def test_published_images_leave_seven_by_seven_features(name, features):
    model = built(name, "full", "meta").model
    images = torch.empty(1, 3, 224, 224, device="meta")
    maps = model.resnet(images).last_hidden_state if name == "resnet-50" else model.features[:-2](images)
    assert maps.shape == (1, *features)


def test_vgg_passes_its_signal_on_from_the_start():
    workload = built("vgg-16", batch_size=64)
    workload.model.eval()
    logits = workload.model(inputs_of(workload)["images"])
    # From torch's own start it is 1e-7.
    assert 1e-2 < logits.std(dim=0).mean() < 10


def test_batch_normalisation_learns_from_the_batch():
    workload = built("resnet-50")
    mean = next(value for name, value in workload.model.named_buffers() if name.endswith("running_mean"))
    assert (mean == 0).all()
    workload.loss(inputs_of(workload)).backward()
    assert (mean != 0).any()
