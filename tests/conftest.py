"""Tests that need what this machine may not have are skipped, not failed. Hypothesis draws the same cases each time,
so that a failure is there again, and times none; HYPOTHESIS_PROFILE=default draws others."""

import os

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items):
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch  # slow to import, and only these tests need to know

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
