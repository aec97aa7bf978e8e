"""An older torch than the range is named, not met as a missing name somewhere."""

import pytest

import torchtitan


@pytest.mark.parametrize("installed", ["2.10.0", "1.13.1+cu117", "2.15.0.dev20261201", "3.0.0"])
def test_torch_outside_the_range_is_refused(installed: str) -> None:
    with pytest.raises(ImportError, match=r"torch .* is installed; torchtitan needs torch 2\.11 to 2\.14.*pip install"):
        torchtitan._check_torch(installed)


@pytest.mark.parametrize("installed", ["2.11.0", "2.13.0+cpu", "2.14.1+cu130"])
def test_torch_within_the_range_is_accepted(installed: str) -> None:
    torchtitan._check_torch(installed)
