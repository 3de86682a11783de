"""The one field of the metadata that pyproject.toml cannot give; all others are there."""

from setuptools import setup

# sentence-transformers and others train only if the Home-page of a package named accelerate has
# "huggingface" in it. The API that this package implements is documented there.
setup(url="https://huggingface.co/docs/accelerate")
