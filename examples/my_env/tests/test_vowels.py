"""The check is a test: run it in your own package's CI."""

import pytest

from asyncrl.env_check import check


@pytest.mark.parametrize("target", ["my_env.vowels:Vowels", "vowels", "vowels_talk"])
def test_the_environment_works(target):
    report = check(target)
    assert report.ok, str(report)
