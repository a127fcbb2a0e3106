"""One thread for tiny models, which more would only slow down; all of them for real ones."""

import pytest
import torch

ALL = torch.get_num_threads()


def pytest_configure(config):
    config.addinivalue_line("markers", "real: runs a real model, on all cores")


@pytest.fixture(autouse=True)
def _threads(request):
    torch.set_num_threads(ALL if request.node.get_closest_marker("real") else 1)
    yield
    torch.set_num_threads(ALL)
